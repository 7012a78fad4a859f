"""Tables for single tasks: communication of 2a and 2b, micro-batches of the pipeline, what the bonus does not hide."""

import math
import statistics
from collections.abc import Sequence
from typing import Any

from handin.measures import ITERATIONS, iteration_time
from handin.runs import Run
from handin.schema import is_number, is_time
from handin.sections import NAMES, Findings, speedup_cells, table

CHUNKS = (1, 2, 4, 8, 16)  # what the course asks for
PARTITIONS = 2  # of pipeline/run_gpt2.py on a CPU
SCRIPT = "python pipeline/run_gpt2.py --n_epochs 2 --model_parallel_mode"
RANKS = 2  # shown of each run: the root, and one of the others


def shares(runs: Sequence[Run], findings: Findings) -> str:
    """Seconds of an iteration in the phase `communication`, on rank 0 and on rank 1; "–" where it is not measured."""
    rows = []
    for run in runs:
        findings.use(run, "communication")
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


def exposed(runs: Sequence[Run], findings: Findings) -> str:
    """Runs of the bonus lessons, with that of task 3 on the same nodes: times, bytes moved, kept and needed."""
    rows = []
    if not any(run.slot == "beyond" for run in runs):
        return "Not measured: the bonus is optional.\n"
    for run in sorted(runs, key=lambda run: (run.slot, run.name)):
        findings.use(run, "bonus")
        config, said = run.first["config"], run.first.get("communication") or {}
        strategy = str(config.get("strategy", "DDP (task 3)")) if run.slot == "beyond" else "DDP (task 3)"
        buckets = f"{config.get('bucket_mb')}" if strategy == "overlap" else "–"
        figures = [_cell(said.get("exposed_seconds"), 4), _cell(said.get("messages"), 1)]
        sent: Any = said.get("bytes")
        memory: dict = run.first.get("memory") or {}
        sizes: list[Any] = [sent, memory.get("persistent_bytes"), memory.get("peak_bytes")]
        figures += [_cell(size / 1e6 if is_number(size) else None, 3) for size in sizes]
        begin = [strategy, buckets, run.workers, run.setting["total batch"]]
        rows.append([*begin, *figures, str(iteration_time(run) or "–"), f"`{run.name}`"])
    head = [
        "strategy",
        "bucket (MB)",
        "workers",
        "batch",
        "exposed (s)",
        "messages",
        "MB passed to calls",
        "MB kept",
        "MB at the peak",
        "s per iteration",
        "run",
    ]
    return table(head, rows)


def _cell(value: object, digits: int) -> str:
    return f"{value:.{digits}f}" if is_time(value) or value == 0 else "–"


def micro_batches(runs: Sequence[Run], findings: Findings) -> str:
    """A row for each number of micro-batches, against the run without a pipeline."""
    mine = {}
    for run in (run for run in runs if run.slot == "pipeline"):
        config = run.first["config"]
        mode, chunks = config.get("model_parallel_mode"), config.get("n_chunk")
        if config.get("schedule", "threads") == "threads" and mode in ("model_parallel", "pipeline_parallel"):
            mine[0 if mode == "model_parallel" else chunks] = run
    base = mine.pop(0, None)
    if base is None:
        findings.missing.append(
            ("a record of GPT-2 without a pipeline", f"{SCRIPT} model_parallel --output_dir runs/pipeline_off")
        )
    if absent := [chunks for chunks in CHUNKS if chunks not in mine]:
        numbers = " ".join(map(str, absent))
        command = f"{SCRIPT} pipeline_parallel --n_chunk $m --output_dir runs/pipeline_m$m"
        findings.missing.append(
            (f"the pipeline with --n_chunk {', '.join(map(str, absent))}", f"for m in {numbers}; do {command}; done")
        )
    rows = [row for chunks, run in sorted(mine.items()) if (row := _row(chunks, run, base, findings))]
    head = ["micro-batches M", "s per iteration", "speed-up", "M K/(M+K-1)", "run"]
    return table(head, rows) if rows else "No run.\n"


def _row(chunks: int, run: Run, base: Run | None, findings: Findings) -> list[str] | None:
    time, alone = iteration_time(run), iteration_time(base) if base else None
    if not time:
        return None
    on_cpu = run.setting["device"] == "cpu"
    ideal = f"{chunks * PARTITIONS / (chunks + PARTITIONS - 1):.2f} (K = {PARTITIONS})" if on_cpu else "–"
    ratio = "–"
    findings.use(run, "micro-batches")
    if base and alone:
        findings.use(base, "micro-batches")
        limit = PARTITIONS if on_cpu else math.inf
        ratio, _ = speedup_cells(base, alone, run, time, findings, limit, "partitions")
    return [str(chunks), str(time), ratio, ideal, f"`{run.name}`"]
