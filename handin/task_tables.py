"""Tables for single tasks: communication of 2a and 2b, micro-batches of the pipeline, the bonus, and timelines."""

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.errors import InputError
from common.timeline.parts import NAMES as PARTS
from common.timeline.parts import Parts, mean, milliseconds
from common.timeline.trace import read_trace
from handin.measures import ITERATIONS, iteration_time
from handin.report_pictures import Pictures
from handin.runs import Number, Run, Shape, is_time, misfit
from handin.sections import NAMES, Findings, counted, speedup_cells, table

CHUNKS = (1, 2, 4, 8, 16)  # what the course asks for
PARTITIONS = 2  # of pipeline/run_gpt2.py on a CPU
SCRIPT = "python pipeline/run_gpt2.py --n_epochs 2 --model_parallel_mode"
RANKS = 2  # shown of each run: the root, and one of the others


def shares(runs: Sequence[Run], findings: Findings) -> str:
    """Seconds of an iteration of 2a and 2b in the phase `communication`, on ranks 0 and 1; "–": it is not measured."""
    runs = [run for run in runs if run.slot != "task3"]
    which = counted(runs)
    explained = f"Mean over iterations {which}, as each rank measured it.\n\n" if which else ""
    rows = []
    for run in runs:
        findings.use(run, "communication")
        for record in run.records[:RANKS]:
            steps = record["iterations"][1:ITERATIONS]
            phases: list[Any] = [(step.get("phases") or {}).get("communication") for step in steps]
            measured = [float(seconds) for seconds in phases if isinstance(seconds, Number)]
            whole = sum(step["seconds"] for step in steps)
            cells = ["–", "–"]
            if measured and len(measured) == len(steps):
                cells = [f"{statistics.fmean(measured):.4f}", f"{100 * sum(measured) / whole:.0f} %"]
            rows.append([NAMES[run.slot], record["rank"], *cells, f"`{run.name}`"])
    return explained + table("task | rank | communication (s) | of an iteration | run", rows)


def exposed(runs: Sequence[Run], findings: Findings) -> str:
    """Runs of the bonus lessons, with that of task 3 on the same nodes: times, bytes moved, kept and needed."""
    rows = []
    runs = [run for run in runs if run.slot in ("beyond", "task3_gpt2")]
    if not any(run.slot == "beyond" for run in runs):
        return "Not measured: the bonus is optional.\n"
    for run in sorted(runs, key=lambda run: (run.slot, run.name)):
        findings.use(run, "bonus")
        config, communication = run.first["config"], run.first.get("communication") or {}
        strategy = str(config.get("strategy", "DDP (task 3)")) if run.slot == "beyond" else "DDP (task 3)"
        buckets = f"{config.get('bucket_mb')}" if strategy == "overlap" else "–"
        figures = [_cell(communication.get("exposed_seconds"), 4), _cell(communication.get("messages"), 1)]
        sent: Any = communication.get("bytes")
        memory: dict = run.first.get("memory") or {}
        sizes: list[Any] = [sent, memory.get("persistent_bytes"), memory.get("peak_bytes")]
        figures += [_cell(size / 1e6 if isinstance(size, Number) else None, 3) for size in sizes]
        begin = [strategy, buckets, run.workers, run.setting["total batch"]]
        rows.append([*begin, *figures, str(iteration_time(run) or "–"), f"`{run.name}`"])
    head = "strategy | bucket (MB) | workers | batch | exposed (s) | messages | MB passed to calls | MB kept | "
    return table(head + "MB at the peak | s per iteration | run", rows)


def _cell(value: object, digits: int) -> str:
    return f"{value:.{digits}f}" if is_time(value) or value == 0 else "–"


def micro_batches(runs: Sequence[Run], findings: Findings) -> str:
    """A row for each number of micro-batches, against the run without a pipeline."""
    by_chunks = {}
    for run in (run for run in runs if run.slot == "pipeline"):
        config = run.first["config"]
        mode, chunks = config.get("model_parallel_mode"), config.get("n_chunk")
        if config.get("schedule", "threads") == "threads" and mode in ("model_parallel", "pipeline_parallel"):
            by_chunks[0 if mode == "model_parallel" else chunks] = run
    base = by_chunks.pop(0, None)
    if base is None:
        findings.missing.append(
            ("a record of GPT-2 without a pipeline", f"{SCRIPT} model_parallel --output_dir runs/pipeline_off")
        )
    if absent := [chunks for chunks in CHUNKS if chunks not in by_chunks]:
        numbers = " ".join(map(str, absent))
        command = f"{SCRIPT} pipeline_parallel --n_chunk $m --output_dir runs/pipeline_m$m"
        findings.missing.append(
            (f"the pipeline with --n_chunk {', '.join(map(str, absent))}", f"for m in {numbers}; do {command}; done")
        )
    rows = [row for chunks, run in sorted(by_chunks.items()) if (row := _row(chunks, run, base, findings))]
    return table("micro-batches M | s per iteration | speed-up | M K/(M+K-1) | run", rows)


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


