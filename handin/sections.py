"""The parts of the report that are made from records: tables in Markdown, each naming the runs it comes from."""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.errors import InputError
from common.workers.rows import STOPPED_FILE
from course.table import Course
from course.todo import find_blocks
from handin.gpt2_runs import Gpt2
from handin.measures import (
    ITERATIONS,
    Time,
    compare_losses,
    iteration_time,
    not_comparable,
    speedup,
    with_deviation,
)
from handin.runs import Run, Shape, folders_of_runs, misfit, read_json

NAMES = {"task1": "1 one worker", "task2a": "2a gather + scatter", "task2b": "2b all_reduce", "task3": "3 DDP"}
_DATA_PARALLEL = "python task2b_allreduce/run_gpt2.py --n_epochs 4"


@dataclass
class Findings:
    """What comes up while the report is written.

    missing: missing things, each with the command that makes it.
    doubts: suspicious results.
    used: name of a run -> what the report takes from it.
    """

    missing: list[tuple[str, str]] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)
    used: dict[str, list[str]] = field(default_factory=dict)

    def doubt(self, texts: Iterable[str]) -> None:
        self.doubts += [text for text in texts if text not in self.doubts]

    def use(self, run: Run, what: str) -> None:
        uses = self.used.setdefault(run.name, [])
        if what not in uses:
            uses.append(what)


def table(head: str, rows: Sequence[Sequence[object]]) -> str:
    """Return a table in Markdown. head: the columns' names, separated as they will be: "task | workers"."""
    lines = [" | ".join(str(cell).replace("|", "\\|") for cell in row) for row in rows]
    if not lines:
        return "No run.\n"
    return "\n".join([f"| {head} |", "|" + "---|" * len(head.split(" | ")), *(f"| {line} |" for line in lines)]) + "\n"


def first_losses(runs: Sequence[Run], findings: Findings) -> str:
    """The first five losses of each run. With several workers: the mean over their shares."""
    if not runs:
        return "No run.\n"
    if len(runs) > 1:
        findings.doubt(compare_losses(runs))
    rows = []
    for run in runs:
        findings.use(run, "losses")
        losses = [f"{loss:.6f}" for loss in run.mean_losses[:5]]
        name = NAMES[run.slot] if run.is_complete else f"{NAMES[run.slot]} ({len(run.records)} of {run.workers} ranks)"
        rows.append([name, *losses, *["–"] * (5 - len(losses)), f"`{run.name}`"])
    return table(f"task | {' | '.join(f'iteration {i}' for i in range(1, 6))} | run", rows)


def metrics(run: Run | None, findings: Findings) -> str:
    """The metrics of the dev set after every epoch."""
    evaluations = run.first["evaluations"] if run else []
    if not run or not evaluations:
        return "No run with an evaluation.\n"
    findings.use(run, "metric")
    names = list(evaluations[0]["metrics"])
    rows = []
    for entry in evaluations:
        epoch = entry["epoch"]
        broken = epoch > run.whole_epochs
        values = [_number(entry["metrics"].get(name)) for name in names]
        rows.append([f"{epoch} (interrupted)" if broken else epoch, *values])
    data = run.setting["task"].upper() if run.first["config"]["data_dir"] else "the embedded sample"
    return f"On the dev set of {data}, from `{run.name}`:\n\n" + table(" | ".join(["epoch", *names]), rows)


def _number(value: object) -> str:
    return f"{value:.4f}" if isinstance(value, int | float) else "–"


def counted(runs: Sequence[Run]) -> str:
    """Return which iterations the mean times are of, such as "2 to 40" or "2 to 40 in 2b and 3, 2 to 10 in 2a"."""
    tasks: dict[int, list[str]] = {}  # the last iteration that is counted -> the runs' tasks
    for run in runs:
        tasks.setdefault(min(len(run.first["iterations"]), ITERATIONS), []).append(NAMES[run.slot].split()[0])
    tasks.pop(1, None)  # only the first, which is a warm-up
    parts = [f"2 to {last} in {' and '.join(names)}" for last, names in sorted(tasks.items(), reverse=True)]
    return parts[0].partition(" in ")[0] if len(parts) == 1 else ", ".join(parts)


