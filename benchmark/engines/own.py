"""The bonus lessons as strategies: the solved files in beyond/, loaded by path; they differ in how they average.

own_ring averages all gradients after backward, own_overlap bucket by bucket during backward. With --bucket_mb auto
the size of its buckets is chosen in the first step, see bucket_size.py.
"""

import contextlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from benchmark.engines.bucket_size import bucket_bytes, measure
from benchmark.engines.engine import Engine
from benchmark.measure.payload import sent
from common.paths import ROOT, import_file

LESSONS = ROOT / "beyond"


def lesson(name: str, folder: Path = LESSONS) -> ModuleType:
    """A file of beyond/ as a module."""
    return import_file(folder / f"{name}.py", f"own_{name}")


class OwnRing(Engine):
    """Each worker holds all; an all_reduce of send and recv sums all gradients when the last one is there."""

    def wrap(self, model: nn.Module) -> Any:
        self.ring = lesson("ring")
        return model

    def backward(self, loss: Tensor, last: bool) -> Tensor:
        value = super().backward(loss, last)
        if last:
            self.ring.average_gradients(self.bare)
        return value

    def unrecorded_bytes(self) -> float:
        """Every send: the flight recorder has no entry for gloo's point to point."""
        gradients = (parameter for parameter in self.bare.parameters() if parameter.requires_grad)
        return sent("all_reduce", sum(parameter.nbytes for parameter in gradients), self.worker.world_size)


class OwnOverlap(Engine):
    """Each worker holds all; gradients are summed by all_reduce, bucket by bucket, while backward still runs."""

    def wrap(self, model: nn.Module) -> Any:
        lessons = lesson("overlap")
        given = self.settings.bucket_mb  # None: to be chosen
        self.is_chosen = given is not None
        self.reducer = lessons.GradientReducer(model, int(given * 2**20) if given else lessons.BUCKET_BYTES)
        return model

    def backward(self, loss: Tensor, last: bool) -> Tensor:
        if not self.is_chosen:
            self.choose(loss)
        with contextlib.nullcontext() if last else self.reducer.no_sync():
            value = super().backward(loss, last)
        if last:
            self.reducer.finish()
        return value

    def choose(self, loss: Tensor) -> None:
        """Set the size of the buckets. It takes effect when finish() of the first step makes the buckets anew.

        It costs the first step some backward passes, whose gradients are dropped.
        """
        with self.reducer.no_sync():
            costs = measure(lambda: loss.backward(retain_graph=True), self.worker.device)
        self.optimizer.zero_grad()
        self.reducer.bucket_bytes = bucket_bytes(sum(p.nbytes for p in self.reducer.parameters), costs)
        self.is_chosen = True
        if self.worker.is_first:
            print(f"own_overlap: buckets of {self.reducer.bucket_bytes / 2**20:.2f} MiB: {costs}", file=sys.stderr)