# Slot -> its name in the table, and the command that makes its timeline.
SHOWN = {
    "task2a": ("2a", "make demo"),
    "task2b": ("2b", "make demo"),
    "task3": ("3", "make demo"),
    "pipeline": (
        "pipeline",
        "python -m cluster.launch --workers 2 --timeline -- pipeline/run_gpt2.py --schedule gpipe",
    ),
    "beyond": ("ZeRO-3", ""),  # a bonus: never missing
}
TIMELINE: dict[str, Shape] = {
    "run": str,
    "clock_error": Number,
    "steps": [{"rank": int, "step": int, **dict.fromkeys(("seconds", *PARTS, "hidden"), Number | None)}],
}


def timelines(tree: Path, runs: Sequence[Run], findings: Findings, pictures: Pictures) -> str:
    """A table of the parts of a step for every run with a usable timeline, and the pictures."""
    explained = (
        "Mean over the steps that --timeline has shown. The parts add up to a step. Exposed: communication that "
        "nothing hides. Waiting: for a rank that has not arrived. Hidden: communication beside the others. Where there "
        "is no run of yours with --timeline, the run of `make demo` is shown: on emulated nodes it trains a larger "
        "model, so its times are not those of the other tables.\n\n"
    )
    rows, plots = [], []
    for slot, (name, command) in SHOWN.items():
        candidates = [run for run in runs if run.slot == slot and run.first.get("timeline")]
        if slot == "beyond":
            candidates = [run for run in candidates if run.first["config"].get("strategy") == "zero3"]
        problems = {run.name: problem(tree / run.name, run) for run in candidates}
        findings.doubt(f"{run}: {reason}" for run, reason in problems.items() if reason)
        usable = next((run for run in candidates if not problems[run.name]), None)  # your own before the demo's
        if usable:
            findings.use(usable, "timeline")
            rows += [[name, *cells, usable.setting["model"], f"`{usable.name}`"] for cells in _cells(usable)]
            picture = tree / usable.name / "timeline.png"
            plots.append(pictures.copied(picture, f"{name}: who computes, sends and waits", f"timeline_{slot}.png"))
        elif command:
            findings.missing.append((f"the timeline of {name}", command))
    if not rows:
        return f"{explained}No run with --timeline.\n"
    pairs = ["".join(plots[i : i + 2]) for i in range(0, len(plots), 2)]  # one paragraph: side by side in the PDF
    head = f"task | rank | {' | '.join(f'{part} (ms)' for part in PARTS)} | hidden (ms) | model | run"
    return explained + "\n".join([table(head, rows), *pairs])


def problem(folder: Path, run: Run) -> str:
    """Return in one line why the timeline of a run cannot be used; "" if it can."""
    for record in run.records:
        name = f"rank{record['rank']}.json"
        if place := misfit(record.get("timeline"), TIMELINE, "timeline"):
            return f"{name} has no usable {place}: written by another version of the scripts; run it again"
        if record["timeline"]["run"] != run.first["timeline"]["run"]:
            return f"the timeline in {name} belongs to another run than that of rank 0; run it again"
    path = folder / "timeline.json"
    try:
        trace = read_trace(path)
    except InputError as error:
        return str(error).replace(str(path), path.name)
    if trace.run != run.first["timeline"]["run"]:
        return "timeline.json belongs to another run than the records; run it again with --timeline"
    return ""


def _cells(run: Run) -> list[list[object]]:
    """The mean of the steps for every rank."""
    rows = [Parts(**row) for record in run.records for row in record["timeline"]["steps"]]
    cells: list[list[object]] = []
    for rank in sorted({row.rank for row in rows}):
        means = mean([row for row in rows if row.rank == rank])
        cells.append([rank, *(milliseconds(means[name], 1) for name in (*PARTS, "hidden"))])
    return cells
