"""From the runs in a folder to their rows: figures by column, speed-ups over other runs, and what is doubtful."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmark.measure.machine import busy
from benchmark.measure.output import MB, Json
from benchmark.measure.record import FailedRun, RunRecord, SweepCell, read_launch, read_outcome
from benchmark.strategies import Label
from common.errors import InputError

SAME = 1e-4  # training losses in fp32 that differ by more are not of the same training
# Settings of equal trainings, whose losses agree.
ALIKE = ("model", "length", "precision", "seed", "learning_rate", "optimizer", "data_dir", "dropout")
SINGLE = Label("single")
USED = ("cpu_utilisation", "gpu_utilisation", "gpu_temperature")


@dataclass
class CellRuns:
    """All launches of a cell. gradient: by the proof."""

    cell: SweepCell
    gradient: str
    records: list[RunRecord] = field(default_factory=list)
    failure: FailedRun | None = None

    @property
    def record(self) -> RunRecord | None:
        """That with the median throughput; None if all have failed."""
        ordered = sorted(self.records, key=lambda record: record.samples_per_second or 0.0)
        return ordered[(len(ordered) - 1) // 2] if ordered else None


def read_runs(folder: Path) -> dict[SweepCell, CellRuns]:
    """All runs below a folder by their cell. Raises InputError if there is none."""
    found: dict[SweepCell, CellRuns] = {}
    files = [file for name in ("result.json", "failure.json") for file in folder.rglob(name)]
    for place in sorted({file.parent for file in files}):
        launch, outcome = read_launch(place), read_outcome(place)
        if launch:
            key, gradient = replace(launch.cell, repeat=0), launch.gradient
        elif isinstance(outcome, RunRecord):  # of a single benchmark.run
            key = SweepCell(Label(outcome.strategy), outcome.model, outcome.batch_size, outcome.world_size)
            gradient = "not proved"
        else:
            continue
        runs = found.setdefault(key, CellRuns(key, gradient))
        if isinstance(outcome, RunRecord):
            runs.records.append(outcome)
        else:
            runs.failure = outcome
    if not found:
        raise InputError(f"{folder} holds no runs; run python -m benchmark.sweep first")
    return found


def timed(found: dict[SweepCell, CellRuns]) -> Iterator[tuple[CellRuns, RunRecord]]:
    yield from ((runs, runs.record) for runs in found.values() if runs.record and runs.record.steps_ms)


def mb(size: float | None) -> float | None:
    return None if size is None else size / MB


def in_timed_steps(record: RunRecord, ms: float | None) -> float | None:
    """Seconds of what was measured in the traced steps."""
    return None if ms is None else ms * record.steps.timed / 1e3


# Figures with an interval, whose ends have columns of their own: _low and _high.
SPREAD: dict[str, Callable[[RunRecord], float | None]] = {
    "examples_per_second": lambda record: record.samples_per_second,
    "step_ms": lambda record: record.step_ms,
    "communication_s": lambda record: in_timed_steps(record, record.communication.total_ms),  # under way
    "exposed_s": lambda record: in_timed_steps(record, record.communication.exposed_ms),  # and nothing was computed
    "peak_mb": lambda record: mb(record.most_memory.peak),  # on the worker with the most
    "gpu_power": lambda record: getattr(record.utilisation, "gpu_power", None),
}


def spread(runs: CellRuns, record: RunRecord) -> dict[str, float | None]:
    """Each figure of a record with its 95 % interval: of the mean over launches, from three of them on.

    With fewer, only the time of a step has one: of its median, within the launch.
    """
    from benchmark.measure.intervals import mean_interval  # here: it loads scipy

    figures: dict[str, float | None] = {}
    for name, figure in SPREAD.items():
        launches = [value for one in runs.records if (value := figure(one)) is not None]
        low, high = mean_interval(launches)[1:] if launches else (None, None)
        if name == "step_ms" and low is None:
            low, high = record.step_ms_95
        figures |= {name: figure(record), f"{name}_low": low, f"{name}_high": high}
    return figures


def row_of(runs: CellRuns, record: RunRecord, found: dict[SweepCell, CellRuns]) -> Json:
    """A run's figures by column; None for what was not measured. Times are those of all timed steps."""
    label, model, batch, workers = runs.cell.label, runs.cell.model, runs.cell.batch_size, runs.cell.workers
    speed, memory = record.samples_per_second, record.most_memory
    validation = record.evaluations[-1] if record.evaluations else {}

    def over(base: Label, batch_size: int) -> float | None:
        """This throughput over that of another run on one worker."""
        other = found.get(SweepCell(base, model, batch_size, 1))
        base_speed = other.record.samples_per_second if other and other.record else None
        return speed / base_speed if speed and base_speed else None

    return {
        "model": Path(model).name,
        "strategy": str(label),
        "workers": workers,
        "batch_size": batch,  # of one worker
        "length": record.length,
        "precision": record.precision,
        "launches": len(runs.records),
        "speedup": over(label, batch * workers),  # over the same strategy on one worker, equal examples in a step
        "over_single": over(SINGLE, batch * workers),  # over one worker without any framework, equal examples
        "weak_speedup": over(label, batch),  # over the same strategy on one worker, equal examples on each worker
        **spread(runs, record),
        "total_s": record.wall_s,
        "sent_mb": mb(record.communication.sent_bytes),  # by a worker in a step
        "ideal_mb": mb(memory.persistent_ideal),  # parameters, gradients, optimizer of a worker, by the papers
        "kept_mb": mb(memory.persistent_counted),  # the same, counted
        "train_loss": record.losses[-1],
        "validation_loss": validation.get("loss"),
        # metric: of a user's own model
        **{name: validation.get(name) for name in ("perplexity", "accuracy", "metric")},
        "bleu": record.bleu,
        **{name: getattr(record.utilisation, name, None) for name in USED},
        "load": record.environment["load"],  # of the machine, in the minute before
        "gradient": "ok" if label.strategy == "single" else runs.gradient,
        "flagged": None,  # see doubts()
    }


def doubts(found: dict[SweepCell, CellRuns], rows: dict[SweepCell, Json]) -> Iterator[tuple[SweepCell, str]]:
    """What cannot be true, and what should not be believed, by cell."""
    alike: dict[tuple, tuple[str, RunRecord]] = {}
    for cell, row in rows.items():
        if (speedup := max(row["speedup"] or 0.0, row["weak_speedup"] or 0.0)) > cell.workers:
            yield cell, f"speed-up {speedup:.2f} exceeds the number of workers, {cell.workers}"
    for runs, record in timed(found):
        cell = runs.cell
        if len(record.losses) > 1 and len(set(record.losses)) == 1:
            yield cell, f"the loss never changes ({record.losses[0]})"
        if words := busy(record.environment):
            yield cell, words
        settings = (record.examples_per_step, *(record.settings[setting] for setting in ALIKE))
        other, expected = alike.setdefault(settings, (cell.name, record))
        for step, (loss, right) in enumerate(zip(record.losses, expected.losses, strict=False), 1):
            if record.precision == "fp32" and not abs(loss - right) <= SAME:  # a NaN is one, too
                yield cell, f"loss {loss:.6f} in step {step}, but {right:.6f} in {other}: another training"
                break
