"""The pipeline for several numbers of micro-batches: measured speed-up, and the largest that the schedule allows."""

import math
from collections.abc import Sequence

from handin.measures import iteration_time, not_comparable, speedup
from handin.runs import Run
from handin.sections import Findings, table

CHUNKS = (1, 2, 4, 8, 16)  # what the course asks for
PARTITIONS = 2  # of pipeline/run_gpt2.py on a CPU
SCRIPT = "python pipeline/run_gpt2.py --n_epochs 2 --model_parallel_mode"


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
    if base and alone:
        if reasons := not_comparable(base, run):
            findings.doubt([f"no speed-up of {run.name} over {base.name}: {'; '.join(reasons)}"])
        else:
            value, doubt = speedup(alone, time, PARTITIONS if on_cpu else math.inf)
            ratio = f"{value:.2f}"
            if doubt:
                findings.doubt([f"speed-up {value:.2f} of {run.name} over {base.name} is {doubt}"])
    return [str(chunks), str(time), ratio, ideal, f"`{run.name}`"]
