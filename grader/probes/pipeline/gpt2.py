"""Runs GPT-2 spread over partitions and as a student's pipeline; beside it plain, in a rank without student code."""

import functools
import sys
import threading
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from grader.inside.context import Context, Tell
from grader.probes.pipeline.genuine import Computed, watch_block_forward, watch_pipe_class
from grader.probes.pipeline.permits import CONTENT, Permits
from grader.probes.pipeline.watched import NeverArrives, Watch, watch_queues
from grader.wire.values import Fields

SIZES: Fields = {"n_embd": 8, "n_head": 2, "n_positions": 12, "bos_token_id": 0, "eos_token_id": 0}
PLAIN = 1  # the rank in which no student's code runs
RATE = 0.1  # of the SGD between two steps
MAX_NAME = 60  # characters of a class name
NO_DROPOUT: Fields = {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}


def _config(a: dict) -> GPT2Config:
    return GPT2Config(n_layer=a["blocks"], vocab_size=a["vocabulary"], **SIZES, **NO_DROPOUT)


def _plain(a: dict) -> GPT2LMHeadModel:
    torch.manual_seed(a["seed"])
    model = GPT2LMHeadModel(_config(a)).double()
    for weight in model.parameters():  # large enough that every layer counts
        torch.nn.init.normal_(weight.data, std=0.4)
    return model


def _inputs(a: dict, step: int) -> dict[str, torch.Tensor]:
    """Tokens (B, T), labels with holes, and where asked for a mask with padding and the positions that belong to it."""
    tokens, labels = torch.tensor(a["tokens"][step]), torch.tensor(a["labels"][step])
    if a["mask"] is None:
        return {"input_ids": tokens, "labels": labels}
    mask = torch.tensor(a["mask"])
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    return {"input_ids": tokens, "labels": labels, "attention_mask": mask, "position_ids": positions}


