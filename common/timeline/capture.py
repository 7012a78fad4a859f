"""Collects what --timeline shows of a rank: the phases of a few steps, and every collective of these steps.

Nothing happens in other steps. In the chosen ones torch.profiler runs; it makes them a few percent longer.
"""

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from common.timeline.boxes import Box, Step
from common.timeline.profile_events import numbered, read_profile
from common.timeline.spans import Span, spans_of
from common.timeline.waiting import Blocked, WaitMessage, blocked, own_code
from common.workers.collectives import recorded

SKIPPED = 2  # steps at the beginning: they warm up the caches, so their times are not typical


@dataclass
class RankLog:
    """The observations of one rank, in seconds of its own time.time(), as the profiler measures them.

    micro_batches: "forward 2" and the like, of torch's pipeline schedules. partitions: the same, of a pipeline with
    threads; partition j is on row j + 1. averaging: own code in the phase communication; not known on a GPU.
    """

    rank: int
    steps: list[Step] = field(default_factory=list)
    phases: list[Box] = field(default_factory=list)
    micro_batches: list[Box] = field(default_factory=list)
    partitions: list[Box] = field(default_factory=list)
    messages: list[WaitMessage] = field(default_factory=list)
    blocked: list[Blocked] = field(default_factory=list)
    averaging: list[Box] = field(default_factory=list)
    on_gpu: bool = False


class Capture:
    """Collects, in `log`, what a rank does in `count` steps. A Record calls it in every step."""

    def __init__(self, rank: int, count: int, on_gpu: bool = False) -> None:
        self.log = RankLog(rank, on_gpu=on_gpu)
        self._count = count
        self._chosen = range(0)
        self._model: nn.Module | None = None
        self._profile: profile | None = None
        self._offset = time.time() - time.perf_counter()
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
            self.log.steps.append(Step(self.log.rank, number, start + self._offset, end + self._offset))

    def phase(self, name: str, start: float, end: float) -> None:
        if self._profile:
            self.log.phases.append(self._process_box(name, (start + self._offset, end + self._offset)))

    @contextlib.contextmanager
    def box(self, phase: str, partition: int, micro_batch: int, device: torch.device) -> Iterator[None]:
        """Record the work on a micro-batch; a Pipe uses this in its worker threads."""
        start = time.time()
        yield
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self.log.partitions.append(Box(partition + 1, "process", f"{phase} {micro_batch}", start, time.time()))

    def _start(self) -> None:
        self._profile = profile(activities=[ProfilerActivity.CPU], record_shapes=True)
        self._profile.start()
        self._traced = self._pipes()
        for pipe in self._traced:
            pipe.trace = self  # type: ignore[assignment]
        self._offset = time.time() - time.perf_counter()  # again: the system may have set its clock

    def stop(self) -> None:
        """End the profile, if one is running, and read it."""
        if self._profile is None:
            return
        self._profile.stop()
        for pipe in self._traced:
            pipe.trace = None  # type: ignore[assignment]
        with tempfile.TemporaryDirectory() as folder:
            self._profile.export_chrome_trace(str(Path(folder) / "profile.json"))
            events = read_profile(Path(folder) / "profile.json")
        self._profile, self._count = None, 0
        of_group = [(entry.group, entry.sequence) for entry in recorded()]
        log = self.log
        log.messages = numbered(events.messages, of_group)
        log.micro_batches = [self._process_box(*micro_batch) for micro_batch in events.micro_batches]
        if log.on_gpu:  # the profile has the launches: a message seems to end when it is queued
            return
        for limits in spans_of(log.steps):
            log.blocked += blocked(limits, events.busy, log.messages)
        phases = spans_of(box for box in log.phases if box.name == "communication")
        log.averaging = [self._process_box("averaging", span) for span in own_code(phases, events.busy, log.blocked)]

    def _process_box(self, name: str, span: Span) -> Box:
        return Box(self.log.rank, "process", name, *span)

    def _pipes(self) -> list[nn.Module]:
        """The modules of the model that can be traced, and are not traced by somebody else."""
        modules = list(self._model.modules()) if self._model else []
        # GPT-2 keeps its Pipe as a plain attribute, since the blocks in it are modules already.
        plain = [value for module in modules for value in vars(module).values() if isinstance(value, nn.Module)]
        return [module for module in (*modules, *plain) if getattr(module, "trace", self) is None]
