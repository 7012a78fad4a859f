"""Runs GPT-2 as a student's pipeline, and transformers' own model; sent to ranks as source, see grader/in_rank.py."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace  # noqa: F401 (for what is sent beside this file)
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

if TYPE_CHECKING:  # what it finds in a rank
    from grader.wire.values import Fields
    from tests.pipeline.pipe_in_rank import PipeWatch

RATE = 0.1  # of the SGD between two steps


def config_of(arguments: Fields) -> GPT2Config:
    sizes: dict[str, Any] = {"n_embd": 8, "n_head": 2, "n_positions": 12, "bos_token_id": 0, "eos_token_id": 0}
    sizes |= {"n_layer": arguments["blocks"], "vocab_size": arguments["vocabulary"]}
    return GPT2Config(**sizes, embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0)


def plain_gpt2(arguments: Fields, seed: int) -> GPT2LMHeadModel:
    """Return transformers' model, with weights so large that every layer matters."""
    torch.manual_seed(seed)
    model = GPT2LMHeadModel(config_of(arguments)).double()
    for weight in model.parameters():
        nn.init.normal_(weight.data, std=0.4)
    return model


def first_blocks(arguments: Fields) -> list[int]:
    """Return the number of the first block of every partition."""
    blocks, devices = arguments["blocks"], arguments["devices"]
    return [math.ceil(j * blocks / devices) for j in range(devices)]


def steps_of(model: Any, inputs: Fields, begin: Callable[[int], None] = lambda step: None) -> list[Fields]:
    """Return loss and gradients of each step; after each, change the parameters as SGD does."""
    steps = []
    for step, (tokens, labels) in enumerate(zip(inputs["tokens"], inputs["labels"], strict=True)):
        begin(step)
        model.zero_grad()
        arguments = {"input_ids": tokens, "labels": labels}
        if inputs["mask"] is not None:
            positions = (inputs["mask"].cumsum(1) - 1).clamp(min=0)
            arguments |= {"attention_mask": inputs["mask"], "position_ids": positions}
        output = model(**arguments)
        output.loss.backward()
        gradients = {name: p.grad if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
        steps.append({"loss": output.loss.detach(), "gradients": gradients})
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p -= RATE * p.grad
    return steps


# --- a student's model ---


def watch_blocks(event: Callable[..., None], blocks: list[nn.Module]) -> None:
    """Report every call of a block, with the number of examples, and whether it runs in the caller's thread."""

    def watched(number: int) -> Callable[..., None]:
        def called(module: object, arguments: tuple, keywords: dict) -> None:
            x = [*arguments, *keywords.values()][0]
            in_caller = threading.current_thread() is threading.main_thread()
            event("block", number=number, examples=len(x), in_caller=in_caller)

        return called

    for number, block in enumerate(blocks):
        block.register_forward_pre_hook(watched(number), with_kwargs=True)


def let_meet(watch: PipeWatch, blocks: list[nn.Module], arguments: Fields) -> Callable[[int], None]:
    """Let the first block of every partition wait for its group. Returns begin(step), to be called before each step."""
    calls = Counter[int]()

    def begin(step: int) -> None:
        watch.present.clear()
        watch.met.clear()
        calls.clear()

    def enter_of(j: int) -> Callable[..., None]:
        def enter(module: object, arguments: tuple) -> None:
            calls[j] += 1
            watch.enter((calls[j] - 1, j))

        return enter

    def leave_of(j: int) -> Callable[..., None]:
        return lambda module, arguments, output: watch.leave((calls[j] - 1, j))

    for j, number in enumerate(first_blocks(arguments) if blocks else ()):
        blocks[number].register_forward_pre_hook(enter_of(j))
        blocks[number].register_forward_hook(leave_of(j))
    return begin


def names_of(model: nn.Module) -> dict[str, set[str]]:
    """Return the names of all that a pipeline must not change: what is saved, parameters, modes and types."""
    modes = {
        f"{name or 'the model'} ({module.training})" for name, module in model.named_modules() if "h_pp" not in name
    }
    modes |= {f"{name} ({p.requires_grad}, {p.dtype})" for name, p in model.named_parameters()}
    return {"saved": set(model.state_dict()), "parameters": set(dict(model.named_parameters())), "modes": modes}


def described(pipe: Any, blocks: list[nn.Module]) -> Fields:
    """Return the parts of a Pipe: the numbers of the blocks in each partition, and the types of other layers in it."""
    kind = type(pipe).__name__[:60]
    if not hasattr(pipe, "partitions"):
        return {"type": kind}
    numbers = {id(block): number for number, block in enumerate(blocks)}

    def is_strange(layer: nn.Module) -> bool:
        has_block = any(id(inner) in numbers for inner in layer.modules())
        return not has_block and bool(list(layer.parameters()))

    strangers = [
        type(layer).__name__[:60] for part in pipe.partitions for layer in part.children() if is_strange(layer)
    ]
    return {
        "type": kind,
        "partitions": [[numbers[id(m)] for m in part.modules() if id(m) in numbers] for part in pipe.partitions],
        "strangers": strangers[:5],
        "devices": [str(device)[:60] for device in pipe.devices],
        "split_size": int(pipe.split_size),
    }