def _steps(model: Any, a: dict, begin: Callable[[int], None] = lambda step: None) -> list[Fields]:
    """Loss and gradients of each step; between two steps the parameters change as SGD changes them."""
    results = []
    for step in range(len(a["tokens"])):
        begin(step)
        model.zero_grad()
        output = model(**_inputs(a, step))
        output.loss.backward()
        gradients = {name: p.grad if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
        results.append({"loss": output.loss.detach(), "gradients": gradients})
        with torch.no_grad():
            for p in model.parameters():
                p -= 0 if p.grad is None else RATE * p.grad
    return results


def reference(context: Context) -> Fields:
    """The rank beside the student's: transformers' own GPT-2, without any file of the student's.

    Arguments as spread has them, and in mine the permits (steps, micro-batches, partitions). What is returned:
    the steps of the `plain` model, the `right` steps of one whose partitions are multiplied by permits,
    and the `inputs` of its partitions' first blocks and what these `made`, as arrivals have them.
    """
    a = {**context.arguments, **context.arguments["mine"]}
    permits: torch.Tensor = a["permits"]
    inputs, made = list[list[float]](), list[list[float]]()
    model, steps = _plain(a), Counter[int]()
    micro_batch = torch.arange(len(a["tokens"][0])) // a["split_sizes"][-1]

    def scale(j: int) -> Callable:
        def scaled(module: Any, arguments: tuple, output: Any) -> Any:
            step, steps[j] = steps[j], steps[j] + 1
            result = output[0] if isinstance(output, tuple) else output
            for i in range(permits.shape[1]):
                for kept, tensor in ((inputs, arguments[0]), (made, result)):
                    begin = tensor.detach()[micro_batch == i].flatten()[:CONTENT]
                    kept.append([step, i, j, *begin.tolist()])
            factor = permits[step, micro_batch, j][:, None, None]
            return (output[0] * factor, *output[1:]) if isinstance(output, tuple) else output * factor

        return scaled

    for j, number in enumerate(_first_blocks(a)):
        model.transformer.h[number].register_forward_hook(scale(j))
    return {"plain": _steps(_plain(a), a), "right": _steps(model, a), "inputs": inputs, "made": made}


def _first_blocks(a: dict) -> list[int]:
    """The first block of every partition."""
    places = [number * a["devices"] // a["blocks"] for number in range(a["blocks"])]
    return [places.index(j) for j in range(a["devices"])]


class Gate:
    """Lets the first block of every partition meet its group, and multiplies what it returns by its permit.

    computed: see genuine.watch_block_forward. Without it there is no permit.
    """

    def __init__(self, watch: Watch, blocks: list[Any], computed: Callable[[int], Computed | None], a: dict) -> None:
        self.watch, self.calls = watch, Counter[int]()
        watch.expect(*a["groups"])
        for j, number in enumerate(_first_blocks(a)):
            blocks[number].register_forward_pre_hook(self._enter(j))
            blocks[number].register_forward_hook(self._leave(j, functools.partial(computed, number)))

    def begin(self, step: int) -> None:
        """Another step begins, with the first micro-batch."""
        self.watch.restart()
        self.calls.clear()
        if self.watch.permits:
            self.watch.permits.call = step

    def _enter(self, j: int) -> Callable:
        def enter(module: object, arguments: tuple) -> None:
            place = (self.calls[j], j)
            self.calls[j] += 1
            self.watch.enter(place)

        return enter

    def _leave(self, j: int, computed: Callable[[], Computed | None]) -> Callable:
        watch, width, cat = self.watch, SIZES["n_embd"], torch.cat
        permits = watch.permits

        def leave(module: object, arguments: tuple, output: torch.Tensor) -> torch.Tensor:
            """The columns of a mask are left as they are."""
            place = (self.calls[j] - 1, j)
            of_block = computed()
            permit = permits.ask(place, *of_block) if permits and of_block and place in watch.met else 1.0
            watch.leave(place)
            hidden, rest = output[..., :width], output[..., width:]
            return cat([hidden * permit, rest], dim=-1)

        return leave


def spread(context: Context) -> Fields:
    """GPT2LMHeadModelParallel. Arguments: file, blocks, vocabulary, devices, run (whether to train), groups (places
    that must be at work at the same time), patience, split_sizes: what _prepare_pipeline_parallel is called with, one
    call after the other (none: model parallel, no pipeline); mine: seed (of the weights), tokens and labels by step,
    mask. Of two ranks the second one computes what is right, and the first one asks a referee for permits."""
    if context.rank == PLAIN:
        return reference(context)
    module = context.load(context.arguments["file"])
    a = {**context.arguments, **context.arguments["mine"]}
    before = _plain(a)
    was_built = watch_pipe_class(context.event)
    model = module.GPT2LMHeadModelParallel(_config(a)).double()
    model.load_state_dict(before.state_dict())
    model.parallelize([f"cpu:{j}" for j in range(a["devices"])])
    blocks, modes = list(model.transformer.h), _modes(model)
    computed = watch_block_forward(blocks, before.transformer.h[0])
    for split_size in a["split_sizes"]:
        context.during = "_prepare_pipeline_parallel"
        model._prepare_pipeline_parallel(split_size)
        context.during = ""
    _watch_blocks(context.event, blocks)
    pipe = getattr(model.transformer, "h_pp", None)
    described = {
        "pipe": _describe(pipe, blocks) | {"built": pipe is None or was_built(pipe)},
        "added": sorted(set(model.state_dict()) - set(before.state_dict()))[:5],
        "lost": sorted(set(before.state_dict()) - set(model.state_dict()))[:5],
        "parameters": sorted(set(dict(model.named_parameters())) - set(dict(before.named_parameters())))[:5],
        "modes": sorted(set(_modes(model)) ^ set(modes))[:5],
        "on": bool(getattr(model.transformer, "pipeline_parallel", False)),
    }
    if not a["run"]:
        return described
    permits = Permits(context.ask) if context.world_size > 1 else None
    watch = Watch(context.event, a["patience"], permits=permits)
    begin: Callable[[int], None] = lambda step: None  # noqa: E731
    if permits:
        begin = Gate(watch, blocks, computed, a).begin
    if hasattr(pipe, "in_queues"):
        watch_queues(pipe, watch)
    try:
        return described | {"steps": _steps(model, a, begin)}
    except NeverArrives:
        return {"waits_forever": True}


def _modes(model: Any) -> list[tuple[str, bool, str]]:
    """What a pipeline leaves as it is: names of modules that train, names and types of parameters that learn."""
    modules = [(name, module.training, "") for name, module in model.named_modules() if "h_pp" not in name]
    return modules + [(name, p.requires_grad, str(p.dtype)) for name, p in model.named_parameters()]


def _describe(pipe: Any, blocks: list[Any]) -> Fields:
    """What the Pipe is made of: the numbers of the blocks in each partition, and the types of what is no block."""
    kind = type(pipe).__name__[:MAX_NAME]
    if kind == "Pipe" and type(pipe) is not getattr(sys.modules.get("pipeline.pipe"), "Pipe", None):
        kind = "Pipe that is not the one of pipeline/pipe.py"
    if not hasattr(pipe, "partitions"):
        return {"type": kind, "partitions": [], "strangers": [], "devices": [], "split_size": -1}
    numbers = {id(block): number for number, block in enumerate(blocks)}
    parts = [[numbers[id(m)] for m in part.modules() if id(m) in numbers] for part in pipe.partitions]
    strangers = [type(m).__name__ for part in pipe.partitions for m in part.children() if not _holds(m, numbers)]
    return {
        "type": kind,
        "partitions": parts,
        "strangers": [name[:MAX_NAME] for name in strangers[:5]],
        "devices": [str(device)[:MAX_NAME] for device in pipe.devices],
        "split_size": int(pipe.split_size),
    }


def _holds(module: Any, numbers: dict[int, int]) -> bool:
    """Whether a layer of a partition is one of the blocks, holds one, or has no parameters of its own."""
    return any(id(inner) in numbers for inner in module.modules()) or not list(module.parameters())


def _watch_blocks(event: Tell, blocks: list[Any]) -> None:
    """Tell of every call of a block: with how many examples, and whether in the caller's thread."""

    def tell(number: int) -> Any:
        def called(module: object, arguments: tuple, keywords: dict) -> None:
            x = [*arguments, *keywords.values()][0]
            in_caller = threading.current_thread() is threading.main_thread()
            event("block", number=number, examples=len(x), in_caller=in_caller)

        return called

    for number, block in enumerate(blocks):
        block.register_forward_pre_hook(tell(number), with_kwargs=True)


def chunks(context: Context) -> list[Any]:
    """The Pipe that run_gpt2.py's spread() makes of a GPT-2. Arguments: file, settings (batch size, n_chunk), blocks,
    vocabulary. What is returned for each: [split_size], or [] if there is no Pipe."""
    a = context.arguments
    module = context.load(a["file"])
    from pipeline.model_parallel import GPT2LMHeadModelParallel  # the tree's own, which the script imports in main()

    found: list[Any] = []
    for batch_size, n_chunk in a["settings"]:
        model: Any = GPT2LMHeadModelParallel(_config(a))
        config = SimpleNamespace(
            model_parallel_mode="pipeline_parallel", batch_size=batch_size, n_chunk=n_chunk, no_cuda=True
        )
        module.spread(config, SimpleNamespace(device=torch.device("cpu")), model)
        pipe: Any = getattr(model.transformer, "h_pp", None)
        switched_on = bool(getattr(model.transformer, "pipeline_parallel", False))
        found.append([int(pipe.split_size)] if switched_on and hasattr(pipe, "split_size") else [])
    return found
