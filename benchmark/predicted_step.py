"""The time and the bytes of a step, by the formulas that students write: b.15 and b.16 in beyond/cost_model.py.

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

from benchmark.engines.engine import micro_batches
from benchmark.measure.architecture import Architecture, describe
from benchmark.strategies import STRATEGIES
from beyond.cost_model import Link, TimedBucket, ring_all_reduce_seconds, step_time
from beyond.step_memory import BYTES, cut
from common.errors import InputError

PREDICTED = (
    "single", "ddp", "fsdp", "zero0", "zero1", "zero2", "zero3", "own_ring", "own_overlap", "own_zero1", "own_zero2",
    "own_zero3", "tensor", "own_tensor", "pipeline", "own_1f1b",
)  # fmt: skip
DDP_FIRST, DDP_BUCKET = 2**20, 25 * 2**20  # bytes; of torch's DistributedDataParallel
OWN_BUCKET = 4 * 2**20  # of own_overlap
# Of configs/zero*.json, in elements: reduce_bucket_size; what stage 3 keeps whole (stage3_param_persistence_threshold);
# with more than stage3_max_live_parameters, stage 3 gathers again in backward.
BUCKET, WHOLE, LIVE = 6_553_600, 100_000, 10**9
TOKEN = 8  # bytes
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

    forward_backward, optimizer: for examples_at_a_time(cell). per_core: workers that share a core, at least 1.
    busy: the part of a message's time in which it takes a processor; on loopback all of it.
    """

    forward_backward: float
    optimizer: float
    link: Link
    busy: float = 0.0
    per_core: float = 1.0


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
    model, workers, cuts = describe(cell.model, cell.length), cell.workers, STRATEGIES[cell.strategy].cuts
    if cell.strategy == "single" and workers > 1:
        raise InputError(f"--strategies single runs on one worker, got {workers}; use ddp")
    if cuts and model.kind != "gpt2":
        raise InputError(f"--strategies {cell.strategy} cuts GPT-2 into parts, got {cell.model}; use --model gpt2-tiny")
    if cuts == "tensor" and model.heads % workers:
        raise InputError(f"--workers: expected a number that divides the {model.heads} heads, got {workers}")
    if cuts == "pipeline" and workers > model.sizes.blocks:
        raise InputError(f"--workers: expected a block for each stage; {workers} share {model.sizes.blocks} blocks")


def examples_at_a_time(cell: PredictedCell) -> int:
    """Return how many examples a worker computes together: its own, those of all workers, or a micro-batch."""
    total = cell.batch * cell.workers
    if STRATEGIES[cell.strategy].cuts == "pipeline":
        return total // micro_batches(total, cell.workers)
    return total if STRATEGIES[cell.strategy].cuts else cell.batch


def traffic(cell: PredictedCell, model: Architecture) -> StepTraffic:
    """Return what a step sends, but for the activations between the stages of a pipeline."""
    sizes, strategy = model.sizes, cell.strategy
    whole, root, blocks = sizes.parameters, sizes.root, [sizes.block] * sizes.blocks
    number = all_reduce(BYTES)  # a norm, or whether a gradient has overflown
    replica = half(cell.batch * cell.workers * cell.length * TOKEN)  # its workers get the examples of all
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
        case "zero3":  # small parameters are whole on every worker, and gathered one by one after the step
            small = small_parameters(model)
            gathers = [half(whole - sum(small))] * (2 if whole > BYTES * LIVE else 1)
            return StepTraffic(apart=[*gathers, *in_buckets, number, number, *map(half, small)])
        case "tensor" | "own_tensor":  # attention and MLP sum outputs and gradients; torch's q, k, v give three of them
            sums = (6 if strategy == "tensor" else 4) * sizes.blocks
            return StepTraffic(apart=[replica, *[all_reduce(cell.batch * cell.workers * sizes.border)] * sums, number])
        case _:  # of a pipeline: loss and norms
            return StepTraffic(apart=[replica, number, number])


def small_parameters(model: Architecture) -> list[int]:
    """Return the sizes of the parameters that DeepSpeed's stage 3 keeps whole, in bytes."""
    return [BYTES * count for count in map(math.prod, model.shapes) if count <= WHOLE]


