"""The one training loop: every strategy goes through these lines, and only `engine` differs."""

import math
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from tqdm.auto import tqdm

from benchmark.engines.engine import Engine
from benchmark.measure.meter import GpuSampler, Meter
from benchmark.measure.payload import Payload, Sent
from benchmark.measure.profile import Tracer, communication
from benchmark.measure.record import Utilisation
from benchmark.settings import Settings
from benchmark.training import checkpoint_folder
from benchmark.training.log import Log
from benchmark.training.workload import Workload, to_device
from common.peak_memory import PeakMemory, alive_bytes
from common.workers.process_group import Worker

TRACED = 2  # steps
PERIOD = 0.001  # seconds between two looks at the memory, in steps that are not timed


def rate_at(settings: Settings, step: int) -> float:
    """Learning rate of step 0, 1, ...: rises over --warmup_steps, then stays, or falls to 0 as half a cosine."""
    warmup, total, top = settings.warmup_steps, settings.max_steps, settings.learning_rate
    if step < warmup:
        return top * (step + 1) / warmup
    if not settings.cosine:
        return top
    return top * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))


class StepPlan:
    """Which steps are dropped, timed and traced: the last two are traced if enough remain for the clock."""

    def __init__(self, first: int, last: int, dropped: int) -> None:
        count = last - first
        dropped = min(dropped, max(0, count - 1))
        traced = TRACED if count - dropped > 2 * TRACED else 1 if count - dropped > 2 else 0
        self.timed_from, self.traced_from, self.last = first + dropped, last - traced, last
        self.dropped, self.timed, self.traced = dropped, count - dropped - traced, traced
        # From the second step on, everything is there; the profiler of the traced steps needs memory itself.
        self.measured_to = self.timed_from if dropped > 1 else self.traced_from


@dataclass
class Measured:
    """What was measured on one worker.

    steps: seconds of each timed step and of its phases. norms: of every step. sent: in the last step.
    """

    plan: StepPlan
    memory: PeakMemory
    steps: list[dict[str, float]] = field(default_factory=list)
    norms: list[torch.Tensor | float | None] = field(default_factory=list)
    utilisation: Utilisation | None = None
    traced: tuple[float | None, float | None] = (None, None)  # communication of the traced steps, see profile.py
    sent: Sent = (None, None)
    persistent: int | None = None  # bytes
    reserved: int | None = None

    def end_of_timed_steps(self, meter: Meter, gpu: GpuSampler) -> None:
        if self.memory.device.type == "cuda":
            self.memory.stop()
            self.reserved = torch.cuda.max_memory_reserved(self.memory.device)
        self.steps = meter.steps[self.plan.dropped :]
        wall = sum(step["wall"] for step in self.steps)
        cores = sum(meter.cpu_seconds[self.plan.dropped :]) / wall  # 1.0: one core is busy all the time
        self.utilisation = Utilisation(cores, **gpu.means())


def train(
    settings: Settings, worker: Worker, workload: Workload, engine: Engine, log: Log, memory: PeakMemory
) -> Measured:
    """Train to --max_steps."""
    first, losses = checkpoint_folder.load(settings.output_dir / "checkpoints", engine) if settings.resume else (0, [])
    log.restart(losses)
    on_gpu = worker.device.type == "cuda"  # there, torch counts memory in the timed steps at no cost
    plan = StepPlan(first, settings.max_steps, settings.dropped)
    meter, gpu = Meter(worker), GpuSampler(worker.device)
    tracer = Tracer(on_gpu, settings.output_dir / f"trace_{worker.rank}.json" if settings.keep_trace else None)
    measured = Measured(plan, memory)
    batches = worker.batches(to_device(workload.batches(settings, first), worker.device))
    memory.start(PERIOD)
    for step in tqdm(range(first, plan.last), desc=settings.strategy, disable=None if worker.is_first else True):
        if step == plan.measured_to and not on_gpu:
            memory.stop()
        if step == plan.timed_from:
            dist.barrier()  # all workers begin together; what came before does not count
            gpu.start()
            if on_gpu:
                memory.start()
        if step == plan.traced_from:
            measured.end_of_timed_steps(meter, gpu)
            tracer.start()
        payload = Payload() if step == plan.last - 1 else None  # all but the first steps send the same
        meter.begin()
        loss = 0.0
        for micro in range(settings.accumulation):
            with meter.phase("data"):
                batch = next(batches)
            with meter.phase("forward"):
                output = engine.forward(batch)
            memory.sample()
            with meter.phase("backward"):
                value = engine.backward(output, last=micro == settings.accumulation - 1)
            loss += value.item() / settings.accumulation
            memory.sample()
        if step == plan.timed_from - 1 and step > 0:  # AdamW makes its states in the first step
            alive = alive_bytes(worker.device)
            measured.persistent = None if alive is None else alive - memory.before
        with meter.phase("optimizer"):
            engine.step(rate_at(settings, step))
        measured.norms.append(engine.norm)
        log.loss(step, loss, rate_at(settings, step), meter.steps[-1:])  # part of "other", as in any training
        del output, value  # freeing the graph is a part of the step
        meter.end()
        if payload:
            measured.sent = payload.of_engine(engine, settings)
        between_steps(settings, workload, engine, log, step + 1)
    if not on_gpu:
        memory.stop()
    if plan.traced:
        measured.traced = communication(tracer.stop(), plan.traced, on_gpu)
    elif first < plan.last:
        measured.end_of_timed_steps(meter, gpu)
    log.evaluation(plan.last, engine.validate(workload.validation_batches(settings), workload.kind))
    return measured


def between_steps(settings: Settings, workload: Workload, engine: Engine, log: Log, done: int) -> None:
    """Validation and checkpoint after `done` steps, where they are due; no part of a step's time."""
    if settings.eval_every and done % settings.eval_every == 0 and done < settings.max_steps:
        log.agree()
        log.evaluation(done, engine.validate(workload.validation_batches(settings), workload.kind))
    if settings.checkpoint_every and done % settings.checkpoint_every == 0:
        checkpoint_folder.save(settings.output_dir / "checkpoints", done, engine, log.agree())
