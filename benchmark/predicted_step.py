"""The time, bytes and memory of a step, by the formulas that students write (b.15 and b.16 in beyond/cost_model.py).

A strategy is described by its collectives and by when it calls them:

    forward      | block 0 | block 1 | ... |      StepTraffic.forward: meanwhile the next block is gathered
    backward     | ... | block 1 | block 0 |      StepTraffic.backward: gradients are sent as they become ready
    apart                                         StepTraffic.apart: every worker waits for these

What computing takes is measured, and so are latency and bandwidth of a link (measured_costs.py). Left out: what an
engine itself needs for a call, copies within memory, waiting for a slower worker, congestion.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial

from benchmark.measure.architecture import Architecture, describe
from benchmark.strategies import STRATEGIES
from beyond.cost_model import Link, TimedBucket, ring_all_reduce_seconds, step_time
from beyond.step_memory import ADAM_TEMPORARIES, BYTES, peak, turning_point
from common.errors import InputError

PREDICTED = (
    "single", "ddp", "fsdp", "zero0", "zero1", "zero2", "zero3",
    "own_ring", "own_overlap", "own_zero1", "own_zero2", "own_zero3",
)  # fmt: skip
# What was compared last (README.md): up to so many workers, down to this rate; beyond FAR times that, a range is given.
MOST_WORKERS, LEAST_RATE, LARGEST_ERROR, FAR = 4, 1e8, 1.33, 4
DDP_FIRST, DDP_BUCKET = 2**20, 25 * 2**20  # bytes; of torch's DistributedDataParallel
OWN_BUCKET = 4 * 2**20  # of own_overlap
# Of configs/zero*.json, in elements: reduce_bucket_size; what stage 3 keeps whole (stage3_param_persistence_threshold);
# with more than stage3_max_live_parameters, stage 3 gathers again in backward.
BUCKET, WHOLE, LIVE = 6_553_600, 100_000, 10**9
FORWARD = 1 / 3  # of forward and backward: a backward does twice the arithmetic


@dataclass(frozen=True)
class PredictedCell:
    """What is predicted: a step of `workers` workers with `batch` examples each."""

    strategy: str
    model: str
    workers: int
    batch: int
    length: int


@dataclass(frozen=True)
class Costs:
    """What was measured, in seconds: of one worker that computes the whole model, while all workers compute.

    busy: the part of a message's time in which it takes a processor; on loopback all of it.
    """

    forward_backward: float
    optimizer: float
    link: Link
    busy: float = 0.0


@dataclass(frozen=True)
class CollectiveCost:
    """A collective over a tensor of `size` bytes, of which a worker sends `units` times (N-1)/N."""

    units: int
    size: float

    def seconds(self, workers: int, link: Link) -> float:
        return self.units / 2 * ring_all_reduce_seconds(self.size, workers, link)

    def sent(self, workers: int) -> float:
        return self.units * self.size * (workers - 1) / workers


all_reduce = partial(CollectiveCost, 2)
half = partial(CollectiveCost, 1)  # an all_gather, a reduce_scatter or an all_to_all: half of a ring's all_reduce


@dataclass(frozen=True)
class StepTraffic:
    """The collectives of a step, by when they are called."""

    forward: list[CollectiveCost] = field(default_factory=list)
    backward: list[CollectiveCost] = field(default_factory=list)
    apart: list[CollectiveCost] = field(default_factory=list)


@dataclass(frozen=True)
class PredictedStep:
    """Seconds of a step: total = computing + exposed + optimizer. sent: bytes out of a worker, mean of all workers."""

    computing: float
    optimizer: float
    exposed: float
    hidden: float
    sent: float

    @property
    def total(self) -> float:
        return self.computing + self.exposed + self.optimizer


def check(cell: PredictedCell) -> None:
    """Raise InputError for a step that is not predicted, or that cannot be run."""
    if cell.strategy not in PREDICTED:
        raise InputError(f"--strategies: expected one of {', '.join(PREDICTED)}, got {cell.strategy!r}")
    if cell.strategy == "single" and cell.workers > 1:
        raise InputError(f"--strategies single runs on one worker, got {cell.workers}; use ddp")


def traffic(cell: PredictedCell, model: Architecture) -> StepTraffic:
    """Return what a step sends."""
    sizes, strategy = model.sizes, cell.strategy
    whole, root, blocks = sizes.parameters, sizes.root, [sizes.block] * sizes.blocks
    number = all_reduce(BYTES)  # a norm, or whether a gradient has overflown
    halves = list(map(half, [*blocks, root]))
    in_buckets = list(map(all_reduce, cut_up(whole, BYTES * BUCKET)))  # of DeepSpeed
    match strategy:
        case "single":
            return StepTraffic()
        case "ddp":
            first = min(DDP_FIRST, whole / 2)
            return StepTraffic(backward=list(map(all_reduce, [first, *cut_up(whole - first, DDP_BUCKET)])))
        case "own_overlap":
            return StepTraffic(backward=list(map(all_reduce, cut_up(whole, OWN_BUCKET))))
        case "own_ring":
            return StepTraffic(apart=[all_reduce(whole)])
        case "own_zero1":  # gradients, the norm, new parameters
            return StepTraffic(apart=[*halves, number, *halves])
        case "own_zero2":
            return StepTraffic(backward=halves, apart=[number, *halves])
        case "own_zero3":  # a block's gradients, and the gather of the next one; the last block and the root are whole
            of_backward = [*map(all_reduce, blocks[1:]), half(sizes.block), half(root)]
            return StepTraffic([half(root), *halves[:-1]], of_backward, [number])
        case "fsdp":  # on CPUs each call waits, and gloo's reduce_scatter is a whole all_reduce
            return StepTraffic(apart=[*halves, *halves[:-1], *map(all_reduce, [*blocks, root]), number])
        case "zero0":
            return StepTraffic(apart=[all_reduce(whole), number])
        case "zero1" | "zero2":  # its reduce_scatter is a whole all_reduce, and each call waits
            return StepTraffic(apart=[*in_buckets, number, number, half(whole)])
        case _:  # zero3: small parameters are whole on every worker, and gathered one by one after the step
            small = small_parameters(model)
            gathers = [half(whole - sum(small))] * (2 if whole > BYTES * LIVE else 1)
            return StepTraffic(apart=[*gathers, *in_buckets, number, number, *map(half, small)])


def small_parameters(model: Architecture) -> list[int]:
    """Return the sizes of the parameters that DeepSpeed's stage 3 keeps whole, in bytes."""
    return [BYTES * count for count in map(math.prod, model.shapes) if count <= WHOLE]


