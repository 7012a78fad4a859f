"""Runs a student's data partition: the partitioner alone, and partition_dataset in a process group."""

import operator
import random
import reprlib
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Subset

from grader.inside.context import Context
from grader.wire.values import Fields

MORE_THAN_ANY = 200  # examples, batches and partitions: whoever gives more never ends


class Data:
    """Examples that say nothing of their indices: texts that were drawn for this run. The judge numbers them."""

    def __init__(self, texts: list[str]) -> None:
        self.items = list(texts)
        self.reads = 0

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: Any) -> Any:
        self.reads += 1
        return self.items[index]

    def __setitem__(self, index: Any, example: Any) -> None:
        """A partitioner that shuffles the caller's data is reported, instead of crashing."""
        self.items[index] = example


class Owned:
    """What the caller keeps: the data, the sizes, the global random generators. `changed` names what did not stay."""

    def __init__(self, data: Data, sizes: list[float]) -> None:
        self.data, self.sizes = data, sizes
        self._items, self._sizes = list(data.items), list(sizes)
        self._generators = _generators()

    def changed(self) -> Fields:
        """The data, the sizes as they are now (None if they stayed), and the names of generators that moved."""
        now = _generators()
        return {
            "data": self.data.items != self._items,
            "sizes": None if self.sizes == self._sizes else [float(size) for size in self.sizes],
            "generators": [name for name, state in self._generators.items() if now[name] != state],
        }


def _generators() -> Fields:
    """The states of the global random generators, by the names under which programs use them."""
    return {
        "random": random.getstate(),
        "numpy.random": _numpy_state(),
        "torch": torch.get_rng_state().tolist(),
    }


def _numpy_state() -> list:
    state: Any = np.random.get_state()
    return [state[0], state[1].tolist(), *state[2:]]


def text(example: object) -> str:
    """An example as it is; anything else, such as an index, in words."""
    return str(example) if isinstance(example, str) else in_words(example)


def in_words(value: object) -> str:
    """A value as a message shows it. An object that shows nothing but its address is shown as its type."""
    shown = reprlib.repr(value)
    return f"a {type(value).__name__}" if " at 0x" in shown or shown.startswith("<") else shown


def indices_of(partitions: Any) -> list[list[int]] | str:
    """The partitions as lists of numbers; otherwise what is there instead, in words."""
    if not hasattr(partitions, "__len__"):
        return in_words(partitions)
    found: list[list[int]] = []
    for number_, part in enumerate(islice(partitions, MORE_THAN_ANY)):
        if not hasattr(part, "__len__") or not hasattr(part, "__getitem__"):
            return f"{in_words(part)} as partition {number_}"
        indices = list(islice(part, MORE_THAN_ANY))
        try:
            found.append([operator.index(index) for index in indices])
        except TypeError:
            wrong = next(index for index in indices if not hasattr(index, "__index__"))
            return f"a {type(part).__name__} with {in_words(wrong)} as partition {number_}"
    return found


def examples_of(dataset: object) -> list[str] | str:
    """The examples of a map-style data set, place by place, twice; otherwise what is wrong with it, in words."""
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        return f"got {in_words(dataset)}, which does not support len() and indexing"
    first, again = ([text(dataset[place]) for place in range(min(len(dataset), MORE_THAN_ANY))] for _ in range(2))
    return first if first == again else "the second pass over it gives different examples than the first"


def _draw_noise(amount: int) -> None:
    for _ in range(amount):
        random.random(), np.random.random(), torch.rand(1)


def partition(context: Context) -> Fields:
    """Partition(data, index): its examples, one by one and in a loop.

    Arguments: file, index, kind of index, and here as below mine (the texts that are this rank's data).
    """
    a = context.arguments
    module = context.load(a["file"])
    index: Any = {"list": list(a["index"]), "tuple": tuple(a["index"]), "array": np.array(a["index"])}[a["kind"]]
    owned = Owned(Data(a["mine"]), [])
    part = module.Partition(owned.data, index)
    backwards = [text(part[place]) for place in reversed(range(len(index)))]
    looped = [text(example) for example in islice(part, MORE_THAN_ANY)]  # ends at the first IndexError
    kept = [int(place) for place in index]
    return {"examples": backwards[::-1], "looped": looped, "index": kept, "changed": owned.changed()}


def partitioner(context: Context) -> Fields:
    """DataPartitioner(data, sizes, seed), twice with the same objects, and one of more data in between.

    Arguments: length, mine (5 texts more), sizes, partition_seed, noise (random numbers before).
    """
    a = context.arguments
    module = context.load(a["file"])
    owned = Owned(Data(a["mine"][: a["length"]]), list(a["sizes"]))
    _draw_noise(a["noise"])
    owned = Owned(owned.data, owned.sizes)
    made = module.DataPartitioner(owned.data, owned.sizes, a["partition_seed"])
    changed = owned.changed()
    first = indices_of(made.partitions)
    owned.sizes[:] = a["sizes"]  # if they were changed, that is in the report
    other = indices_of(module.DataPartitioner(Data(a["mine"]), list(a["sizes"]), a["partition_seed"] + 1).partitions)
    again = indices_of(module.DataPartitioner(owned.data, owned.sizes, a["partition_seed"]).partitions)
    later = {"other": other, "second": again, "kept": indices_of(made.partitions)}
    return {"partitions": first, "changed": changed, **later}


