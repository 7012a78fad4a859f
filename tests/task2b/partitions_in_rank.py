"""Helpers for data partitions in a rank; sent to ranks as source."""

from __future__ import annotations

import operator
import pickle
import random
import reprlib
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Subset  # noqa: F401 (DataLoader: for what is sent beside this file)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from grader.wire.values import Fields

MORE_THAN_ANY = 200  # more than all examples, batches or partitions: if a program gives so many, it never ends


class Data:
    """Examples that do not show their indices: texts that are drawn for this run. The test file numbers them."""

    def __init__(self, texts: list[str]) -> None:
        self.items = list(texts)
        self.reads = 0

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> str:
        self.reads += 1
        return self.items[index]

    def __setitem__(self, index: int, example: str) -> None:
        """Allow a partitioner to shuffle the caller's data: this is reported, which says more than a crash."""
        self.items[index] = example


class Owned:
    """What belongs to the caller: the data, the sizes, the global random generators. `changed` compares them."""

    def __init__(self, data: Data, sizes: list[float]) -> None:
        self.data, self.sizes = data, sizes
        self._items, self._sizes = list(data.items), list(sizes)
        self._generators = generators()

    def changed(self) -> Fields:
        """Return whether the data changed, the sizes if they did, and the names of generators that moved."""
        now = generators()
        return {
            "data": self.data.items != self._items,
            "sizes": None if self.sizes == self._sizes else [float(size) for size in self.sizes],
            "generators": [name for name, state in self._generators.items() if now[name] != state],
        }


def generators() -> dict[str, object]:
    """Return the states of the global random generators, by the names under which programs use them."""
    states = {"random": random.getstate(), "numpy.random": pickle.dumps(np.random.get_state())}
    return states | {"torch": torch.get_rng_state().tolist()}


def text(example: object) -> str:
    """Return an example as it is; anything else, such as an index, in words."""
    return str(example) if isinstance(example, str) else in_words(example)


def in_words(value: object) -> str:
    """Return a value as a message shows it; only its type if it has no representation of its own."""
    shown = reprlib.repr(value)
    return f"a {type(value).__name__}" if " at 0x" in shown or shown.startswith("<") else shown


def indices_of(partitions: Any) -> list[list[int]] | str:
    """Return the partitions as lists of numbers; if they are none, what they are, in words."""
    if not hasattr(partitions, "__len__"):
        return in_words(partitions)
    lists: list[list[int]] = []
    for number, part in enumerate(islice(partitions, MORE_THAN_ANY)):
        if not hasattr(part, "__len__") or not hasattr(part, "__getitem__"):
            return f"{in_words(part)} as partition {number}"
        indices = list(islice(part, MORE_THAN_ANY))
        try:
            lists.append([operator.index(index) for index in indices])
        except TypeError:
            wrong = next(index for index in indices if not hasattr(index, "__index__"))
            return f"a {type(part).__name__} with {in_words(wrong)} as partition {number}"
    return lists


def examples_of(dataset: object) -> list[str] | str:
    """Return the examples of a data set if they are the same in two passes; else what is wrong, in words."""
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        return f"got {in_words(dataset)}, which does not support len() and indexing"
    first, again = ([text(dataset[place]) for place in range(min(len(dataset), MORE_THAN_ANY))] for _ in range(2))
    return first if first == again else "the second pass over it gives different examples than the first"


def draw_noise(amount: int) -> None:
    for _ in range(amount):
        random.random(), np.random.random(), torch.rand(1)


class GivenPartitions:
    """A replacement of the student's DataPartitioner that has these partitions, whatever the arguments are."""

    def __init__(self, partitions: list[list[int]]) -> None:
        self.given = partitions
        self.asked = False

    def __call__(self, data: Any, sizes: object = (0.7, 0.2, 0.1), seed: int = 1234) -> GivenPartitions:
        self.data, self.partitions, self.asked = data, [list(part) for part in self.given], True
        return self

    def use(self, partition: int) -> GivenPartition:
        return GivenPartition(self.data, self.given[partition])


class GivenPartition(Subset):
    """A replacement of the student's Partition, with the same attributes: `data`, and `index`, which can be set."""

    def __init__(self, data: Any, index: list[int]) -> None:
        super().__init__(data, list(index))

    @property
    def data(self) -> Dataset:
        return self.dataset

    @property
    def index(self) -> Sequence[int]:
        return self.indices

    @index.setter
    def index(self, index: Sequence[int]) -> None:
        self.indices = index
