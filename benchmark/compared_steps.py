"""Measured steps beside their predictions: compared_steps.csv, which `benchmark.predict --compare` rewrites."""

import argparse
import csv
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmark.measure.machine import environment, machine_line
from benchmark.measure.output import MB, rows_table, write_csv
from benchmark.measured_costs import costs_of
from benchmark.predicted_memory import peak_bytes
from benchmark.predicted_step import PREDICTED, Cell, Costs, examples_at_a_time
from benchmark.predicted_step import predict as predict_step
from cluster.emulate import bits_per_second, on_nodes, why_not
from common.errors import InputError
from common.paths import ROOT

FILE = Path(__file__).with_name("compared_steps.csv")
FAR = 4  # times what was compared
STEPS, LENGTH = 12, 64  # of each strategy, with those that warm up; tokens of an example
Group = tuple[tuple[str, ...], str, int, int, str]
GROUPS: tuple[Group, ...] = (  # strategies, model, workers, examples of each, rate of links; none: loopback
    (PREDICTED[1:], "gpt2-tiny", 2, 4, ""),  # without single
    (("ddp", "fsdp", "own_zero3"), "gpt2-24m", 2, 2, ""),
    (("ddp", "own_ring", "own_overlap", "own_zero2", "own_zero3"), "gpt2-tiny", 4, 4, "100mbit"),
)
Row = dict[str, Any]


def read() -> tuple[str, list[Row]]:
    """Return the table as it was last written: command, machine and date; its rows."""
    about, *lines = FILE.read_text().splitlines()
    numbers = ("workers", "batch", "predicted_ms", "measured_ms", "error")
    return about.removeprefix("# "), [row | {n: float(row[n]) for n in numbers} for row in csv.DictReader(lines)]


def errors(strategy: str) -> tuple[float, str]:
    """Return the largest error of all predictions, and a sentence about those of a strategy."""
    about, rows = read()
    of_all, own = [abs(row["error"]) for row in rows], [row["error"] for row in rows if row["strategy"] == strategy]
    of_strategy = f"{strategy} {min(own):+.0%} to {max(own):+.0%}, " if own else ""
    of_others = f"all cells {statistics.fmean(of_all):.0%} in the mean, at most {max(of_all):.0%}"
    return max(of_all), f"errors when last compared: {of_strategy}{of_others} ({about})"


def far(workers: int, rate: float | None) -> list[str]:
    """Return what is far beyond all cells that were compared, a line each."""
    _, rows = read()
    most = max(row["workers"] for row in rows)
    least = min((bits_per_second(row["rate"]) for row in rows if row["rate"]), default=0.0)
    lines = [f"far beyond what was compared: {workers} workers, up to {most:.0f} were"] if workers > FAR * most else []
    if rate and rate < least / FAR:
        lines.append(f"far beyond what was compared: links of {rate / 1e6:g} Mbit/s, down to {least / 1e6:g} were")
    return lines


def compare(parse: Callable[[list[str]], argparse.Namespace]) -> dict[str, Any]:
    """Measure and predict all groups; print and rewrite the table, and return its figures.

    `parse` reads flags of benchmark.predict.
    """
    begin = environment()
    rows, about = list[Row](), ""
    for group in GROUPS:
        rate = group[-1]
        rows += compare_group(parse(["--rate", rate] if rate else []), *group)
        about = f"python -m benchmark.predict --compare; {machine_line(begin)}"
        write_csv(FILE, [list(rows[0]), *(list(row.values()) for row in rows)], about)
    print(rows_table(rows), errors("ddp")[1], sep="\n")
    return {"about": about, "cells": rows}


def compare_group(
    question: argparse.Namespace, strategies: tuple[str, ...], model: str, workers: int, batch: int, rate: str
) -> Iterator[Row]:
    """Measure what predictions start from, then the steps; yield a row for each strategy that this machine can run."""
    if rate and (reason := why_not()):
        print(f"left out, links of {rate}: {reason}", file=sys.stderr)
        return
    costs: dict[int, Costs] = {}
    cells = [Cell(strategy, model, workers, batch, LENGTH) for strategy in strategies]
    for cell in cells:
        if examples_at_a_time(cell) not in costs:
            costs[examples_at_a_time(cell)] = costs_of(cell, question)
    measured = measure_steps(strategies, model, workers, batch, rate)
    for cell in cells:
        if row := measured.get(cell.strategy):
            step, sent = predict_step(cell, costs[examples_at_a_time(cell)]), row["sent_bytes"]
            peak = peak_bytes(cell.strategy, model, workers, batch, LENGTH)
            yield {
                "strategy": cell.strategy, "model": model, "workers": workers, "batch": batch, "rate": rate,
                "predicted_ms": round(1e3 * step.total, 2), "measured_ms": round(row["step_ms"], 2),
                "error": round(1e3 * step.total / row["step_ms"] - 1, 3),
                "predicted_sent_mb": round(step.sent / MB, 3), "sent_mb": round(sent / MB, 3),
                "predicted_peak_mb": round(peak / MB, 1), "peak_mb": round(row["peak_bytes"] / MB, 1),
            }  # fmt: skip


def measure_steps(strategies: tuple[str, ...], model: str, workers: int, batch: int, rate: str) -> dict[str, Row]:
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