def times(runs: Sequence[Run], findings: Findings) -> str:
    """Mean time per iteration of 2a, 2b and 3, as multiples of 3 where they can be compared, and what was sent."""
    timed = [(run, iteration_time(run)) for run in runs]
    base, of_base = next(((run, time) for run, time in timed if run.slot == "task3"), (None, None))
    rows = []
    for run, time in timed:
        findings.use(run, "times")
        ratio = "–"
        if base and time and of_base and not not_comparable(base, run) and run.workers == base.workers:
            ratio = f"{time.mean / of_base.mean:.2f}"
        calls, sent = _sent(run)
        seconds = str(time) if time else "–"
        rows.append([NAMES[run.slot], run.workers, time.count if time else 0, seconds, ratio, calls, sent, _name(run)])
    for (run, time), (other, its) in itertools.combinations(timed, 2):
        what = f"times of {run.name} and {other.name}"
        reasons = not_comparable(run, other)
        if run.workers != other.workers:
            reasons.append(f"{run.workers} workers vs. {other.workers}")
        if reasons:
            findings.doubt([f"{what} are not comparable: {'; '.join(reasons)}"])
        elif time and its and (doubt := speedup(time, its)[1]):
            findings.doubt([f"{what}: {doubt}; do not call one of them faster"])
    head = "task | workers | iterations | s per iteration | time / DDP | calls | MB passed to calls | run"
    return table(head, rows)


def _name(run: Run) -> str:
    return f"`{run.name}`"


def _sent(run: Run) -> tuple[str, str]:
    """Calls of collectives, and megabytes that rank 0 passed to them, in one iteration."""
    steps = max(1, len(run.first["iterations"]))
    entries = run.first["collectives"]
    calls = ", ".join(f"{entry['count'] / steps:.3g} {entry['name']}" for entry in entries)
    return calls or "none", f"{sum(entry['bytes'] for entry in entries) / steps / 1e6:.2f}"


def scalability(one: Run | None, runs: Sequence[Run], findings: Findings) -> str:
    """Every run on several workers against one worker at the same total batch."""
    explained = (
        "Speed-up: time of one worker divided by the time of several, at the same total batch. Times that differ by "
        "less than two standard errors of their difference are within the noise.\n\n"
    )
    alone = iteration_time(one) if one else None
    if not one or not alone:
        return f"{explained}No run of task 1 to compare with.\n"
    rows = [[NAMES["task1"], 1, str(alone), "1", "", _threads(one), _name(one)]]
    findings.use(one, "speed-up")
    for run in sorted(runs, key=lambda run: (list(NAMES).index(run.slot), run.workers, run.name)):
        time = iteration_time(run)
        if not time:
            continue
        findings.use(run, "speed-up")
        ratio, note = speedup_cells(one, alone, run, time, findings, run.workers)
        rows.append([NAMES[run.slot], run.workers, str(time), ratio, note, _threads(run), _name(run)])
    return explained + table("task | workers | s per iteration | speed-up | note | threads each | run", rows)


def _threads(run: Run) -> object:
    """Return how many threads torch used on each worker: one worker may use all cores."""
    return run.first["host"].get("threads", "–")


def speedup_cells(
    one: Run, alone: Time, run: Run, time: Time, findings: Findings, limit: float, of: str = "workers"
) -> tuple[str, str]:
    """Return the cells for the speed-up of a run over `one`, and a note. limit: the largest possible, a number `of`."""
    if reasons := not_comparable(one, run):
        findings.doubt([f"the speed-up of {run.name} over {one.name} is not computed: {'; '.join(reasons)}"])
        return "–", "not comparable"
    ratio, doubt = speedup(alone, time, limit, of)
    if doubt:
        findings.doubt([f"speed-up {ratio:.2f} of {run.name} over {one.name}: {doubt}"])
    return f"{ratio:.2f}", doubt.partition(":")[0]


def gpt2_tables(gpt2: Gpt2, findings: Findings) -> str:
    """Data parallel over numbers of workers, and the modes of the pipeline."""
    findings.doubt(gpt2.doubts)
    findings.missing += [
        (
            f"GPT-2 on {workers} worker{'s' if workers > 1 else ''}",
            f"{'OMP_NUM_THREADS=1 ' * gpt2.on_cpu}{_DATA_PARALLEL} --world_size {workers} --batch_size {batch}",
        )
        for workers, batch in ((1, 64), (2, 128))
        if (workers == 1 and (1, 1) not in gpt2.scaling)
        or (workers > 1 and not any(threads == 1 and several > 1 for several, threads in gpt2.scaling))
    ]
    if not any(workers == 1 and threads > 1 for workers, threads in gpt2.scaling) and gpt2.on_cpu:
        findings.missing.append(
            ("GPT-2 on 1 worker with all cores", f"{_DATA_PARALLEL} --world_size 1 --batch_size 64")
        )
    findings.missing += [
        (f"GPT-2 in mode {mode}", f"python pipeline/run_gpt2.py --model_parallel_mode {mode} --n_epochs 4")
        for mode in ("none", "model_parallel", "pipeline_parallel")
        if mode not in gpt2.modes
    ]
    parts = []
    if gpt2.scaling:
        rows = []
        for (workers, threads), row in gpt2.scaling.items():
            rows.append([workers, threads, row["batch_size"], *_gpt2_cells(row, gpt2.speedups.get((workers, threads)))])
        head = "workers | threads each | batch | s per epoch | tokens per s | speed-up over 1 worker, 1 thread"
        parts.append(f"From `submit_figures/data_parallel_*.json`:\n\n{table(head, rows)}")
    if gpt2.modes:
        rows = []
        for mode, row in gpt2.modes.items():
            rows.append([mode, row.get("n_chunk", "–"), *_gpt2_cells(row, gpt2.speedups.get(mode))])
        head = "mode | micro-batches | s per epoch | tokens per s | speed-up over model_parallel"
        parts.append(f"From `submit_figures/pipeline_metrics.json`:\n\n{table(head, rows)}")
    return "\n".join(parts) or "No run.\n"


