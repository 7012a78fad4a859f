"""The sections on GPT-2: data parallel over numbers of workers, the pipeline, and the bonus lessons."""

import json
import math
import os
from dataclasses import dataclass

from common.epochs import mean_and_deviation, measured_epochs
from common.workers.processor import disturbance
from handin.bert import timeline_of
from handin.figures import ReportFigures
from handin.findings import Findings, MeasuredRun, check_comparable, check_time, iteration_time, ratio, table, text
from handin.records import DAMAGED, Run, Runs

DATA_PARALLEL = "python task2b_allreduce/run_gpt2.py --n_epochs 4"
PIPELINE = "python pipeline/run_gpt2.py --n_epochs 4 --model_parallel_mode"
TIMELINE = "python -m cluster.launch --workers 2 --timeline -- pipeline/run_gpt2.py --schedule gpipe"
CHUNKS = (1, 2, 4, 8, 16)  # numbers of micro-batches that the course asks for
PARTITIONS = 2  # of pipeline/run_gpt2.py on a CPU
BOUNDED = ("pipeline_parallel", "gpipe", "1f1b")  # their bubble is K-1 of M+K-1 clock cycles
METRICS = ("training_time", "tokens_per_second")
Key = tuple[str, int]  # of a run of the pipeline: mode, micro-batches; for the uncut model threads


@dataclass(frozen=True)
class Scaling:
    """What task 2b keeps in submit_figures/ of one run: time of an epoch (s), tokens per second of all workers."""

    batch: int
    setting: dict[str, object]
    seconds: MeasuredRun
    speed: MeasuredRun


def scaling(runs: Runs, findings: Findings, figures: ReportFigures) -> str:
    """Tokens per second over numbers of workers, each over one worker with one thread."""
    found: dict[tuple[int, int], Scaling] = {}  # workers, threads of each
    for path in sorted(runs.figures.glob("data_parallel_*.json")):
        try:
            row = json.loads(path.read_text(encoding="utf-8"))
            setting = row["setting"] | {"batch of a worker": row["batch_size"] / row["workers"]}
            metrics = (MeasuredRun(row[name], row[f"{name}_std"] or None) for name in METRICS)  # 0: of one epoch alone
            found[row["workers"], row["threads"]] = Scaling(row["batch_size"], setting, *metrics)
            if warning := disturbance(row["other_programs"]):
                findings.doubt(f"submit_figures/{path.name}: {warning}; run it again")
        except DAMAGED as error:
            findings.doubt(f"submit_figures/{path.name} is damaged, or of another version ({error!r}); run it again")
    for workers, batch in ((1, 64), (2, 128)):
        if (workers, 1) not in found:
            command = f"OMP_NUM_THREADS=1 {DATA_PARALLEL} --world_size {workers} --batch_size {batch}"
            findings.miss(f"GPT-2 on {workers} worker{'s' * (workers > 1)} with one thread each", command)
    if os.cpu_count() != 1 and not any(workers == 1 < threads for workers, threads in found):
        findings.miss("GPT-2 on 1 worker with all cores", f"{DATA_PARALLEL} --world_size 1 --batch_size 64")
    base, rows = found.get((1, 1)), []
    for (workers, threads), of in sorted(found.items()):
        what, cells = f"the speed-up of GPT-2 on {workers} x {threads} threads", ["–", ""]
        if base and of is not base and check_comparable(findings, what, base.setting, of.setting):
            cells = ratio(findings, what, of.speed, base.speed, workers * threads, "the number of threads")
        rows.append([workers, threads, of.batch, text(of.seconds, 3), text(of.speed, 0), *cells])
    return (
        table("workers | threads each | batch | s per epoch | tokens per s | speed-up | note", rows)
        + figures.copied(runs.figures / "data_parallel_training_time.png", "Training time of an epoch")
        + figures.copied(runs.figures / "data_parallel_tokens_per_second.png", "Tokens per second, all workers")
    )


def pipeline(runs: Runs, findings: Findings, figures: ReportFigures) -> str:
    """Every mode and number of micro-batches against the model that is cut but not pipelined."""
    found: dict[Key, Run] = {}
    for run in reversed(runs.of("pipeline")):  # the best run of a key comes last
        schedule = run.config["schedule"]
        mode = run.config["model_parallel_mode"] if schedule == "threads" else schedule
        counts = {"none": run.records[0]["host"]["threads"], "model_parallel": 0}
        found[mode, counts.get(mode, run.config["n_chunk"])] = run
    _missing_modes(set(found), findings)
    base = found.get(("model_parallel", 0))
    rows = [_row(key, run, base, findings) for key, run in sorted(found.items())]
    trace = found.get(("pipeline_parallel", 4)) or base  # 4: the number of the figures
    with_timeline = [run for run in runs.with_timeline("pipeline") if run.config["schedule"] != "threads"]
    return "".join([
        table("mode | M | threads | s per epoch | tokens per s | speed-up | bound | note | run", rows),
        figures.copied(runs.figures / "pipeline_training_time.png", "Training time of an epoch"),
        figures.copied(runs.figures / "pipeline_tokens_per_second.png", "Tokens per second"),
        figures.copied(trace.folder / "trace.png", "One step of the pipeline", "pipeline_trace.png") if trace else "",
        timeline_of("the pipeline", with_timeline, TIMELINE, findings, figures),
    ])  # fmt: skip


