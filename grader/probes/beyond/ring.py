"""Runs both halves of a student's ring on drawn tensors. Arguments of all: file, mine (one item for each case)."""

from typing import Any

import torch

from grader.inside.context import Context


def reduce_scatter(context: Context) -> list[Any]:
    """mine: the tensors. Returns of each: the chunks, and the tensor itself afterwards; the name of what is no list."""
    ring = context.load(context.arguments["file"])
    mine = context.arguments["mine"]
    context.join()
    found = []
    for flat in narrowed(mine["tensors"], mine["dtypes"]):
        context.event("begin")
        chunks = ring.reduce_scatter(flat)
        if isinstance(chunks, list | tuple) and all(isinstance(chunk, torch.Tensor) for chunk in chunks):
            found.append({"chunks": [chunk.clone() for chunk in chunks], "flat": flat.clone()})
        else:
            found.append({"type": type(chunks).__name__})
    return found


def all_gather(context: Context) -> list[list[torch.Tensor]]:
    """mine: lists of chunks. Returns them as they are afterwards."""
    ring = context.load(context.arguments["file"])
    mine = context.arguments["mine"]
    context.join()
    found = []
    for chunks, dtype in zip(mine["tensors"], mine["dtypes"], strict=True):
        given = narrowed(chunks, [dtype] * len(chunks))
        context.event("begin")
        ring.all_gather(list(given))
        found.append([chunk.clone() for chunk in given])
    return found


def narrowed(tensors: list[torch.Tensor], dtypes: list[str]) -> list[torch.Tensor]:
    """In their dtypes; bfloat16 comes as float32."""
    return [tensor.to(getattr(torch, dtype)).clone() for tensor, dtype in zip(tensors, dtypes, strict=True)]
