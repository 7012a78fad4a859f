"""Averaging steps, right and wrong: what ranks had, hold and have called. No rank runs: a step is computed here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import reduce

import numpy as np
from numpy.typing import ArrayLike

from grader.wire.values import Fields, to_array, to_bytes

Formula = Callable[[np.ndarray, int], ArrayLike]  # of what all ranks had, (ranks, *shape), and the step's rank
SHAPES = {"query": (4, 4), "key": (4, 4), "embedding": (7, 3), "bias": (5,), "unused": (3,)}  # nobody has the last one
SCALES = {"query": 0.1, "key": 0.1, "embedding": 1.0, "bias": 1e-9, "unused": 0.0}
PATTERNS = ("all_reduce", "buckets", "gather and scatter", "reduce_scatter and all_gather", "a ring")


class Step:
    """One averaging step, which is right until a mistake changes it. It is `rank` with whom something goes wrong."""

    def __init__(
        self, draw: np.random.Generator, pattern: str = "", dtype: str = "float32", ranks: int = 0, scale: float = 1.0,
        infinite: bool = False, lacking: bool = False, equal: bool = False,
    ) -> None:  # fmt: skip
        self.draw, self.dtype, self.ranks = draw, dtype, ranks or int(draw.integers(3, 6))
        self.rank, self.pattern = int(draw.integers(1, max(2, self.ranks))), pattern or str(draw.choice(PATTERNS))
        self.before: dict[str, np.ndarray] = {}
        for name, shape in SHAPES.items():
            had = scale * SCALES[name] * draw.normal(size=(self.ranks, *shape))
            if dtype == "float16":  # so large that the sum of two is inf
                had = draw.uniform(4e4, 6e4, size=had.shape)
            elif name == "embedding" and self.ranks > 1:  # two ranks cancel: most of the mean is rounding
                had[1], had[2:] = -had[0], 1e-6 * had[2:]
            self.before[name] = rounded(had[[0] * self.ranks] if equal else had, dtype)
        self.missing = {(when, rank, "unused") for when in ("before", "after") for rank in range(self.ranks)}
        if infinite:
            self.before["query"][self.rank, 1, 2] = np.inf
        if lacking:
            self.before["key"][self.rank] = 0
            self.missing.add(("before", self.rank, "key"))
        self.right = {name: had if equal else self.mean(had) for name, had in self.before.items()}
        self.after = {name: held.copy() for name, held in self.right.items()}
        self.calls = self.list_calls()

    def mean(self, had: np.ndarray) -> np.ndarray:
        """Return the mean on every rank, of a sum in a drawn order; it may be divided before."""
        divides_first = self.dtype == "float16" or self.draw.random() < 0.5
        total = summed(self.draw.permutation(had / self.ranks if divides_first else had), self.dtype)
        return np.repeat([total if divides_first else rounded(total / self.ranks, self.dtype)], self.ranks, axis=0)

    def list_calls(self) -> list[list[Fields]]:
        """Return the calls of each rank, as a program with this pattern makes them."""
        numels = [had[0].size for name, had in self.before.items() if name != "unused"]
        part, last = -(-sum(numels) // self.ranks), self.ranks - 1
        collectives: dict[str, list[tuple[str, int, int | None]]] = {
            "nothing": [],
            "all_reduce": [("all_reduce", numel, None) for numel in numels],
            "buckets": [("all_reduce", numel, None) for numel in (numels[0], sum(numels[1:]))],
            "gather and scatter": [(name, numel, 0) for numel in numels for name in ("gather", "scatter")],
            "reduce_scatter and all_gather": [(name, part, None) for name in ("reduce_scatter", "all_gather")],
        }
        calls: list[list[Fields]] = []
        for rank in range(self.ranks):
            ring = [("send", part, (rank + 1) % self.ranks), ("recv", part, (rank + last) % self.ranks)] * 2 * last
            chosen = collectives.get(self.pattern, ring) if last else []
            calls.append(
                [{"name": name, "numel": numel, "peer": peer, "finished": True} for name, numel, peer in chosen]
            )
        return calls

    def sent(self) -> Fields:
        """Return the step in the form in which it is sent to the rank that checks it."""
        sides = {
            when: [
                {name: None if (when, rank, name) in self.missing else all[rank] for name, all in gradients.items()}
                for rank in range(self.ranks)
            ]
            for when, gradients in (("before", self.before), ("after", self.after))
        }
        return sides | {"calls": self.calls, "dtype": self.dtype}


def rounded(array: np.ndarray, dtype: str) -> np.ndarray:
    return to_array(dtype, list(array.shape), to_bytes(array, dtype)).copy()


def summed(had: np.ndarray, dtype: str) -> np.ndarray:
    """Return the sum over the ranks, rounded after each addition."""
    with np.errstate(over="ignore"):  # to inf
        return reduce(lambda one, other: rounded(one + other, dtype), rounded(had, dtype))


@dataclass(frozen=True)
class Mistake:
    """What is wrong in a step: these gradients hold the value of a formula on "all" ranks, on "one", or on the "others"
    than rank 0; or something else is changed. `setting`: the arguments of the step."""

    formula: Formula = lambda had, _: had  # what each rank had
    names: tuple[str, ...] = tuple(SHAPES)
    ranks: str = "all"
    change: Callable[[Step], object] | None = None
    setting: Fields = field(default_factory=dict)

    def make(self, draw: np.random.Generator) -> Step:
        step = Step(draw, **self.setting)
        chosen = {"all": slice(None), "one": slice(step.rank, step.rank + 1), "others": slice(1, None)}[self.ranks]
        for name in () if self.change else self.names:
            value = np.broadcast_to(self.formula(step.before[name], step.rank), step.before[name].shape)
            step.after[name][chosen] = rounded(value, step.dtype)[chosen]
        if self.change:
            self.change(step)
        return step


def swap_query_and_key(step: Step) -> None:
    shift = (step.before["key"][step.rank] - step.before["query"][step.rank]) / step.ranks
    step.after["query"] += shift
    step.after["key"] -= shift


def leave_out_the_last_call(step: Step) -> None:
    for own in step.calls:
        own[-1]["finished"] = False
    step.calls[step.rank].pop()


ALL_REDUCE, RING, GATHER = {"pattern": "all_reduce"}, {"pattern": "a ring"}, {"pattern": "gather and scatter"}
BUCKETS, LACKING, HALF = {"pattern": "buckets"}, {"lacking": True}, {"dtype": "float16"}
WRONG = {
    "the sum is never divided": Mistake(lambda had, _: had.sum(0)),
    "the sum is divided by the number of the other ranks": Mistake(lambda had, _: had.sum(0) / (len(had) - 1)),
    "the sum is divided twice": Mistake(lambda had, _: had.mean(0) / len(had)),
    "rank {rank} is the root of the scatter": Mistake(lambda had, rank: had[rank], setting=GATHER),
    "rank {rank} takes part with zeros": Mistake(lambda had, rank: had.mean(0) - had[rank] / len(had)),
    "rank {rank} sends a stale gradient": Mistake(lambda had, rank: had.mean(0) + had[rank] / 20 / len(had)),
    "rank {rank} keeps its own gradients": Mistake(ranks="one"),
    "only rank 0 gets the mean": Mistake(ranks="others", setting=GATHER),
    "the last gradient, a small one, is left out": Mistake(names=("bias",), setting=ALL_REDUCE),
    "the end of the last bucket is dropped": Mistake(
        lambda had, _: np.where(np.arange(5) < 3, had.mean(0), had), ("bias",), setting=BUCKETS
    ),
    "rank {rank} swaps two gradients of one shape": Mistake(change=swap_query_and_key, setting=ALL_REDUCE),
    "float32 is summed in bfloat16": Mistake(lambda had, _: summed(had, "bfloat16") / len(had)),
    "the sum of float16 overflows before it is divided": Mistake(lambda had, _: summed(had, "float16"), setting=HALF),
    "half of a gradient lacks what rank {rank} had": Mistake(
        lambda had, rank: had.mean(0) - np.triu(had[rank]) / len(had), ("query",), setting=RING
    ),
    "rank {rank} reads a gradient before it has arrived": Mistake(lambda *_: np.nan, ("key",), "one", setting=BUCKETS),
    "rank {rank} sends zeros in place of inf": Mistake(
        lambda had, _: np.where(np.isfinite(had), had, 0).mean(0), ("query",), setting={"infinite": True}
    ),
    "rank 0 gets zeros for a gradient that no rank had": Mistake(
        change=lambda step: step.missing.remove(("after", 0, "unused"))
    ),
    "rank {rank} had no gradient, and gets none": Mistake(
        change=lambda step: step.missing.add(("after", step.rank, "key")), setting=LACKING
    ),
    "a sum is divided by the number of ranks that had a gradient": Mistake(
        lambda had, _: had.sum(0) / (len(had) - 1), ("key",), setting=LACKING
    ),
    "rank {rank} does not wait for its last call, whose result is there by luck": Mistake(
        change=lambda step: step.calls[step.rank][-1].update(finished=False)
    ),
    "nothing is sent, in a step where all ranks had equal gradients": Mistake(
        names=(), setting={"pattern": "nothing", "equal": True}
    ),
    "rank {rank} sends one message more, which the next step will receive": Mistake(
        change=lambda step: step.calls[step.rank].append(step.calls[step.rank][0]), setting=RING
    ),
    "rank {rank} takes part in one gather more, which the next step will receive": Mistake(
        change=lambda step: step.calls[step.rank].append(step.calls[step.rank][0]), setting=GATHER
    ),
    "rank {rank} leaves out a gradient of zeros, and the others wait": Mistake(
        change=leave_out_the_last_call, setting=ALL_REDUCE | {"scale": 0.0}
    ),
}
RIGHT: Mapping[str, Fields] = {
    "an all_reduce of every gradient": ALL_REDUCE,
    "gather and scatter, with an inf that every rank must see": GATHER | {"infinite": True},
    "a ring": RING,
    "buckets, with a gradient that one rank lacks": BUCKETS | LACKING,
    "reduce_scatter and all_gather of bfloat16": {"pattern": "reduce_scatter and all_gather", "dtype": "bfloat16"},
    "one rank alone, which calls nothing": {"ranks": 1},
    "float16, divided before a sum that would overflow": HALF,
    "gradients of zeros": {"scale": 0.0},
}