def cut_up(size: float, piece: float) -> list[float]:
    """Return the sizes of as few equal buckets of at most `piece` bytes as there can be."""
    count = math.ceil(size / piece)
    return [size / count] * count


def predict(cell: PredictedCell, costs: Costs) -> PredictedStep:
    """Return the step."""
    model, workers = describe(cell.model, cell.length), cell.workers
    calls, whole = traffic(cell, model), STRATEGIES[cell.strategy].ideal == (16, 0)
    forward, backward = FORWARD * costs.forward_backward, (1 - FORWARD) * costs.forward_backward
    # A forward that gathers blocks is a backward that sends them, seen in reverse: the first gather cannot be hidden.
    gathering = step_time(0, forward, 0, timed(reversed(calls.forward), forward, cell, costs, model))
    buckets = timed(calls.backward, backward, cell, costs, model)
    buckets += [TimedBucket(backward, one.seconds(workers, costs.link)) for one in calls.apart]
    step = step_time(forward, backward, 0, buckets)
    hidden = gathering.hidden + step.hidden
    return PredictedStep(
        computing=costs.forward_backward + costs.busy * hidden,
        optimizer=costs.optimizer if whole else costs.optimizer / workers,
        exposed=gathering.exposed + step.exposed,
        hidden=hidden,
        sent=sum(one.sent(workers) for one in (*calls.forward, *calls.backward, *calls.apart)),
    )


def timed(
    calls: Iterable[CollectiveCost], computing: float, cell: PredictedCell, costs: Costs, model: Architecture
) -> list[TimedBucket]:
    """Return when each can begin: gradients of blocks become ready at an even rate, those of the root at the end."""
    ready, buckets = 0.0, []
    for one in calls:
        ready += one.size / (model.sizes.blocks * model.sizes.block)
        buckets.append(TimedBucket(computing * min(1.0, ready), one.seconds(cell.workers, costs.link)))
    return buckets


def range_of(cell: PredictedCell, costs: Costs) -> tuple[float, float]:
    """Return least and most seconds of a step: no message has a latency and all is hidden; or nothing is hidden.

    Both ends are moved apart by the largest error of predictions that were compared.
    """
    most, least = predict(cell, costs), predict(cell, replace(costs, busy=0.0, link=Link(0.0, costs.link.bandwidth)))
    fast = max(least.computing, least.exposed + least.hidden) + least.optimizer
    return fast / (1 + LARGEST_ERROR), (most.total + most.hidden) * (1 + LARGEST_ERROR)


def far(workers: int, rate: float | None) -> list[str]:
    """Return what is far beyond all cells that were compared, a line each."""
    lines = []
    if workers > FAR * MOST_WORKERS:
        lines.append(f"far beyond what was compared: {workers} workers, up to {MOST_WORKERS} were")
    if rate and rate < LEAST_RATE / FAR:
        lines.append(f"far beyond what was compared: links of {rate / 1e6:g} Mbit/s, down to {LEAST_RATE / 1e6:g} were")
    return lines


def peak_bytes(cell: PredictedCell) -> float:
    """Return the most bytes that a step needs, on the worker with the most, by the account of the lessons; in fp32."""
    model = describe(cell.model, cell.length)
    sizes, zero = model.sizes, STRATEGIES[cell.strategy].zero
    if not zero:
        return peak(cell.strategy.removeprefix("own_"), sizes, cell.batch, cell.workers)
    # DeepSpeed's optimizer works on flat tensors.
    whole, shard, computing = sizes.parameters, sizes.parameters / cell.workers, turning_point(sizes, cell.batch)
    if zero[0] == 0:  # all gradients once more, as one message
        return max(3 * whole + computing, 5 * whole)
    # Parameters, gradient, two states and a master copy; in stages 1 and 2, the parameters are whole.
    kept, bucket = 4 * shard, BYTES * BUCKET
    if zero[0] == 3:  # all parameters are whole from forward to backward; gloo gathers into a copy
        small = sum(small_parameters(model)) if cell.workers > 1 else 0
        return kept + shard + small + bucket + whole + max(whole, computing)
    # While computing there is a bucket; the update has the shard's gradients once more, and Adam's temporary tensors.
    return whole + max(kept - shard + bucket + computing, kept + (1 + ADAM_TEMPORARIES) * shard)
