"""Runs GPT-2 plain, spread over partitions, and as a student's pipeline, on the same weights and tokens."""

import threading
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from grader.probes import Context

SIZES: dict[str, Any] = {"n_embd": 8, "n_head": 2, "n_positions": 12, "bos_token_id": 0, "eos_token_id": 0}
NO_DROPOUT: dict[str, Any] = {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}


def _config(a: dict) -> GPT2Config:
    return GPT2Config(n_layer=a["blocks"], vocab_size=a["vocabulary"], **SIZES, **NO_DROPOUT)


def _plain(a: dict) -> GPT2LMHeadModel:
    torch.manual_seed(a["seed"])
    model = GPT2LMHeadModel(_config(a)).double()
    for weight in model.parameters():  # large enough that every layer counts
        torch.nn.init.normal_(weight.data, std=0.4)
    return model


def _inputs(a: dict) -> dict[str, torch.Tensor]:
    """Tokens (B, T), labels with holes, and where asked for a mask with padding and the positions that belong to it."""
    tokens, labels = torch.tensor(a["tokens"]), torch.tensor(a["labels"])
    if a["mask"] is None:
        return {"input_ids": tokens, "labels": labels}
    mask = torch.tensor(a["mask"])
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    return {"input_ids": tokens, "labels": labels, "attention_mask": mask, "position_ids": positions}


def _step(model: Any, a: dict) -> dict[str, Any]:
    output = model(**_inputs(a))
    output.loss.backward()
    return {"loss": output.loss, "gradients": {name: parameter.grad for name, parameter in model.named_parameters()}}


def plain(context: Context) -> dict[str, Any]:
    """transformers' own GPT-2, without any file of the student's. Arguments: seed, blocks,
    vocabulary, tokens, labels, mask."""
    return _step(_plain(context.arguments), context.arguments)


def spread(context: Context) -> dict[str, Any]:
    """GPT2LMHeadModelParallel. Arguments: as plain, and file, split_size (0: model parallel, no pipeline), step."""
    a = context.arguments
    module = context.load(a["file"])
    before = _plain(a)
    model = module.GPT2LMHeadModelParallel(_config(a)).double()
    model.load_state_dict(before.state_dict())
    model.parallelize([f"cpu:{j}" for j in range(a["devices"])])
    blocks = list(model.transformer.h)
    if a["split_size"]:
        context.during = "_prepare_pipeline_parallel"
        model._prepare_pipeline_parallel(a["split_size"])
        context.during = ""
    _watch(context, blocks)
    pipe = getattr(model.transformer, "h_pp", None)
    told = {
        "pipe": _describe(pipe, blocks),
        "added": sorted(set(model.state_dict()) - set(before.state_dict())),
        "lost": sorted(set(before.state_dict()) - set(model.state_dict())),
        "parameters": sorted(set(dict(model.named_parameters())) - set(dict(before.named_parameters()))),
        "on": bool(getattr(model.transformer, "pipeline_parallel", False)),
    }
    return told | (_step(model, a) if a["step"] else {})


def _describe(pipe: Any, blocks: list[Any]) -> dict[str, Any]:
    """What the Pipe is made of: the numbers of the blocks in each partition, -1 for what is none."""
    if not hasattr(pipe, "partitions"):
        return {"type": type(pipe).__name__, "partitions": [], "devices": [], "split_size": -1}
    numbers = {id(block): number for number, block in enumerate(blocks)}
    parts = [[numbers[id(m)] for m in part.modules() if id(m) in numbers] for part in pipe.partitions]
    strangers = [type(m).__name__ for part in pipe.partitions for m in part.children() if not _holds(m, numbers)]
    return {
        "type": type(pipe).__name__,
        "partitions": parts,
        "strangers": strangers,
        "devices": [str(device) for device in pipe.devices],
        "split_size": int(pipe.split_size),
    }


def _holds(module: Any, numbers: dict[int, int]) -> bool:
    """Whether a layer of a partition is one of the blocks, holds one, or has no parameters of its own."""
    return any(id(inner) in numbers for inner in module.modules()) or not list(module.parameters())


def _watch(context: Context, blocks: list[Any]) -> None:
    """Tell of every call of a block: with how many examples, and whether in the caller's thread."""

    def tell(number: int) -> Any:
        def called(module: Any, arguments: tuple, keywords: dict) -> None:
            x = [*arguments, *keywords.values()][0]
            in_caller = threading.current_thread() is threading.main_thread()
            context.event("block", number=number, examples=len(x), in_caller=in_caller)

        return called

    for number, block in enumerate(blocks):
        block.register_forward_pre_hook(tell(number), with_kwargs=True)


def chunks(context: Context) -> list[Any]:
    """What run_gpt2.py's spread() asks the pipeline for. Arguments: file, settings (batch size, n_chunk)."""
    from types import SimpleNamespace

    module = context.load(context.arguments["file"])
    asked: list[Any] = []
    for batch_size, n_chunk in context.arguments["settings"]:

        def prepare(split_size: Any = 1) -> None:
            asked.append(split_size)

        model = SimpleNamespace(
            transformer=SimpleNamespace(h=[None, None]), parallelize=lambda devices: None,
            _prepare_pipeline_parallel=prepare, to=lambda device: None,
        )  # fmt: skip
        config = SimpleNamespace(
            model_parallel_mode="pipeline_parallel", batch_size=batch_size, n_chunk=n_chunk, no_cuda=True
        )
        before = len(asked)
        module.spread(config, SimpleNamespace(device=torch.device("cpu")), model)
        asked[before:] = [asked[before:]]
    return asked