def _gpt2_cells(row: dict, speedup: float | None) -> list[str]:
    """The last cells of a row, with deviations if there was more than one epoch; its file has 0 for a single one."""
    cells = (("training_time", 3), ("tokens_per_second", 0))
    times = [with_deviation(row[name], row[f"{name}_std"] or None, digits) for name, digits in cells]
    return [*times, f"{speedup:.2f}" if speedup else "–"]


def where_from(runs: Sequence[Run], findings: Findings) -> str:
    """Return a table of the runs, what the report takes from each, and their settings."""
    rows = []
    for run in sorted(runs, key=lambda run: (run.name not in findings.used, run.name)):
        setting, uses = run.setting, ", ".join(findings.used.get(run.name, ["–"]))
        rows.append([
            _name(run), uses, f"{len(run.records)}/{run.workers}", setting["model"],
            setting["data"], setting["total batch"], setting["seed"], len(run.first["iterations"]),
            f"{setting['machine']}, {setting['device']}", setting["torch"],
        ])  # fmt: skip
    return table("run | used for | ranks | model | data | batch | seed | iterations | machine | torch", rows)


def own_lines(tree: Path, course: Course, task: str, findings: Findings) -> str:
    """The student's lines for each region of a task, from the file in which the region first appears."""
    parts, unsolved = [], []
    for row in (row for row in course.regions.values() if row.task == task):
        if not (tree / row.file).is_file():
            unsolved.append(row.id)
            continue
        try:
            blocks = find_blocks((tree / row.file).read_text(encoding="utf-8"), row.file)
        except (OSError, UnicodeDecodeError, InputError) as error:
            findings.doubt([f"your lines in {row.file} cannot be separated from the given code: {error}"])
            continue
        bodies = [block for block in blocks if block.id == row.id]
        if not bodies or not all(block.attempted for block in bodies):
            unsolved.append(row.id)
            continue
        code = "\n\n".join(block.body.strip("\n") for block in bodies)
        fence = "```" if "```" not in code else "````"
        title = row.title.replace("_", "\\_")  # Markdown would take __init__ for bold
        parts.append(f"#### {row.id} {title} (`{row.file}`)\n\n{fence}python\n{code}\n{fence}\n")
    if unsolved and course.tasks[task].bonus:
        return "\n".join(parts)  # nobody has to solve them
    if unsolved:
        parts.append(f"Not solved: {', '.join(unsolved)}.\n")
        findings.missing.append((f"regions {', '.join(unsolved)} are not solved", f"pytest --hint {unsolved[0]}"))
    return "\n".join(parts)


CELLS = ("rank", "state", "where", "calls")
STOPPED: dict[str, Shape] = {"conclusion": str, "rows": [dict.fromkeys(CELLS, str)]}


def stopped_runs(root: Path, folder: Path) -> dict[str, dict[str, Any]]:
    """Return, for each folder whose newest run was stopped, what the ranks left behind (see STOPPED)."""
    contents = {name: read_json(path / STOPPED_FILE) for path, name in folders_of_runs(root, folder)}
    return {name: content for name, content in contents.items() if not misfit(content, STOPPED)}


def stopped_tables(stopped: dict[str, dict[str, Any]]) -> str:
    """Return tables of where each rank was when a run was stopped; "" if none was."""
    return "".join(
        f"\n{name} was stopped: {content['conclusion']}.\n\n"
        + table("rank | state | where | collectives", [[row[cell] for cell in CELLS] for row in content["rows"]])
        for name, content in stopped.items()
    )
