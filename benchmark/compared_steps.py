"""Measured steps beside their predictions: compared_steps.csv, which `benchmark.predict --compare` rewrites.

compared_steps.txt beside it says on which machine, when and by which command they were measured.
"""

import argparse
import csv
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmark.checks.check import rows_table
from benchmark.measure.machine import environment, machine_line
from benchmark.measure.output import MB, Json, write_csv
from benchmark.measured_costs import costs_of
from benchmark.predicted_memory import peak_bytes
from benchmark.predicted_step import PREDICTED, Costs, PredictedCell, examples_at_a_time
from benchmark.predicted_step import predict as predict_step
from cluster.emulate import bits_per_second, on_nodes, why_not
from common.errors import InputError
from common.paths import ROOT, atomic_write

FILE = Path(__file__).with_name("compared_steps.csv")
ABOUT = FILE.with_suffix(".txt")
FAR = 4  # times what was compared
STEPS, LENGTH = 12, 64  # of each strategy, with those that warm up; tokens of an example
Group = tuple[tuple[str, ...], str, int, int, str]
GROUPS: tuple[Group, ...] = (  # strategies, model, workers, examples of each, rate of links; none: loopback
    (PREDICTED[1:], "gpt2-tiny", 2, 4, ""),  # without single
    (("ddp", "fsdp", "own_zero3"), "gpt2-24m", 2, 2, ""),
    (("ddp", "own_ring", "own_overlap", "own_zero2", "own_zero3"), "gpt2-tiny", 4, 4, "100mbit"),
)


@dataclass(frozen=True)
class ComparedStep:
    """A line of the table. error: of the predicted time, relative. peak: on the worker with the most."""

    strategy: str
    model: str
    workers: int
    batch: int
    rate: str
    predicted_ms: float
    measured_ms: float
    error: float
    predicted_sent_mb: float
    sent_mb: float
    predicted_peak_mb: float
    peak_mb: float


def read() -> list[ComparedStep]:
    """Return the table as it was last written."""
    kinds = ComparedStep.__annotations__
    with FILE.open() as file:
        return [ComparedStep(**{n: kinds[n](text) for n, text in line.items()}) for line in csv.DictReader(file)]


def errors(strategy: str) -> tuple[float, str]:
    """Return the largest error of all predictions, and a sentence about those of a strategy."""
    rows = read()
    of_all, own = [abs(row.error) for row in rows], [row.error for row in rows if row.strategy == strategy]
    of_strategy = f"{strategy} {min(own):+.0%} to {max(own):+.0%}, " if own else ""
    of_others = f"all cells {statistics.fmean(of_all):.0%} in the mean, at most {max(of_all):.0%}"
    return max(of_all), f"errors when last compared: {of_strategy}{of_others} ({ABOUT.read_text().strip()})"


def far(workers: int, rate: float | None) -> list[str]:
    """Return what is far beyond all cells that were compared, a line each."""
    rows = read()
    most = max(row.workers for row in rows)
    least = min((bits_per_second(row.rate) for row in rows if row.rate), default=0.0)
    lines = [f"far beyond what was compared: {workers} workers, up to {most} were"] if workers > FAR * most else []
    if rate and rate < least / FAR:
        lines.append(f"far beyond what was compared: links of {rate / 1e6:g} Mbit/s, down to {least / 1e6:g} were")
    return lines


def compare(parse: Callable[[list[str]], argparse.Namespace]) -> Json:
    """Measure and predict all groups; print and rewrite the table, and return its figures.

    `parse` reads flags of benchmark.predict.
    """
    begin, rows, about = environment(), list[Json](), ""
    for group in GROUPS:
        rate = group[-1]
        rows += map(asdict, compare_group(parse(["--rate", rate] if rate else []), *group))
        about = f"python -m benchmark.predict --compare; {machine_line(begin)}"
        write_csv(FILE, [list(rows[0]), *(list(row.values()) for row in rows)])
        with atomic_write(ABOUT) as file:
            file.write(f"{about}\n")
    print(rows_table(rows), errors("ddp")[1], sep="\n")
    return {"about": about, "cells": rows}


def compare_group(
    question: argparse.Namespace, strategies: tuple[str, ...], model: str, workers: int, batch: int, rate: str
) -> Iterator[ComparedStep]:
    """Measure what predictions start from, then the steps; yield a row for each strategy that this machine can run."""
    if rate and (reason := why_not()):
        print(f"left out, links of {rate}: {reason}", file=sys.stderr)
        return
    costs: dict[int, Costs] = {}
    cells = [PredictedCell(strategy, model, workers, batch, LENGTH) for strategy in strategies]
    for cell in cells:
        if examples_at_a_time(cell) not in costs:
            costs[examples_at_a_time(cell)] = costs_of(cell, question)
    measured = measure_steps(strategies, model, workers, batch, rate)
    for cell in cells:
        if row := measured.get(cell.strategy):
            step = predict_step(cell, costs[examples_at_a_time(cell)])
            yield ComparedStep(
                cell.strategy,
                model,
                workers,
                batch,
                rate,
                predicted_ms=round(1e3 * step.total, 2),
                measured_ms=round(row["step_ms"], 2),
                error=round(1e3 * step.total / row["step_ms"] - 1, 3),
                predicted_sent_mb=round(step.sent / MB, 3),
                sent_mb=round(row["sent_bytes"] / MB, 3),
                predicted_peak_mb=round(peak_bytes(cell.strategy, model, workers, batch, LENGTH) / MB, 1),
                peak_mb=round(row["peak_bytes"] / MB, 1),
            )


def measure_steps(strategies: tuple[str, ...], model: str, workers: int, batch: int, rate: str) -> dict[str, Json]:
    """Return benchmark.compare's rows by strategy."""
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "benchmark.compare", "--model", model, "--batch_size", str(batch)]
        words += ["--length", str(LENGTH), "--strategies", ",".join(strategies), "--max_steps", str(STEPS)]
        words += ["--no_cuda", "--hang_seconds", "300", "--output_dir", folder, "--overwrite_output_dir"]
        command = on_nodes(workers, rate, words) if rate else [*words, "--workers", str(workers)]
        if subprocess.run(command, cwd=ROOT, stdout=sys.stderr).returncode:
            raise InputError(f"{' '.join(command)} failed; see its output above")
        result = json.loads(Path(folder, "comparison.json").read_text())
    return {row["strategy"]: row for row in result["rows"]}