def _missing_modes(found: set[Key], findings: Findings) -> None:
    one_thread = f"OMP_NUM_THREADS=1 {PIPELINE} none --output_dir runs/pipeline_none_one_thread"
    commands = {("none", 1): one_thread, ("model_parallel", 0): f"{PIPELINE} model_parallel"}
    for chunks in CHUNKS:
        folder = "" if chunks == 4 else f" --output_dir runs/pipeline_m{chunks}"  # 4: the run of the figures
        commands["pipeline_parallel", chunks] = f"{PIPELINE} pipeline_parallel --n_chunk {chunks}{folder}"
    for (mode, count), command in commands.items():
        if (mode, count) not in found:
            more = {"none": " with one thread", "model_parallel": ""}.get(mode, f" with {count} micro-batches")
            findings.miss(f"GPT-2 in mode {mode}{more}", command)
    if os.cpu_count() != 1 and not any(mode == "none" and threads > 1 for mode, threads in found):
        findings.miss("GPT-2 in mode none with all cores", f"{PIPELINE} none")


def _row(key: Key, run: Run, base: Run | None, findings: Findings) -> list[object]:
    """Return a row of the pipeline's table."""
    check_time(run, findings, least=2)
    (mode, count), (seconds, speed) = key, epochs_of(run)
    bound = bound_of(run)[0] if mode in BOUNDED else math.inf
    what, cells = f"the speed-up of {run.name} over model_parallel", ["–", ""]
    if base and run is not base and check_comparable(findings, what, base.setting, run.setting):
        cells = ratio(findings, what, speed, epochs_of(base)[1], bound, "the bound")
    chunks = count if mode not in ("none", "model_parallel") else "–"
    limit = f"{bound:.2f}" if bound < math.inf else "–"
    threads, name = run.records[0]["host"]["threads"], f"`{run.name}`"
    return [mode, chunks, threads, text(seconds, 2), text(speed, 0), cells[0], limit, cells[1], name]


def bound_of(run: Run) -> tuple[float, float]:
    """Return the largest speed-up of a pipeline's schedule, and which part of K stages' time this is."""
    is_threads = run.config["schedule"] == "threads" and run.setting["device"] == "cpu"
    count, stages = run.config["n_chunk"], PARTITIONS if is_threads else run.workers
    bound = count * stages / (count + stages - 1)
    return bound if stages > 1 else math.inf, bound / stages


def epochs_of(run: Run) -> tuple[MeasuredRun, MeasuredRun]:
    """Return time (s) and tokens per second of the epochs, as pipeline/mode_comparison.py draws them."""
    epochs = measured_epochs(run.records[0], run.setting["total batch"] * run.setting["tokens per example"])
    pairs = (mean_and_deviation(values) for values in zip(*epochs, strict=True))
    seconds, speed = (MeasuredRun(mean, deviation or None) for mean, deviation in pairs)
    return seconds, speed


def beyond(runs: Runs, findings: Findings, figures: ReportFigures) -> str:
    """Times, bytes moved, kept and needed by the bonus lessons, with DDP's time beside them."""
    if not runs.of("beyond"):
        return "Not measured.\n\n"
    times, sizes = [], []
    for run in [*runs.of("task3_gpt2"), *sorted(runs.of("beyond"), key=lambda run: run.name)]:
        strategy = run.config.get("strategy", "DDP (task 3)")
        if strategy == "overlap":
            strategy += f", buckets of {run.config['bucket_bytes'] / 2**20:.3g} MiB"
        begin, end = [strategy, run.workers, run.setting["total batch"]], f"`{run.name}`"
        measured = run.records[0].get("communication", {}) | run.records[0].get("memory", {})
        of = {
            name: f"{value / 1e6 if 'bytes' in name else value:.4g}"
            for name, value in measured.items()
            if value is not None
        }
        cells = [of.get(name, "–") for name in ("exposed_seconds", "messages")]
        times.append([*begin, text(iteration_time(run), 4), *cells, end])
        sizes.append([*begin, *(of.get(name, "–") for name in ("bytes", "persistent_bytes", "peak_bytes")), end])
    zero3 = [run for run in runs.with_timeline("beyond") if run.config["strategy"] == "zero3"]
    return (
        table("strategy | workers | batch | s per iteration | exposed (s) | messages | run", times)
        + table("strategy | workers | batch | passed | kept | at the peak | run", sizes)
        + (timeline_of("ZeRO-3", zero3, "", findings, figures) if zero3 else "")
    )
