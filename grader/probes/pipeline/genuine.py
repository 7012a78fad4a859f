"""Sees in a rank that transformers' own code computes GPT-2's blocks, and that a Pipe was built and is called."""

import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

from grader.inside.context import Tell
from grader.probes.pipeline.permits import is_plain, mode_stacks

Computed = tuple[torch.Tensor, torch.Tensor]  # hidden states that a block was given, and what it made of them


def watch_block_forward(blocks: list[Any], plain_block: nn.Module) -> Callable[[int], Computed | None]:
    """From now on what GPT2Block.forward computes for `blocks` is kept for the thread in which it does.

    Returns computed(number): what this thread has computed last for this block, once; None if it has not, or if a layer
    in the block is no longer as it is in `plain_block`. A block of a student's file calls GPT2Block.forward, and may do
    or leave what it likes beside that.
    """
    kinds = {type(layer) for layer in plain_block.modules()}
    numbers = {id(block): number for number, block in enumerate(blocks)}
    as_made = {number: list(_layers(block)) for number, block in enumerate(blocks)}
    for number, layers in list(as_made.items()):
        if any(type(layer) not in kinds or "forward" in names for layer, _, names, *_ in layers):
            del as_made[number]
    kept: dict[tuple[int, int], Computed] = {}
    forward, ident, stacks, plain, layers_of = GPT2Block.forward, threading.get_ident, mode_stacks(), is_plain, _layers

    @functools.wraps(forward)
    def keep(block: Any, hidden_states: Any, *arguments: Any, **keywords: Any) -> Any:
        number = numbers.get(id(block), -1)
        unchanged = plain(hidden_states, stacks) and as_made.get(number) == list(layers_of(block))
        result = forward(block, hidden_states, *arguments, **keywords)
        if unchanged:
            kept[ident(), number] = hidden_states, result[0] if isinstance(result, tuple) else result
        return result

    setattr(GPT2Block, "forward", keep)  # noqa: B010 (mypy: a method is not assigned to)
    return lambda number: kept.pop((ident(), number), None)


def _layers(block: nn.Module) -> Iterator[tuple]:
    """Each layer in a block, with what decides what a call of it does."""
    for layer in block.modules():
        if layer is not block:
            hooks = [*layer._forward_hooks, *layer._forward_pre_hooks]
            yield layer, type(layer).forward, frozenset(vars(layer)), hooks, vars(layer).get("_compiled_call_impl")


def watch_pipe_class(event: Tell) -> Callable[[Any], bool]:
    """Tell where a call of a Pipe begins and ends, and whether a Pipe(...) was built. After the student's file is
    loaded. Returns was_built(pipe)."""
    kind: Any = getattr(sys.modules.get("pipeline.pipe"), "Pipe", None)
    if not isinstance(kind, type):
        return lambda pipe: False
    built = weakref.WeakSet[Any]()
    build, call = getattr(kind, "__init__"), getattr(kind, "__call__")  # noqa: B004, B009 (mypy: unsound)

    @functools.wraps(build)
    def init(pipe: object, *arguments: object, **keywords: object) -> None:
        build(pipe, *arguments, **keywords)
        built.add(pipe)

    @functools.wraps(call)
    def called(pipe: object, *arguments: object, **keywords: object) -> Any:
        event("pipe", begins=True, built=pipe in built)
        try:
            return call(pipe, *arguments, **keywords)
        finally:
            event("pipe", begins=False, built=pipe in built)

    setattr(kind, "__init__", init)  # noqa: B010
    setattr(kind, "__call__", called)  # noqa: B010
    return lambda pipe: pipe in built