def shuffles(context: Context) -> Fields:
    """The partitions for each of several seeds. Arguments: sizes, partition_seeds."""
    a = context.arguments
    module = context.load(a["file"])
    owned = Owned(Data(a["mine"]), [])
    made = [module.DataPartitioner(owned.data, list(a["sizes"]), seed) for seed in a["partition_seeds"]]
    return {"partitions": [indices_of(each.partitions) for each in made], "changed": owned.changed()}


def use(context: Context) -> Fields:
    """use(k) of every partition, in two rounds. Arguments: sizes, partition_seed."""
    a = context.arguments
    module = context.load(a["file"])
    owned = Owned(Data(a["mine"]), list(a["sizes"]))
    made = module.DataPartitioner(owned.data, owned.sizes, a["partition_seed"])
    before = indices_of(made.partitions)
    _draw_noise(3)
    owned = Owned(owned.data, owned.sizes)
    owned.data.reads = 0
    parts = [made.use(k) for k in range(len(a["sizes"]))]
    changed, reads = owned.changed(), owned.data.reads
    rounds = [[examples_of(part) for part in parts]]
    _draw_noise(3)
    rounds.append([examples_of(made.use(k)) for k in reversed(range(len(a["sizes"])))][::-1])
    after = indices_of(made.partitions)
    return {"rounds": rounds, "before": before, "after": after, "changed": changed, "reads": reads}


class GivenPartitions:
    """Stands for the student's DataPartitioner: whatever it is asked for, it has these partitions."""

    def __init__(self, partitions: list[list[int]]) -> None:
        self.given = partitions
        self.shares: list[list[float]] = []  # that were asked for, by each call

    def __call__(self, data: Any, sizes: Any = (0.7, 0.2, 0.1), seed: int = 1234) -> "GivenPartitions":
        self.data, self.partitions = data, [list(part) for part in self.given]
        self.shares.append([float(size) for size in islice(sizes, MORE_THAN_ANY)])
        return self

    def use(self, partition: int) -> "GivenPartition":
        return GivenPartition(self.data, self.given[partition])


class GivenPartition(Subset):
    """Stands for the student's Partition, with the same two attributes: `data`, and `index`, which may be replaced."""

    def __init__(self, data: Any, index: list[int]) -> None:
        super().__init__(data, list(index))

    @property
    def data(self) -> Any:
        return self.dataset

    @property
    def index(self) -> Any:
        return self.indices

    @index.setter
    def index(self, index: Any) -> None:
        self.indices = index


def loader(context: Context) -> Fields:
    """partition_dataset on this rank of a process group.

    Arguments: batch (of all workers), collate, given (the partitions that DataPartitioner has; None: its own). Returns
    besides `_listed` shares: what each call of DataPartitioner asked for, where its partitions are given.
    """
    a = context.arguments
    module: Any = context.load(a["file"])
    partitioner = GivenPartitions(a["given"] or [])
    if a["given"]:
        module.DataPartitioner = partitioner
    context.join()
    _draw_noise(context.rank)
    return _listed(module, a, {}) | {"shares": partitioner.shares}


def loaders_asked(context: Context) -> list[Fields]:
    """The same without a process group, for every rank in turn. Arguments: batch, workers, collate."""
    a = context.arguments
    module = context.load(a["file"])
    return [_listed(module, a, {"rank": rank, "world_size": a["workers"]}) for rank in range(a["workers"])]


def _listed(module: Any, a: dict, place: dict) -> Fields:
    collated = []

    def collate(examples: list) -> list:
        collated.append(len(examples))
        return list(examples)

    given: list[Callable] = [collate] if a["collate"] else []
    owned = Owned(Data(a["mine"]), [])
    result = module.partition_dataset(owned.data, a["batch"], *given, **place)
    changed = owned.changed()
    pair = isinstance(result, tuple) and len(result) == 2
    loader, batch = result if pair else (result, None)
    is_loader = pair and isinstance(loader, DataLoader)
    batches = _batches(loader) if is_loader else []
    again = _batches(loader) if is_loader else []
    whole = hasattr(batch, "__index__") and not isinstance(batch, bool)
    return {
        "is_loader": is_loader,
        "types": f"a {type(loader).__name__}" if not pair else f"({type(loader).__name__}, {type(batch).__name__})",
        "batch": operator.index(batch) if whole else in_words(batch),  # type: ignore[arg-type]
        "batches": batches,
        "again": again,
        "len": len(loader) if is_loader else -1,
        "collated": bool(batches) and len(collated) == len(batches) + len(again),
        "changed": changed,
    }


def _batches(loader: Iterable) -> list[list[str]]:
    """One epoch: the examples of each batch."""
    return [[text(example) for example in examples] for examples in islice(loader, MORE_THAN_ANY)]
