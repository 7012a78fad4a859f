"""Runs a student's data partition: the partitioner alone, and partition_dataset in a process group."""

import operator
import random
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from grader.probes import Context


class Data:
    """Examples that cannot be mistaken for their indices: example i is the text `example i`."""

    def __init__(self, length: int) -> None:
        self.items = [f"example {i}" for i in range(length)]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: Any) -> Any:
        return self.items[index]

    def __setitem__(self, index: Any, example: Any) -> None:
        """So that a partitioner which shuffles the caller's data is told so, instead of crashing."""
        self.items[index] = example


def number(example: Any) -> int:
    """Which example this is; -1 for anything else, such as an index."""
    words = str(example).split()
    return int(words[1]) if len(words) == 2 and words[0] == "example" and words[1].isdigit() else -1


def indices_of(partitions: Any) -> list[list[int]] | str:
    """The partitions as lists of numbers; where they are none, what stands there instead, as text."""
    try:
        return [[operator.index(index) for index in part] for part in partitions]
    except TypeError:
        return repr(partitions)[:80]


def _draw_noise(amount: int) -> None:
    for _ in range(amount):
        random.random(), np.random.random(), torch.rand(1)


def partition(context: Context) -> list[Any]:
    """Partition(data, index): what it gives place by place. Arguments: file, length, index, kind of index."""
    a = context.arguments
    module = context.load(a["file"])
    index = {"list": a["index"], "tuple": tuple(a["index"]), "array": np.array(a["index"])}[a["kind"]]
    part = module.Partition(Data(a["length"]), index)
    return [number(part[place]) for place in range(len(part))]


def partitioner(context: Context) -> dict[str, Any]:
    """DataPartitioner(data, sizes, seed). Arguments: length, sizes, partition_seed, noise (random numbers before)."""
    a = context.arguments
    module = context.load(a["file"])
    data = Data(a["length"])
    _draw_noise(a["noise"])
    made = module.DataPartitioner(data, a["sizes"], a["partition_seed"])
    changed = data.items != Data(a["length"]).items
    return {"partitions": indices_of(made.partitions), "data_changed": changed}


def use(context: Context) -> list[Any]:
    """use(k) of every partition, in two rounds. Arguments: length, sizes, partition_seed."""
    a = context.arguments
    module = context.load(a["file"])
    made = module.DataPartitioner(Data(a["length"]), a["sizes"], a["partition_seed"])
    rounds = []
    for _ in range(2):
        _draw_noise(3)
        parts = [made.use(k) for k in range(len(a["sizes"]))]
        rounds.append([[number(part[place]) for place in range(len(part))] for part in parts])
    return [*rounds, indices_of(made.partitions)]


def one_workers_order(context: Context) -> list[int]:
    """The order of the first epoch on one worker, see common/samplers.py; loads nothing. Arguments: length, seed."""
    generator = torch.Generator().manual_seed(context.arguments["seed"])
    return torch.randperm(context.arguments["length"], generator=generator).tolist()


def loader(context: Context) -> dict[str, Any]:
    """partition_dataset on this rank of a process group. Arguments: length, batch (of all workers)."""
    a = context.arguments
    module = context.load(a["file"])
    context.join()
    _draw_noise(context.rank)
    return _listed(module, a, {})


def loaders_told(context: Context) -> list[dict[str, Any]]:
    """The same without a process group, for every rank in turn. Arguments: length, batch, workers."""
    a = context.arguments
    module = context.load(a["file"])
    return [_listed(module, a, {"rank": rank, "world_size": a["workers"]}) for rank in range(a["workers"])]


def _listed(module: Any, a: dict, place: dict) -> dict[str, Any]:
    collated = []

    def collate(examples: list) -> list:
        collated.append(len(examples))
        return list(examples)

    result = module.partition_dataset(Data(a["length"]), a["batch"], collate, **place)
    pair = isinstance(result, tuple) and len(result) == 2
    loader, batch = result if pair else (result, -1)
    is_loader = pair and isinstance(loader, DataLoader)
    batches = [[number(example) for example in examples] for examples in loader] if is_loader else []
    return {
        "is_loader": is_loader,
        "types": f"a {type(loader).__name__}" if not pair else f"({type(loader).__name__}, {type(batch).__name__})",
        "batch": batch if isinstance(batch, int) else -1,
        "batches": batches,
        "len": len(loader) if is_loader else -1,
        "collated": len(collated) == len(batches),
    }
