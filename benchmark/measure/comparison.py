"""From the rounds that benchmark.compare has measured to its rows, its table and its notes."""

import json
import math
import statistics
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path

import numpy as np

from benchmark.measure.compared import AGAIN, WARM_UP, Figures
from benchmark.measure.intervals import interval, mean_interval, ratio
from benchmark.measure.mfu import utilisation
from benchmark.measure.output import MB, Json, Lines, cell
from benchmark.measure.payload import sends_nothing
from benchmark.names import is_own
from benchmark.proof.prover import NOT_PROVED
from benchmark.settings import Settings
from benchmark.strategies import Label
from benchmark.training.workload import what_is_trained

ENOUGH = 20  # rounds: with fewer, intervals are wide, and their ends depend on single steps
WIDE = 0.1  # of a ratio: strategies that differ by less cannot be told apart
# Of a timed step's norm from single's: rounding adds up over the steps. In fp16 the scaler skips steps at its leisure.
NORM_DEVIATION = {"fp32": 1e-2, "bf16": 0.1}

Ends = tuple[float | None, float | None]  # of a 95 % interval; None: too few samples
NO_ENDS: Ends = (None, None)
COUNTED = "peak: of the worker with the most, the most memory that is alive in a step, beyond what was there before"


@dataclass(frozen=True)
class Rounds:
    """What the workers have measured: of each round and strategy its seconds, of each strategy its losses and norms.

    figures: of each worker and strategy. proofs: rows of benchmark.prove.
    """

    labels: list[Label]
    seconds: list[list[float]]
    losses: list[list[float]]
    norms: list[list[float | None]]
    figures: list[list[Figures]]
    proofs: list[Json]

    def steps_ms(self, label: Label) -> list[float]:
        """Of a strategy, in the rounds after the warm-up."""
        return [1e3 * seconds[self.labels.index(label)] for seconds in self.seconds[WARM_UP:]]


def read_rounds(path: Path) -> Rounds:
    values = json.loads(path.read_text())
    values["labels"] = [Label(**label) for label in values["labels"]]
    values["figures"] = [[Figures(**figures) for figures in worker] for worker in values["figures"]]
    return Rounds(**values)


@dataclass(frozen=True)
class Row:
    """A strategy's figures. ratio: of its time over the base's. *_95: ends of the interval. None: not measured."""

    label: Label
    gradient: str
    step_ms: float
    step_ms_95: Ends
    ratio: float
    ratio_95: Ends
    samples_per_second: float
    tokens_per_second: float | None
    mfu: float | None
    loss_difference: float  # the largest from single's
    last_loss: float
    norm: float | None  # of the last step
    measured: Figures
    peak_bytes_95: Ends = NO_ENDS  # over launches, as the next one
    exposed_ms_95: Ends = NO_ENDS

    def as_json(self) -> Json:
        values = asdict(self)
        del values["label"], values["measured"]
        return {"strategy": str(self.label), **values, **asdict(self.measured)}


@dataclass(frozen=True)
class WrongStrategy:
    """A strategy that is wrong, and so has no figures."""

    label: Label
    gradient: str
    sentence: str

    def as_json(self) -> Json:
        return {"strategy": str(self.label), "gradient": self.gradient, "sentence": self.sentence}


def evaluate(settings: Settings, base: str, rounds: Rounds, gpu: str | None) -> tuple[list[Row], list[WrongStrategy]]:
    """A row for each strategy, by speed; and those that are wrong."""
    seconds, losses = np.array(rounds.seconds)[WARM_UP:], np.array(rounds.losses)
    base_seconds = seconds[:, rounds.labels.index(Label(base))]
    gradients = {proof["strategy"]: proof["gradient"] for proof in rounds.proofs} | {"single": "ok"}
    wrong = [proof for proof in rounds.proofs if proof["sentence"]]
    rows, faults = [], [WrongStrategy(Label(one["strategy"]), one["gradient"], one["sentence"]) for one in wrong]
    for column, label in enumerate(rounds.labels):
        norms = rounds.norms[column]
        measured = of_all_workers([figures[column] for figures in rounds.figures])
        workers = 1 if label.strategy == "single" else settings.world_size
        reason = fault(settings.precision, losses[column], norms, rounds.norms[0])
        if reason := reason or sends_nothing("it", workers, measured.sent_bytes):
            faults.append(WrongStrategy(label, reason, f"{label}: {reason}"))
            continue
        of_base, *ratio_ends = ratio(seconds[:, column], base_seconds)
        median, *ends = interval(seconds[:, column] * 1e3)
        speed = settings.examples_per_step / median * 1e3
        rows.append(
            Row(
                label=label,
                gradient=gradients.get(label.strategy, NOT_PROVED),
                step_ms=median,
                step_ms_95=(ends[0], ends[1]),
                ratio=of_base,
                ratio_95=(ratio_ends[0], ratio_ends[1]),
                samples_per_second=speed,
                tokens_per_second=None if is_own(settings.model) else speed * settings.length,
                mfu=utilisation(settings, speed, gpu),
                loss_difference=float(np.abs(losses[column] - losses[0]).max()),
                last_loss=float(losses[column, -1]),
                norm=norms[-1],
                measured=measured,
            )
        )
    return sorted(rows, key=lambda row: row.step_ms), faults


def over_launches(launches: list[tuple[list[Row], list[WrongStrategy]]]) -> tuple[list[Row], list[WrongStrategy]]:
    """The rows of several launches as one; what was wrong in one of them has none."""
    faults = {one.label: one for _, of_launch in launches for one in of_launch}
    if len(launches) == 1:
        return launches[0][0], list(faults.values())
    same: dict[Label, list[Row]] = {}
    for rows, _ in launches:
        for row in rows:
            same.setdefault(row.label, []).append(row)
    means = [mean_of_launches(rows) for label, rows in same.items() if label not in faults]
    return sorted(means, key=lambda row: row.step_ms), list(faults.values())


