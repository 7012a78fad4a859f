"""The record of a run, typed: benchmark.run writes it to result.json, tables and figures are made from it.

This file loads no torch: commands that only read records start at once.
"""

import json
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from benchmark.measure.output import Json
from benchmark.names import is_own
from benchmark.strategies import Label
from common.errors import InputError

COUNTED = (
    "peak: the most memory that is allocated in a step, beyond what was there before the model, on the worker with the "
    "most; a buffer counts whole, also where a small model fills a part of it (DeepSpeed's bucket: 26 MB)"
)


@dataclass(frozen=True)
class Steps:
    """How many steps were not counted (warm-up), timed, and traced after that."""

    dropped: int
    timed: int
    traced: int


@dataclass(frozen=True)
class Communication:
    """One worker's, per step. total: under way; exposed: while nothing was computed. None: could not be measured."""

    total_ms: float | None = None
    exposed_ms: float | None = None
    sent_bytes: float | None = None
    sent_calls: float | None = None


@dataclass(frozen=True)
class Memory:
    """One worker's bytes; None: could not be measured.

    persistent: parameters, gradients and optimizer right after backward, by the papers (ideal), and what is alive then
    (counted). peak: the most that was alive in a step. Both are beyond what was there before the model.
    process_peak: of the whole process. device_reserved: by torch on a GPU.
    """

    persistent_ideal: float
    persistent_counted: int | None
    peak: int | None
    process_peak: int | None
    device_reserved: int | None


@dataclass(frozen=True)
class Utilisation:
    """One worker's: busy cores; its GPU's utilisation (%), power (W) and temperature (degrees C), None without one."""

    cpu_utilisation: float
    gpu_utilisation: float | None = None
    gpu_power: float | None = None
    gpu_temperature: float | None = None


@dataclass(frozen=True)
class RunRecord:
    """What one worker measured; `workers` holds the records of all of them, in the first one's file."""

    strategy: str
    model: str
    parameters: int
    world_size: int
    batch_size: int  # examples of one worker in one forward
    accumulation: int
    length: int  # tokens of an example
    precision: str
    steps: Steps
    steps_ms: list[float]  # of each timed step
    step_ms_95: list[float | None]  # 95 % interval of their median
    phases_ms: dict[str, float]  # means of the timed steps
    losses: list[float]  # of each step: the mean of all workers
    norms: list[float | None]  # of each step's gradient, before clipping
    evaluations: list[dict[str, float]]
    communication: Communication
    memory: Memory
    utilisation: Utilisation | None
    environment: Json  # machine.environment(), before the run
    settings: Json
    bleu: float | None = None
    workers: tuple["RunRecord", ...] = ()

    @property
    def examples_per_step(self) -> int:
        return self.batch_size * self.accumulation * self.world_size

    @property
    def wall_s(self) -> float:
        return sum(self.steps_ms) / 1e3

    @property
    def step_ms(self) -> float | None:
        """The median."""
        ordered, middle = sorted(self.steps_ms), len(self.steps_ms) // 2
        return (ordered[middle] + ordered[-middle - 1]) / 2 if ordered else None

    @property
    def samples_per_second(self) -> float | None:
        return self.examples_per_step * len(self.steps_ms) / self.wall_s if self.steps_ms else None

    @property
    def tokens_per_second(self) -> float | None:
        """None for a user's own model, whose examples are not tokens."""
        speed = self.samples_per_second
        return None if speed is None or is_own(self.model) else speed * self.length

    @property
    def most_memory(self) -> Memory:
        """The memory of the worker with the highest peak."""
        return max((worker.memory for worker in self.workers or (self,)), key=lambda memory: memory.peak or 0)

    def summary(self) -> Json:
        """The figures for the last line of a command: without lists and settings."""
        lists = ("steps_ms", "losses", "norms", "settings", "workers")
        derived = ("step_ms", "wall_s", "samples_per_second", "tokens_per_second")
        stored = {name: value for name, value in asdict(replace(self, workers=())).items() if name not in lists}
        ends = {
            "first_loss": self.losses[0] if self.losses else None,
            "last_loss": self.losses[-1] if self.losses else None,
            "last_norm": self.norms[-1] if self.norms else None,
        }
        return stored | {name: getattr(self, name) for name in derived} | ends

    def as_json(self) -> Json:
        """Everything, with the derived figures."""
        return asdict(replace(self, workers=())) | self.summary() | {"workers": [asdict(one) for one in self.workers]}


def read_record(path: Path) -> RunRecord:
    """Return the record of a result.json. Raises InputError if the file is none."""
    try:
        return _from_json(json.loads(path.read_text()))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"expected a result.json of benchmark.run, got {path} ({error!r:.80})") from None


def _from_json(values: Json) -> RunRecord:
    parts = {"steps": Steps, "communication": Communication, "memory": Memory, "utilisation": Utilisation}
    known = {field.name: values[field.name] for field in fields(RunRecord)}
    known |= {name: kind(**values[name]) if values[name] else None for name, kind in parts.items()}
    return RunRecord(**known | {"workers": tuple(_from_json(worker) for worker in values["workers"])})


@dataclass(frozen=True)
class SweepCell:
    """One launch of a sweep. batch_size: of one worker. repeat: of several launches of the same."""

    label: Label
    model: str
    batch_size: int
    workers: int
    repeat: int = 0

    @property
    def name(self) -> str:
        """The name of its folder."""
        again = f"-r{self.repeat}" if self.repeat else ""
        strategy = str(self.label).replace(" ", "_")
        return f"{Path(self.model).name}-{strategy}-b{self.batch_size}-w{self.workers}{again}"


@dataclass(frozen=True)
class FailedRun:
    """A launch without a record. outcome: OOM, wrong (its gradient is), or error."""

    outcome: str
    message: str


@dataclass(frozen=True)
class SweepLaunch:
    """What a sweep keeps of a launch in cell.json. gradient: by the proof. made_with: flags, commit, versions, threads;
    only what was made with the same may stand in one table."""

    cell: SweepCell
    gradient: str
    made_with: dict[str, str]


def read_launch(place: Path) -> SweepLaunch | None:
    """Return what a sweep kept in this folder; None where there was no sweep."""
    if not (place / "cell.json").exists():
        return None
    values = json.loads((place / "cell.json").read_text())
    cell = values.pop("cell")
    return SweepLaunch(SweepCell(**cell | {"label": Label(**cell["label"])}), **values)


def read_outcome(place: Path) -> RunRecord | FailedRun | None:
    """Return what a run has left in its folder: its record, its failure, or nothing."""
    if (place / "failure.json").exists():
        return FailedRun(**json.loads((place / "failure.json").read_text()))
    return read_record(place / "result.json") if (place / "result.json").exists() else None
