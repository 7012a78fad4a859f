"""Collects what --timeline shows of a rank: the phases of a few steps, and every collective of these steps.

Nothing happens in other steps. In the chosen ones torch.profiler runs; it makes them a few percent longer.
"""

import contextlib
import gc
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from common.timeline.profile_events import MARK, Mark, numbered, read_profile
from common.timeline.spans import Span
from common.timeline.waiting import Blocked, Message, blocked, own_code
from common.workers.collectives import recorded


@contextlib.contextmanager
def collector_off() -> Iterator[None]:
    """Keep the collector from running. With torch loaded, each of its passes walks a million objects: reading a trace
    of 11,000 events takes 0.26 s with it and 0.06 s without."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


SKIPPED = 2  # steps at the beginning: they warm up the caches, so their times are not typical
MARKS = 5  # on each side of the steps, of which the most exact counts


@dataclass(frozen=True)
class PartitionBox:
    """A partition of a pipeline with threads was busy with the forward or backward of a micro-batch."""

    partition: int
    name: str  # such as "forward 2"
    start: float
    end: float


@dataclass
class RankLog:
    """The observations of one rank, in seconds of its own time.perf_counter(), give or take `error`."""

    rank: int
    steps: list[tuple[int, Span]] = field(default_factory=list)  # number, from 0
    phases: list[tuple[str, Span]] = field(default_factory=list)
    micro_batches: list[tuple[str, Span]] = field(default_factory=list)
    partitions: list[PartitionBox] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    blocked: list[Blocked] = field(default_factory=list)
    own_code: list[Span] = field(default_factory=list)  # in the phase communication; not known on a GPU
    error: float = 0.0
    on_gpu: bool = False


class Capture:
    """Collects, in `log`, what a rank does in `count` steps. A Record calls it in every step."""

    def __init__(self, rank: int, count: int, on_gpu: bool = False) -> None:
        self.log = RankLog(rank, on_gpu=on_gpu)
        self._count = count
        self._chosen = range(0)
        self._model: nn.Module | None = None
        self._profile: profile | None = None
        self._marks: list[Mark] = []
        self._traced: list[nn.Module] = []
        # This silences the profiler's log of starts and stops. It is read when the profiler is first used.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")

    def watch(self, model: nn.Module) -> None:
        """Also record what the partitions of a Pipe in this model do."""
        self._model = model

    def begin_epoch(self, number: int, length: int) -> None:
        """Choose the steps in the first epoch, which begins with step `number` and has `length` steps."""
        if not self._chosen:
            first = number + max(0, min(SKIPPED, length - self._count))
            self._chosen = range(first, min(first + self._count, number + length))

    def begin_step(self, number: int) -> None:
        """Call this before a step begins, and after the last one of an epoch."""
        if self._profile and number not in self._chosen:
            self.stop()
        elif self._profile is None and self._chosen and number == self._chosen[0]:
            self._start()

    def end_step(self, number: int, start: float, end: float) -> None:
        if number in self._chosen:
            self.log.steps.append((number, (start, end)))

    def phase(self, name: str, start: float, end: float) -> None:
        if self._profile:
            self.log.phases.append((name, (start, end)))

    @contextlib.contextmanager
    def box(self, phase: str, partition: int, micro_batch: int, device: torch.device) -> Iterator[None]:
        """Record the work on a micro-batch; a Pipe uses this in its worker threads."""
        start = time.perf_counter()
        yield
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        box = PartitionBox(partition, f"{phase} {micro_batch}", start, time.perf_counter())
        self.log.partitions.append(box)

    def _start(self) -> None:
        self._profile = profile(activities=[ProfilerActivity.CPU], record_shapes=True)
        self._profile.start()
        self._traced = self._pipes()
        self._set_traces(self)
        self._mark()

    def stop(self) -> None:
        """End the profile, if one is running, and read it."""
        if self._profile is None:
            return
        self._mark()
        self._profile.stop()
        self._set_traces(None)
        with tempfile.TemporaryDirectory() as folder, collector_off():
            self._profile.export_chrome_trace(str(Path(folder) / "profile.json"))
            events = read_profile(Path(folder) / "profile.json", self._marks)
        self._profile, self._count = None, 0
        of_group = [(entry.group, entry.sequence) for entry in recorded()]
        log = self.log
        log.messages, log.micro_batches = numbered(events.messages, of_group), events.micro_batches
        log.error = events.error
        if log.on_gpu:  # the profile has the launches: a message seems to end when it is queued
            return
        for _, limits in log.steps:
            log.blocked += blocked(limits, events.busy, log.messages)
        phases = [span for name, span in log.phases if name == "communication"]
        log.own_code = own_code(phases, events.busy, log.blocked)

    def _mark(self) -> None:
        for _ in range(MARKS):
            before = time.perf_counter()
            with record_function(MARK):
                pass
            self._marks.append(Mark(before, time.perf_counter()))

    def _set_traces(self, trace: "Capture | None") -> None:
        for pipe in self._traced:
            pipe.trace = trace  # type: ignore[assignment]

    def _pipes(self) -> list[nn.Module]:
        """The modules of the model that can be traced, and are not traced by somebody else."""
        modules = list(self._model.modules()) if self._model else []
        # GPT-2 keeps its Pipe as a plain attribute, since the blocks in it are modules already.
        plain = [value for module in modules for value in vars(module).values() if isinstance(value, nn.Module)]
        return [module for module in (*modules, *plain) if getattr(module, "trace", self) is None]
