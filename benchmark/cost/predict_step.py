"""Predict a step: from a calibration and a cell to its time with parts, its bytes, and its timeline."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from benchmark.cost.calibration import LOOPBACK, Calibration, EngineTimes
from benchmark.cost.cell import Cell
from benchmark.cost.collective_times import Links, moved
from benchmark.cost.compute_times import ComputeTimes
from benchmark.cost.predicted_memory import Memory, check_fit, memory
from benchmark.cost.programs.program import Compute, Instruction, Kind, Start, programs
from benchmark.cost.simulate import Machine, Simulated, simulate
from benchmark.strategies import STRATEGIES

BEYOND = 4  # times the calibrated workers: of more, only a range is known
PARTS = ("forward", "backward", "optimizer", "engine", "other", "communication", "waiting", "bubble")


@dataclass(frozen=True)
class Prediction:
    """A step that has not been run. Seconds until the slowest rank is done; parts are means over the ranks.

    least: less than seconds where only a range is known, whose other end it is.
    parts: forward, backward, optimizer, engine (what the framework needs beyond the arithmetic), other (copies on
    behalf of the network), communication (exposed), waiting (for other ranks), bubble (for another stage's result).
    sent: operation -> calls and bytes out of a rank; on_wire: with TCP's frames. notes: what was extrapolated.
    """

    cell: Cell
    seconds: float
    least: float
    parts: dict[str, float]
    sent: dict[str, tuple[float, float]]
    on_wire: float
    memory: Memory
    simulated: Simulated
    notes: tuple[str, ...]
    is_calibrated: bool
    kinds: tuple[Kind, ...] = field(repr=False)

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


def predict(calibration: Calibration, cell: Cell) -> Prediction:
    """Return the prediction; raises InputError where there is nothing to predict from."""
    times = ComputeTimes(calibration, cell)
    links = Links(calibration, cell.rate, cell.latency)
    kinds = programs(times)  # what cannot be run is said before what does not fit
    needed = memory(times)
    check_fit(cell, needed, cell.memory or calibration.memory, 1 if cell.cores else cell.workers)
    notes = dict[str, None]()
    kinds = with_engine(kinds, *engine_seconds(calibration, times, operations(kinds), notes))
    late = times.late(cell.batch, cell.workers)  # others wait so long for the slowest worker
    simulated = simulate(kinds, links, machine(times))
    seconds = least = simulated.seconds + late
    if cell.workers > BEYOND * links.most_workers:  # at best, nobody waits, and operations go along trees
        trees = Links(calibration, cell.rate, cell.latency, tree=True)
        least = min(least, simulate(kinds, trees, machine(times)).seconds)
        notes[f"more than {BEYOND} times the {links.most_workers} workers that were calibrated: a range"] = None
    return Prediction(
        cell=cell,
        seconds=seconds,
        least=least,
        parts=parts(simulated, kinds, late),
        sent=sent(kinds),
        on_wire=sum(count * links.on_wire(s.operation, s.bytes, s.workers) for s, count in started(kinds)),
        memory=needed,
        simulated=simulated,
        notes=tuple(times.notes | links.notes | notes),
        is_calibrated=not (times.notes or links.notes),
        kinds=tuple(kinds),
    )


def machine(times: ComputeTimes) -> Machine:
    """Return whose cores compute: each worker's own, or those of the calibrated machine."""
    return Machine(times.cell.cores or times.machine_cores, not times.cell.cores, times.threads)


def with_engine(kinds: Sequence[Kind], once: float, each: float) -> list[Kind]:
    """Return the programs with the engine's work: some before each operation of a sender, and the rest at the end."""

    def extended(number: int, kind: Kind) -> Iterator[Instruction]:
        for step in kind.program:
            if isinstance(step, Start) and number in step.senders and each > 0:
                yield Compute("communication", each * step.repeats, engine=True)
            yield step
        if once > 0:
            yield Compute("optimizer", once, engine=True)

    return [replace(kind, program=tuple(extended(number, kind))) for number, kind in enumerate(kinds)]


def engine_seconds(
    calibration: Calibration, times: ComputeTimes, calls: float, notes: dict[str, None]
) -> tuple[float, float]:
    """Return the engine's cost beyond its program, in seconds of the computing thread: once a step, and per operation.

    It is known for calibrated steps: the measured time less the predicted one. One part is the same for all engines:
    a step of a whole training loop takes longer than its pieces one by one. It is what steps that only average
    gradients took longer. What another engine costs more is shared among its operations: each is started in Python,
    and wakes threads of every worker. So another model costs as much more as it has more operations, and a strategy
    that was not calibrated takes the cost of an operation from its framework, if possible with the same program; a
    pipeline takes that of another pipeline, whose operations are messages, too.
    """
    known = [entry for entry in calibration.engines if not entry.strategy.endswith("_offload")]
    cell, row = times.cell, STRATEGIES[times.cell.strategy]
    known = [entry for entry in known if entry.model == cell.model] or known
    framework = [entry for entry in known if framework_of(entry.strategy) == framework_of(cell.strategy)]
    like = (
        [entry for entry in framework if entry.strategy == cell.strategy]
        or [entry for entry in known if row.cuts == STRATEGIES[entry.strategy].cuts == "pipeline"]
        or [entry for entry in framework if STRATEGIES[entry.strategy].program == row.program]
        or framework
    )
    names = ", ".join(dict.fromkeys(entry.strategy for entry in like))
    if names != cell.strategy:
        cost = f"that of {names}" if names else "missing"
        notes[f"the engine of {cell.strategy} was not calibrated: its own cost is {cost}"] = None
    if not like or (LOOPBACK not in calibration.links and cell.workers > 1):
        return 0.0, 0.0
    if like[0].model != cell.model:
        models = ", ".join(dict.fromkeys(entry.model for entry in like))
        notes[f"the engine's own cost is that of {models}, by the number of operations"] = None
    plain = [entry for entry in known if STRATEGIES[entry.strategy].program.startswith("unsharded")] or like
    of_any = statistics.fmean(engine_cost(calibration, entry)[0] for entry in plain)
    costs = [engine_cost(calibration, entry) for entry in like]
    each = sum(seconds - of_any for seconds, _ in costs) / sum(count for _, count in costs)
    crowd = 1.0 if cell.cores else max(1.0, cell.workers / times.machine_cores)
    if each < 0:
        return crowd * max(0.0, of_any + each * calls), 0.0
    return crowd * of_any, crowd * each


def framework_of(strategy: str) -> str:
    return STRATEGIES[strategy].engine.split(":")[0]


def engine_cost(calibration: Calibration, entry: EngineTimes) -> tuple[float, float]:
    """Return by how many seconds of a core a calibrated step took longer than its program, and its operations."""
    times = ComputeTimes(calibration, Cell(entry.strategy, entry.model, entry.workers, entry.batch, entry.length))
    kinds, late = programs(times), times.late(entry.batch, entry.workers)
    expected = simulate(kinds, Links(calibration), machine(times)).seconds + late
    crowd = max(1.0, entry.workers / times.machine_cores)
    return max(0.0, entry.seconds - expected) / crowd, operations(kinds)


def operations(kinds: Sequence[Kind]) -> float:
    """Return in how many operations a rank takes part, as a mean; a message is one of its sender."""
    return max(1.0, sum(count for _, count in started(kinds)))


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


def started(kinds: Sequence[Kind]) -> Iterator[tuple[Start, float]]:
    """Yield all operations with how often a rank takes part, as a mean over all ranks; in a message, its sender."""
    ranks = sum(len(kind.ranks) for kind in kinds)
    for number, kind in enumerate(kinds):
        for step in kind.program:
            if isinstance(step, Start) and number in step.senders:
                yield step, step.repeats * len(kind.ranks) / ranks


def sent(kinds: Sequence[Kind]) -> dict[str, tuple[float, float]]:
    """Return calls and bytes of each operation, as means over all ranks."""
    totals: dict[str, tuple[float, float]] = {}
    for start, count in started(kinds):
        calls, size = totals.get(start.operation, (0.0, 0.0))
        more = count * moved(start.operation, start.bytes, start.workers)
        totals[start.operation] = calls + count, size + more
    return totals
