"""Tables about communication: how much of an iteration a rank spends in it (2a, 2b), and what is not hidden (bonus)."""

import statistics
from collections.abc import Sequence
from typing import Any

from handin.measures import ITERATIONS, iteration_time
from handin.runs import Run
from handin.schema import is_number, is_time
from handin.sections import NAMES, table

RANKS = 2  # shown of each run: the root, and one of the others


def shares(runs: Sequence[Run]) -> str:
    """Seconds of an iteration in the phase `communication`, on rank 0 and on rank 1; "–" where it is not measured."""
    rows = []
    for run in runs:
        for record in run.records[:RANKS]:
            steps = record["iterations"][1:ITERATIONS]
            phases: list[Any] = [(step.get("phases") or {}).get("communication") for step in steps]
            measured = [float(seconds) for seconds in phases if is_number(seconds)]
            whole = sum(step["seconds"] for step in steps)
            cells = ["–", "–"]
            if measured and len(measured) == len(steps):
                cells = [f"{statistics.fmean(measured):.4f}", f"{100 * sum(measured) / whole:.0f} %"]
            rows.append([NAMES[run.slot], record["rank"], *cells, f"`{run.name}`"])
    return table(["task", "rank", "communication (s)", "of an iteration", "run"], rows) if rows else "No run.\n"


def exposed(runs: Sequence[Run]) -> str:
    """Runs of the bonus lessons, with that of task 3 on the same nodes: what the backward pass did not hide."""
    rows = []
    for run in sorted(runs, key=lambda run: (run.slot, run.name)):
        config, said = run.first["config"], run.first.get("communication") or {}
        strategy = str(config.get("strategy", "DDP (task 3)")) if run.slot == "beyond" else "DDP (task 3)"
        buckets = f"{config.get('bucket_mb')}" if strategy == "overlap" else "–"
        figures = [_cell(said.get("exposed_seconds"), 4), _cell(said.get("messages"), 1)]
        sent: Any = said.get("bytes")
        figures.append(_cell(sent / 1e6 if is_number(sent) else None, 3))
        rows.append([strategy, buckets, run.workers, *figures, str(iteration_time(run) or "–"), f"`{run.name}`"])
    head = ["strategy", "bucket (MB)", "workers", "exposed (s)", "messages", "MB handed in", "s per iteration", "run"]
    return table(head, rows) if any(run.slot == "beyond" for run in runs) else "Not measured: the bonus is optional.\n"


def _cell(value: object, digits: int) -> str:
    return f"{value:.{digits}f}" if is_time(value) or value == 0 else "–"
