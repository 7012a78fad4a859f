"""Strategies that are resident in the same workers: each takes a step in its turn, and is looked at meanwhile."""

import gc
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist

from benchmark.measure.payload import Payload
from benchmark.measure.profile import Tracer, communication_of, mark
from benchmark.measure.turns import Step, nothing
from benchmark.settings import Settings
from benchmark.strategies import STRATEGIES, Label
from benchmark.training.loop import PERIOD, TRACED, rate_at
from benchmark.training.trained import metric_of
from benchmark.training.workload import Workload
from common.peak_memory import PeakMemory, alive_bytes
from common.workers.process_group import Worker

WARM_UP = 3  # rounds
AGAIN = "again"  # variant: a second engine


@dataclass
class Figures:
    """What was measured of a strategy beside the times of its steps, on one worker; None: could not be measured."""

    peak_bytes: float | None = None
    sent_bytes: float | None = None
    sent_as: str | None = None  # dtypes
    exposed_ms: float | None = None
    metric: float | None = None


class ComparedStrategy:
    """One strategy, ready to take steps. `single` takes them on the first worker alone, with its share of the cores."""

    def __init__(self, label: Label, settings: Settings, worker: Worker, workload: Workload) -> None:
        alone = label.strategy == "single"
        if alone:
            # With a user's loss the others take the mean of each worker's mean, which can be another one.
            more = "accumulation" if workload.kind == "own" else "batch_size"
            settings = replace(settings, **{more: getattr(settings, more) * settings.world_size}, world_size=1, rank=0)
        self.label, self.settings, self.worker = label, replace(settings, strategy=label.strategy), worker
        self.waits = alone and not worker.is_first
        self.memory = PeakMemory(worker.device)
        model = workload.build(self.settings, worker.device)
        self.engine = STRATEGIES[label.strategy].make(self.settings, worker, model)
        del model
        gc.collect()  # see benchmark.run
        self.batches = worker.batches(workload.batches(self.settings))
        self.losses: list[torch.Tensor] = []
        self.norms: list[torch.Tensor | float | None] = []
        self.kept = (alive_bytes(worker.device) or 0) - self.memory.before  # what the engine has between its steps
        self.figures = Figures()

    def note_metric(self, workload: Workload) -> None:
        """Note what the model is worth after the last step (trained.py). A collective, but for `single`."""
        self.figures.metric = None if self.waits else metric_of(self.settings, self.engine, workload)

    def turn(self, number: int) -> Step:
        """The step of a round; its data are ready."""
        self.worker.pulse.beat()
        if self.waits:
            return nothing
        batches = [next(self.batches) for _ in range(self.settings.accumulation)]
        return partial(self.step, number, batches)

    def step(self, number: int, batches: list) -> None:
        """Take a step; the rounds of warm-up measure its memory, and the last of them what it sends."""
        if number >= WARM_UP:
            self.take_step(number, batches)
            return
        payload = Payload() if number == WARM_UP - 1 else None
        self.memory.before = (alive_bytes(self.memory.device) or 0) - self.kept  # the other engines' part
        self.memory.start(PERIOD)
        self.take_step(number, batches)
        self.memory.stop()
        self.kept = (alive_bytes(self.memory.device) or 0) - self.memory.before
        if self.memory.bytes is not None:
            self.figures.peak_bytes = max(self.figures.peak_bytes or 0, self.memory.bytes)
        if payload:
            self.figures.sent_bytes, _ = payload.of_engine(self.engine, self.settings)

    def take_step(self, number: int, batches: list) -> None:
        loss = torch.zeros(())
        for i, batch in enumerate(batches):
            output = self.engine.forward(batch)
            if number < WARM_UP:
                self.memory.sample()
            loss = loss + self.engine.backward(output, last=i == len(batches) - 1).cpu() / len(batches)
        self.engine.step(rate_at(self.settings, number))
        self.losses.append(loss)
        self.norms.append(self.engine.norm)


def trace(worker: Worker, compared: list[ComparedStrategy], number: int) -> None:
    """Let each strategy take steps under the profiler, which are not timed: its exposed communication."""
    on_gpu = worker.device.type == "cuda"
    tracer = Tracer(on_gpu)
    tracer.start()
    for strategy in compared:
        steps = [strategy.turn(number - 1) for _ in range(TRACED)]
        dist.barrier()
        for step in steps:
            with mark(str(strategy.label)):
                step()
                if on_gpu:
                    torch.cuda.synchronize(worker.device)
    events = tracer.stop()
    for strategy in compared:
        _, strategy.figures.exposed_ms = communication_of(events, str(strategy.label), on_gpu)
        dtypes = dict.fromkeys(str(dtype).removeprefix("torch.") for dtype in strategy.engine.sent_dtypes())
        strategy.figures.sent_as = " + ".join(dtypes) if strategy.settings.world_size > 1 else None
