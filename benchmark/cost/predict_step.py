"""Predict a step: from a calibration and a cell to its time with parts, its bytes, and its timeline."""

from collections.abc import Callable
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
    nearest = nearest_engine(calibration, cell)
    architecture = describe(cell.model, cell.length)
    times = ComputeTimes(calibration, architecture, Cores(cell.workers, where.cores))
    links = Links(calibration, where.rate, where.latency)
    notes = dict[str, None]()
    programs(cell, times)  # what cannot be run is said before what does not fit
    needed = memory(cell, architecture, times.small.process)
    check_fit(cell, needed, where.memory or calibration.memory, 1 if where.cores else cell.workers)
    overhead = engine_seconds(calibration, nearest, cell, where, notes) if nearest else 0.0
    if nearest is None or nearest.strategy != cell.strategy:
        cost = f"that of {nearest.strategy}" if nearest else "missing"
        notes[f"the engine of {cell.strategy} was not calibrated: its own cost is {cost}"] = None
    found = run(cell, times, links, where, overhead, times.late(cell.batch, cell.workers))
    least = found.seconds
    if cell.workers > BEYOND * links.most_workers:  # at best, nobody waits, and operations go along trees
        trees = Links(calibration, where.rate, where.latency, tree=True)
        least = min(least, run(cell, times, trees, where, overhead).seconds)
        notes[f"more than {BEYOND} times the {links.most_workers} workers that were calibrated: a range"] = None
    notes = times.notes | links.notes | notes
    return replace(found, least=least, notes=tuple(notes), is_calibrated=not (times.notes or links.notes))


def run(
    cell: Cell, times: ComputeTimes, links: Links, where: Surroundings, overhead: float = 0.0, late: float = 0.0
) -> Prediction:
    """Simulate a step with given times. late: seconds that others wait for the slowest worker."""
    kinds = [with_overhead(kind, overhead) for kind in programs(cell, times)]
    machine = Machine(where.cores or times.machine_cores, not where.cores, times.threads, times.small.launch)
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


def nearest_engine(calibration: Calibration, cell: Cell) -> EngineTimes | None:
    """Return the calibrated step that is most like the cell: of this strategy, or of another one of the same engine."""
    family = STRATEGIES[cell.strategy].engine.split(":")[0]

    def apart(entry: EngineTimes) -> tuple[bool, bool, bool, int, int]:
        return (
            entry.strategy != cell.strategy,
            entry.model != cell.model,
            entry.length != cell.length,
            abs(entry.workers - cell.workers),
            abs(entry.batch - cell.batch),
        )

    same = (entry for entry in calibration.engines if STRATEGIES[entry.strategy].engine.split(":")[0] == family)
    return min((entry for entry in same if not entry.strategy.endswith("_offload")), key=apart, default=None)


def engine_seconds(
    calibration: Calibration, nearest: EngineTimes, cell: Cell, where: Surroundings, notes: dict[str, None]
) -> float:
    """Return what the engine costs beyond its program: the measured step of the nearest cell less the predicted one.

    It is work of the computing thread, with as many workers computing as the prediction has.
    """
    there = Cell(nearest.strategy, nearest.model, nearest.workers, nearest.batch, nearest.length, cell.bucket_bytes)
    times = ComputeTimes(calibration, describe(there.model, there.length), Cores(there.workers))
    if LOOPBACK not in calibration.links and there.workers > 1:
        return 0.0
    expected = run(
        there, times, Links(calibration), Surroundings(), late=times.late(there.batch, there.workers)
    ).seconds
    missing = max(0.0, nearest.seconds - expected)
    if nearest.model != cell.model:
        missing *= len(describe(cell.model, cell.length).weights) / len(times.architecture.weights)
        notes[f"the engine's own cost is that of {nearest.model}, by the number of parameters"] = None
    workers = 1 if where.cores else cell.workers
    return missing * max(1.0, workers / times.machine_cores) / max(1.0, there.workers / times.machine_cores)


def parts(simulated: Simulated, kinds: list[Kind], late: float) -> dict[str, float]:
    """Return what the threads did, in seconds, as means over all ranks; they add up to the step."""
    found = dict.fromkeys(PARTS, 0.0)
    ranks = sum(len(kind.ranks) for kind in kinds)
    ends = [0.0] * len(kinds)
    for span in simulated.spans:
        if span.row != "thread":
            continue
        ends[span.kind] = max(ends[span.kind], span.end)
        name = "engine" if span.engine else span.name
        if not span.blocked and name not in ("forward", "backward", "optimizer", "engine"):
            name = "other"
        found[name] += (span.end - span.start) * len(kinds[span.kind].ranks) / ranks
    idle = sum((simulated.seconds - end) * len(kind.ranks) / ranks for end, kind in zip(ends, kinds, strict=True))
    found["waiting"] += idle + late
    return found


def mean_over_ranks(kinds: list[Kind], size_of: Callable[[str, float, int], float]) -> dict[str, tuple[float, float]]:
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