def cut_up(size: float, piece: float) -> list[float]:
    """Return the sizes of as few equal buckets of at most `piece` bytes as there can be."""
    count = math.ceil(size / piece)
    return [size / count] * count


def predict(cell: PredictedCell, costs: Costs) -> PredictedStep:
    """Return the step; costs are those of examples_at_a_time(cell)."""
    model, workers, cuts = describe(cell.model, cell.length), cell.workers, STRATEGIES[cell.strategy].cuts
    calls, whole = traffic(cell, model), model.sizes.parameters
    if cuts == "pipeline":
        return _pipeline(cell, costs, model, calls.apart)
    computing, kept = costs.forward_backward, whole / workers
    if cuts:  # blocks are cut, the embedding matrix, which is also the head, is not
        computing *= (1 - head(model)) / workers + head(model)
        kept = cut(model.sizes, workers).parameters
    elif STRATEGIES[cell.strategy].ideal == (16, 0):
        kept = whole
    forward, backward = FORWARD * computing, (1 - FORWARD) * computing
    # A forward that gathers blocks is a backward that sends them, seen in reverse: the first gather cannot be hidden.
    gathering = step_time(0, forward, 0, timed(reversed(calls.forward), forward, cell, costs, model))
    buckets = timed(calls.backward, backward, cell, costs, model)
    buckets += [TimedBucket(backward, one.seconds(workers, costs.link)) for one in calls.apart]
    step = step_time(forward, backward, 0, buckets)
    hidden = gathering.hidden + step.hidden
    return PredictedStep(
        computing=computing + costs.busy * hidden,
        optimizer=costs.optimizer * kept / whole,
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


def head(model: Architecture) -> float:
    """Return the head's part of the arithmetic: as large as its part of the matrices."""
    return model.sizes.embedding / (model.sizes.blocks * model.sizes.block + model.sizes.embedding)


def _pipeline(cell: PredictedCell, costs: Costs, model: Architecture, calls: list[CollectiveCost]) -> PredictedStep:
    """1F1B: the first micro-batch passes all stages, then the slowest stage computes the others, one by one."""
    sizes, stages, examples = model.sizes, cell.workers, cell.batch * cell.workers
    count = micro_batches(examples, stages)
    blocks = [sum(block * stages // sizes.blocks == stage for block in range(sizes.blocks)) for stage in range(stages)]
    shares = [here / sizes.blocks * (1 - head(model)) for here in blocks]
    shares[-1] += head(model)
    # A stage that waits leaves its core to another one. But all of them have no more than their cores.
    in_line = costs.forward_backward / costs.per_core * (1 + (count - 1) * max(shares))
    computing = max(in_line, costs.forward_backward * count / stages)
    neighbours = stages > 1
    border = neighbours * costs.link.seconds(examples / count * sizes.border)
    embedding = neighbours * costs.link.seconds(sizes.embedding)  # both ends need the sum of its gradients
    hidden = 2 * (count - 1) * border
    boundaries = examples * sizes.border * (stages - 1) + neighbours * sizes.embedding
    return PredictedStep(
        computing=computing + costs.busy * hidden,
        optimizer=costs.optimizer * min(1.0, (max(blocks) * sizes.block + sizes.embedding) / sizes.parameters),
        exposed=2 * (stages - 1) * border + embedding + sum(one.seconds(stages, costs.link) for one in calls),
        hidden=hidden,
        sent=2 * boundaries / stages + sum(one.sent(stages) for one in calls),
    )


def range_of(cell: PredictedCell, costs: Costs, error: float) -> tuple[float, float]:
    """Return least and most seconds of a step: no message has a latency and all is hidden; or nothing is hidden.

    error: of predictions that were compared, by which both ends are moved apart.
    """
    most, least = predict(cell, costs), predict(cell, replace(costs, busy=0.0, link=Link(0.0, costs.link.bandwidth)))
    fast = max(least.computing, least.exposed + least.hidden) + least.optimizer
    return fast / (1 + error), (most.total + most.hidden) * (1 + error)