def mean_of_launches(rows: list[Row]) -> Row:
    """The means of a strategy's launches, with their intervals; what does not depend on the launch is the first's."""
    means: dict[str, float | None] = {}
    ends: dict[str, Ends] = {}
    for name in ("step_ms", "ratio", "samples_per_second", "tokens_per_second", "mfu", "peak_bytes", "exposed_ms"):
        known = [value for row in rows if (value := row.as_json()[name]) is not None]
        means[name], *of_mean = mean_interval(known) if known else (None, None, None)
        ends[f"{name}_95"] = (of_mean[0], of_mean[1])
    of_workers = {name: means.pop(name) for name in ("peak_bytes", "exposed_ms")}
    shown = {name: ends[name] for name in ("step_ms_95", "ratio_95", "peak_bytes_95", "exposed_ms_95")}
    return replace(rows[0], **means, **shown, measured=replace(rows[0].measured, **of_workers))  # type: ignore[arg-type]


def fault(precision: str, losses: np.ndarray, norms: list[float | None], right: list[float | None]) -> str:
    """What was wrong in the timed steps; empty if nothing was. losses: of each step; right: norms of single."""
    allowed = NORM_DEVIATION.get(precision, math.inf)
    for step, (norm, expected) in enumerate(zip(norms, right, strict=True), 1):
        if norm is not None and expected and allowed < math.inf and not abs(norm / expected - 1) <= allowed:
            return f"norm x {norm / expected:.4f} in step {step}"
    return "" if np.isfinite(losses).all() else "loss is not a number"


def of_all_workers(figures: list[Figures]) -> Figures:
    """The mean of what is sent, and otherwise the largest."""
    columns = ([value for value in column if value is not None] for column in zip(*map(astuple, figures), strict=True))
    sent = [one.sent_bytes for one in figures if one.sent_bytes is not None]
    largest = Figures(*(max(values, default=None) for values in columns))
    return replace(largest, sent_bytes=statistics.fmean(sent) if sent else None)


def caption(settings: Settings, launches: int) -> str:
    rounds = f"{settings.max_steps - WARM_UP} rounds after {WARM_UP} of warm-up"
    rounds += f", means of {launches} launches" if launches > 1 else ""
    return f"{what_is_trained(settings)}, {settings.precision}, {rounds}"


def table(settings: Settings, rows: list[Row], faults: list[WrongStrategy], base: str) -> Lines:
    """The figures for people, a line for each strategy."""
    own = is_own(settings.model)
    columns = {  # heading -> figure, unit, digits; a column that nobody could measure is left out
        "ms per step [95 %]": ("step_ms", 1, 1),
        f"ratio to {base} [95 %]": ("ratio", 1, 3),
        "examples/s" if own else "tokens/s": ("samples_per_second" if own else "tokens_per_second", 1, 0),
        "MFU %": ("mfu", 0.01, 1),
        "peak MB": ("peak_bytes", MB, 1),
        "sent MB": ("sent_bytes", MB, 2),
        "sent as": ("sent_as", 1, 0),
        "exposed ms": ("exposed_ms", 1, 2),
        "norm": ("norm", 1, 4),
        "loss": ("last_loss", 1, 5),
        "BLEU" if settings.bleu else "metric": ("metric", 1, 4),
    }
    figures = [row.as_json() for row in rows]
    columns = {head: of for head, of in columns.items() if any(row[of[0]] is not None for row in figures)}
    lines = [["strategy", *columns, "from single", "gradient"]]
    for row, values in zip(rows, figures, strict=True):
        cells = []
        for name, unit, digits in columns.values():
            low, high = values.get(f"{name}_95", NO_ENDS)
            has_ends = None not in (low, high)
            ends = f" [{low / unit:.{digits}f}, {high / unit:.{digits}f}]" if has_ends else ""
            cells.append(cell(values[name], digits, unit) + ends)
        lines.append([str(row.label), *cells, f"{row.loss_difference:.1e}", row.gradient])
    return [*lines, *([str(one.label), *[""] * (len(lines[0]) - 2), one.gradient] for one in faults)]


def notes_of(settings: Settings, rows: list[Row], base: str, launches: int = 1) -> list[str]:
    """What a reader has to know beside the table."""
    notes, rounds = [], settings.max_steps - WARM_UP
    widths = {row.label: (row.ratio_95[1] - row.ratio_95[0]) / row.ratio for row in rows if None not in row.ratio_95}  # type: ignore[operator]
    widest = max(widths, key=widths.__getitem__, default=None)
    if (rounds < ENOUGH and launches == 1) or (widest and widths[widest] > WIDE):
        example = f" (the widest: {widest}, {widths[widest]:.0%} of its ratio)" if widest else ""
        more = max(ENOUGH, 4 * rounds) + WARM_UP  # four times the rounds halve an interval
        few, flag = f"{rounds} rounds are", f"--max_steps {more}"
        if launches > 1:
            few, flag = f"{launches} launches are", f"--launches {2 * launches}"
        notes.append(f"note: {few} few for these intervals{example}; {flag} narrows them")
    again = next((row for row in rows if row.label == Label(base, AGAIN)), None)
    if again is None:
        notes.append(f"note: {base} has no second engine here, so the error of these times is not known")
    elif None not in again.ratio_95 and not again.ratio_95[0] <= 1 <= again.ratio_95[1]:  # type: ignore[operator]
        notes.append(
            f"note: the interval of {again.label} does not contain 1: the machine was busy; do not compare times"
        )
    return notes
