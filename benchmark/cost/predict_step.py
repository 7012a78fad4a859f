"""Predict a step: from a calibration and a cell to its time with parts, its bytes, and its timeline."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from benchmark.cost.architecture import describe
from benchmark.cost.calibration import LOOPBACK, Calibration, EngineTimes
from benchmark.cost.cell import Cell
from benchmark.cost.collective_times import Links, moved
from benchmark.cost.compute_times import ComputeTimes, Cores
from benchmark.cost.predicted_memory import Memory, check_fit, memory
from benchmark.cost.programs.program import Compute, Kind, Start
from benchmark.cost.programs.writer import programs
from benchmark.cost.simulate import Machine, Simulated, simulate
from benchmark.strategies import STRATEGIES

BEYOND = 4  # times the calibrated workers: of more, only a range is known
PARTS = ("forward", "backward", "optimizer", "engine", "other", "communication", "waiting", "bubble")


@dataclass(frozen=True)
class Surroundings:
    """Where a step is taken: the link, its further latency in seconds, and the cores of each worker's own machine.

    cores None: all workers share the cores of the calibrated machine. memory: bytes of a machine; None: as calibrated.
    """

    rate: str | None = None
    latency: float = 0.0
    cores: int | None = None
    memory: float | None = None


@dataclass(frozen=True)
class Prediction:
    """A step that has not been run. Seconds until the slowest rank is done; parts are means over the ranks.

    least: less than seconds where only a range is known, whose other end it is.

    parts: forward, backward, optimizer, engine (what the framework needs beyond the arithmetic), other (copies on
    behalf of the network), communication (exposed), waiting (for other ranks), bubble (for another stage's result).
    sent: operation -> calls and bytes out of a rank; on_wire: with TCP's frames. notes: what was extrapolated.
    """

    cell: Cell
    where: Surroundings
    seconds: float
    parts: dict[str, float]
    sent: dict[str, tuple[float, float]]
    on_wire: float
    memory: Memory
    simulated: Simulated
    notes: tuple[str, ...] = ()
    is_calibrated: bool = True
    kinds: tuple[Kind, ...] = field(default=(), repr=False)
    least: float = 0.0

    @property
    def is_range(self) -> bool:
        return self.least < self.seconds

    @property
    def examples_per_second(self) -> float:
        return self.cell.batch * self.cell.workers / self.seconds

    def times(self) -> dict[str, Any]:
        """Return the step in ms and its throughput; only a range where no more is known."""
        if self.is_range:
            return {"step_ms_range": [self.least * 1e3, self.seconds * 1e3]}
        return {"step_ms": self.seconds * 1e3, "examples_per_second": self.examples_per_second}

    @property
    def sent_bytes(self) -> float:
        return sum(size for _, size in self.sent.values())


def predict(calibration: Calibration, cell: Cell, where: Surroundings = Surroundings()) -> Prediction:
    """Return the prediction; raises InputError where there is nothing to predict from."""
    architecture = describe(cell.model, cell.length)
    times = ComputeTimes(calibration, architecture, Cores(cell.workers, where.cores))
    links = Links(calibration, where.rate, where.latency)
    notes = dict[str, None]()
    programs(cell, times)  # what cannot be run is said before what does not fit
    needed = memory(cell, architecture, times.small.process)
    check_fit(cell, needed, where.memory or calibration.memory, 1 if where.cores else cell.workers)
    overhead = engine_seconds(calibration, cell, times, where, notes)
    prediction = run(cell, times, links, where, overhead, times.late(cell.batch, cell.workers))
    least = prediction.seconds
    if cell.workers > BEYOND * links.most_workers:  # at best, nobody waits, and operations go along trees
        trees = Links(calibration, where.rate, where.latency, tree=True)
        least = min(least, run(cell, times, trees, where, overhead).seconds)
        notes[f"more than {BEYOND} times the {links.most_workers} workers that were calibrated: a range"] = None
    notes = times.notes | links.notes | notes
    return replace(prediction, least=least, notes=tuple(notes), is_calibrated=not (times.notes or links.notes))


def run(
    cell: Cell, times: ComputeTimes, links: Links, where: Surroundings, overhead: float = 0.0, late: float = 0.0
) -> Prediction:
    """Simulate a step with given times. late: seconds that others wait for the slowest worker."""
    kinds = [with_overhead(kind, overhead) for kind in programs(cell, times)]
    machine = Machine(where.cores or times.machine_cores, not where.cores, times.threads)
    simulated = simulate(kinds, links, machine)
    return Prediction(
        cell=cell,
        where=where,
        seconds=simulated.seconds + late,
        parts=parts(simulated, kinds, late),
        sent=mean_over_ranks(kinds, moved),
        on_wire=sum(size for _, size in mean_over_ranks(kinds, links.on_wire).values()),
        memory=memory(cell, times.architecture, times.small.process),
        simulated=simulated,
        kinds=tuple(kinds),
    )


def with_overhead(kind: Kind, seconds: float) -> Kind:
    """Return the kind with the engine's own cost at the end of its step."""
    if not seconds:
        return kind
    return replace(kind, program=(*kind.program, Compute("optimizer", seconds, engine=True)))


def engine_seconds(
    calibration: Calibration, cell: Cell, times: ComputeTimes, where: Surroundings, notes: dict[str, None]
) -> float:
    """Return what the engine costs beyond its program, as work of the computing thread.

    It is known for calibrated steps: the measured time less the predicted one. One part is the same for all engines:
    a step of a whole training loop takes longer than its pieces one by one. It is what steps that only average
    gradients took longer. What another engine costs more is shared among its operations: each is started in Python,
    and wakes threads of every worker. So another model costs as much more as it has more operations, and a strategy
    that was not calibrated takes the cost of an operation from its framework, if possible with the same program.
    """
    known = [entry for entry in calibration.engines if not entry.strategy.endswith("_offload")]
    known = [entry for entry in known if entry.model == cell.model] or known
    row = STRATEGIES[cell.strategy]
    framework = [entry for entry in known if framework_of(entry.strategy) == framework_of(cell.strategy)]
    like = (
        [entry for entry in framework if entry.strategy == cell.strategy]
        or [entry for entry in framework if STRATEGIES[entry.strategy].program == row.program]
        or framework
    )
    names = ", ".join(dict.fromkeys(entry.strategy for entry in like))
    if names != cell.strategy:
        cost = f"that of {names}" if names else "missing"
        notes[f"the engine of {cell.strategy} was not calibrated: its own cost is {cost}"] = None
    if not like or (LOOPBACK not in calibration.links and cell.workers > 1):
        return 0.0
    if like[0].model != cell.model:
        models = ", ".join(dict.fromkeys(entry.model for entry in like))
        notes[f"the engine's own cost is that of {models}, by the number of operations"] = None
    plain = [entry for entry in known if STRATEGIES[entry.strategy].program.startswith("unsharded")] or like
    of_any = statistics.fmean(engine_cost(calibration, entry)[0] for entry in plain)
    costs = [engine_cost(calibration, entry) for entry in like]
    each = sum(seconds - of_any for seconds, _ in costs) / sum(count for _, count in costs)
    crowd = 1.0 if where.cores else max(1.0, cell.workers / times.machine_cores)
    return crowd * max(0.0, of_any + each * operations(programs(cell, times)))


def framework_of(strategy: str) -> str:
    return STRATEGIES[strategy].engine.split(":")[0]


def engine_cost(calibration: Calibration, entry: EngineTimes) -> tuple[float, float]:
    """Return by how many seconds of a core a calibrated step took longer than its program, and its operations."""
    there = Cell(entry.strategy, entry.model, entry.workers, entry.batch, entry.length)
    times = ComputeTimes(calibration, describe(there.model, there.length), Cores(there.workers))
    late = times.late(there.batch, there.workers)
    expected = run(there, times, Links(calibration), Surroundings(), late=late)
    crowd = max(1.0, entry.workers / times.machine_cores)
    return max(0.0, entry.seconds - expected.seconds) / crowd, operations(expected.kinds)


def operations(kinds: Sequence[Kind]) -> float:
    """Return in how many operations a rank takes part, as a mean; a message to one other rank is none."""
    calls = (calls for name, (calls, _) in mean_over_ranks(kinds, moved).items() if name != "hop")
    return max(1.0, sum(calls))


def parts(simulated: Simulated, kinds: list[Kind], late: float) -> dict[str, float]:
    """Return what the threads did, in seconds, as means over all ranks; they add up to the step."""
    seconds = dict.fromkeys(PARTS, 0.0)
    ranks = sum(len(kind.ranks) for kind in kinds)
    ends = [0.0] * len(kinds)
    for span in simulated.spans:
        if span.row != "thread":
            continue
        ends[span.kind] = max(ends[span.kind], span.end)
        name = "engine" if span.engine else span.name
        if not span.blocked and name not in ("forward", "backward", "optimizer", "engine"):
            name = "other"
        seconds[name] += (span.end - span.start) * len(kinds[span.kind].ranks) / ranks
    idle = sum((simulated.seconds - end) * len(kind.ranks) / ranks for end, kind in zip(ends, kinds, strict=True))
    seconds["waiting"] += idle + late
    return seconds


def mean_over_ranks(
    kinds: Sequence[Kind], size_of: Callable[[str, float, int], float]
) -> dict[str, tuple[float, float]]:
    """Return calls and bytes of each operation, as means over all ranks; size_of takes operation, bytes and workers."""
    calls, size = dict[str, float](), dict[str, float]()
    ranks = sum(len(kind.ranks) for kind in kinds)
    for i, kind in enumerate(kinds):
        starts = (step for step in kind.program if isinstance(step, Start) and i in step.members)
        for start in starts:
            name, count = start.operation, start.repeats * len(kind.ranks) / ranks
            calls[name] = calls.get(name, 0.0) + count
            size[name] = size.get(name, 0.0) + count * size_of(name, start.bytes, start.workers)
    return {name: (calls[name], size[name]) for name in calls}
