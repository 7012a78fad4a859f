"""A student's own figures by name: what answers must cite, what is predicted before a run, and what a sheet compares.

Each is computed from the records alone, so that whoever has the records gets the same number.
"""

import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from handin.findings import iteration_time
from handin.gpt2 import bound_of, epochs_of
from handin.records import DAMAGED, Run, Runs


@dataclass(frozen=True)
class OwnFigure:
    """A number with its unit, and the runs that it was computed from."""

    what: str
    unit: str
    value: float
    runs: tuple[Run, ...] = ()


@dataclass(frozen=True)
class _Row:
    """How a figure is computed from the best run of each kind."""

    what: str
    unit: str
    kinds: tuple[str, ...]
    compute: Callable[..., float]


def _seconds(run: Run) -> float:
    time = iteration_time(run)
    if time is None:
        raise ValueError("no iteration after the first")
    return time.mean


def _passed(run: Run, rank: int) -> float:
    """Return the megabytes that a rank passes to collectives in an iteration."""
    record = run.records[rank]
    return sum(of["bytes"] for of in record["collectives"]) / len(record["iterations"]) / 1e6


def _calls(run: Run) -> float:
    return sum(of["count"] for of in run.records[0]["collectives"] if of["name"] == "all_reduce") / len(run.seconds)


def _communication(run: Run, rank: int) -> float:
    steps = run.records[rank]["iterations"][1:]
    return sum(step["phases"]["communication"] for step in steps) / len(steps)


def _sent(run: Run) -> float:
    return (
        sum(window["sent"] for window in _traffic(run)["windows"])
        / len(run.seconds)
        * run.records[0]["steps_per_epoch"]
        / 1e6
    )


def _tensors(run: Run) -> float:
    return len(_traffic(run)["sent"][0]["tensors"])


def _traffic(run: Run) -> dict[str, Any]:
    return json.loads((run.folder / "traffic_0.json").read_text(encoding="utf-8"))


def _kept(run: Run) -> float:
    return run.records[0]["memory"]["persistent_bytes"] / 1e6


SCALING = "tokens per second of two workers over one"
_SECONDS = "time of an iteration of {}, without the first"
_ROWS = {
    "1_first_loss": _Row("first loss of task 1", "", ("task1",), lambda run: run.losses[0]),
    "1_metric": _Row("metric of task 1 after the last epoch", "", ("task1",), lambda run: next(
        iter(run.records[0]["evaluations"][-1]["metrics"].values()))),
    "1_seconds": _Row(_SECONDS.format("task 1"), "s", ("task1",), _seconds),
    "1_gradient_mb": _Row("gradients of one step", "MB", ("task1",), lambda run: run.setting["parameters"] * 4 / 1e6),
    "2a_seconds": _Row(_SECONDS.format("2a"), "s", ("task2a",), _seconds),
    "2a_mb_rank0": _Row("passed to collectives by rank 0 of 2a in an iteration", "MB", ("task2a",),
        lambda run: _passed(run, 0)),
    "2a_mb_rank1": _Row("passed to collectives by rank 1 of 2a in an iteration", "MB", ("task2a",),
        lambda run: _passed(run, 1)),
    "2a_communication_rank0": _Row("communication of rank 0 of 2a", "s", ("task2a",),
        lambda run: _communication(run, 0)),
    "2a_communication_rank1": _Row("communication of rank 1 of 2a", "s", ("task2a",),
        lambda run: _communication(run, 1)),
    "2b_seconds": _Row(_SECONDS.format("2b"), "s", ("task2b",), _seconds),
    "2b_over_2a": _Row("time of 2b over that of 2a", "", ("task2b", "task2a"), lambda b, a: _seconds(b) / _seconds(a)),
    "2b_over_3": _Row("time of 2b over that of DDP", "", ("task2b", "task3"), lambda b, c: _seconds(b) / _seconds(c)),
    "3_seconds": _Row(_SECONDS.format("task 3"), "s", ("task3",), _seconds),
    "3_speed_up": _Row("speed-up of task 3 over task 1", "", ("task1", "task3"),
        lambda one, ddp: _seconds(one) / _seconds(ddp)),
    "3_calls": _Row("calls of all_reduce in an iteration of task 3", "", ("task3",), _calls),
    "4_sent_mb": _Row("traffic of an epoch that was observed", "MB", ("task4",), _sent),
    "4_tensors": _Row("tensors that an iteration of task 4 sends", "", ("task4",), _tensors),
    "p_speed_up": _Row("speed-up of the pipeline over model_parallel", "", ("pipeline_parallel", "model_parallel"),
        lambda piped, cut: epochs_of(piped)[1].mean / epochs_of(cut)[1].mean),
    "p_bubble": _Row("bubble of the schedule, (K-1)/(M+K-1)", "", ("pipeline_parallel",),
        lambda run: 1 - bound_of(run)[1]),
    "b_ddp_mb": _Row("kept by DDP (overlap)", "MB", ("overlap",), _kept),
    "b_zero2_mb": _Row("kept by zero2", "MB", ("zero2",), _kept),
}  # fmt: skip


def own_figures(runs: Runs) -> dict[str, OwnFigure]:
    """Return every figure that the records give; one that needs a missing or damaged record is left out."""
    best: dict[str, Run] = {}  # by kind, by strategy, by the pipeline's mode
    for kind in ("task1", "task2a", "task2b", "task3", "task4", "pipeline", "beyond"):
        for run in reversed(runs.of(kind)):
            mode = run.config.get("model_parallel_mode") if run.config.get("schedule") == "threads" else None
            best[str(run.config.get("strategy") or mode or kind)] = run
    found = {}
    for name, row in _ROWS.items():
        with contextlib.suppress(*DAMAGED):
            used = tuple(best[kind] for kind in row.kinds)
            found[name] = OwnFigure(row.what, row.unit, float(row.compute(*used)), used)
    with contextlib.suppress(*DAMAGED):  # of all workers, as task 2b keeps it
        one, two = (json.loads((runs.figures / f"data_parallel_{n}.json").read_text()) for n in (1, 2))
        found["2b_scaling"] = OwnFigure(SCALING, "", two["tokens_per_second"] / one["tokens_per_second"])
    return found


def describe(name: str, with_unit: bool = False) -> str:
    """Return what a figure is, also where no record gives it."""
    if name == "2b_scaling":
        return SCALING
    unit = f" ({_ROWS[name].unit})" if with_unit and _ROWS[name].unit else ""
    return f"{_ROWS[name].what}{unit}"


def in_words(figure: OwnFigure) -> str:
    return f"{figure.value:.4g} {figure.unit}".rstrip()
