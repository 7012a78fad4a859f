"""The sections on BERT: task 1; tasks 2a, 2b and 3, compared with it and with each other."""

import statistics
from collections.abc import Sequence
from pathlib import Path

from common.arguments import SAMPLE_GLUE
from common.paths import ROOT, shown
from handin.figures import ReportFigures
from handin.findings import Findings, check_comparable, check_time, cores, iteration_time, ratio, table, text
from handin.records import ITERATIONS, Run, Runs, differences

LABELS = {"task1": "1 one worker", "task2a": "2a gather + scatter", "task2b": "2b all_reduce", "task3": "3 DDP"}
SCRIPTS = {"task2a": "task2a_gather_scatter", "task2b": "task2b_allreduce", "task3": "task3_ddp"}
EPOCHS = 3  # after each of which the course asks for the metric
LOSSES = 5  # that the course asks for


def task1(runs: Runs, findings: Findings, figures: ReportFigures) -> str:
    """Losses, metric and time of the run with most epochs."""
    longest = min(runs.of("task1"), key=lambda run: -min(run.epochs, EPOCHS), default=None)
    command = f"python task1_single/run_glue.py{flags_like(longest)}"
    if longest is None:
        findings.miss(f"task 1 over {EPOCHS} epochs", command)
        return "No run.\n\n"
    if longest.epochs < EPOCHS:  # in a folder of its own, so that the 40 iterations remain
        what = f"task 1 over {EPOCHS} epochs ({longest.name} has only {longest.epochs})"
        findings.miss(what, f"{command} --output_dir runs/task1_epochs")
    evaluations = longest.records[0]["evaluations"]
    metrics = [evaluation["metrics"] for evaluation in evaluations]
    if len(metrics) > 1 and all(of == metrics[0] for of in metrics):
        findings.doubt(f"{longest.name}: the metric never changes: is the model that is trained also evaluated?")
    rows = [[of["epoch"], *(f"{value:.4f}" for value in of["metrics"].values())] for of in evaluations]
    data = longest.setting["task"].upper() if longest.config["data_dir"] else "the embedded sample"
    return "".join([
        losses_table({LABELS["task1"]: longest}),
        f"Mean time of iterations 2 to {ITERATIONS}: {text(iteration_time(longest), 4)} s.\n\n",
        f"On the dev set of {data}, after every epoch (`{longest.name}`):\n\n",
        table(" | ".join(["epoch", *(metrics[0] if metrics else [])]), rows),
        figures.losses("loss_task1.png", "Training loss of task 1", {LABELS["task1"]: longest}),
    ])  # fmt: skip


def losses_table(runs: dict[str, Run]) -> str:
    """Return the first losses of each run, as the mean over its workers."""
    rows = [
        [label, *(f"{loss:.6f}" for loss in run.losses[:LOSSES]), *["–"] * (LOSSES - len(run.losses)), f"`{run.name}`"]
        for label, run in runs.items()
    ]
    return table(f"losses | {' | '.join(f'iteration {i + 1}' for i in range(LOSSES))} | run", rows)


def ladder(runs: Runs, findings: Findings, figures: ReportFigures) -> str:
    """Tasks 2a, 2b and 3: losses, times and speed-ups, communication, timelines."""
    timed = [found[0] for kind in SCRIPTS if (found := runs.of(kind))]
    like = next(iter([*timed, *runs.of("task1")]), None)
    there = {kind: script for kind, script in SCRIPTS.items() if (ROOT / script).is_dir()}  # of the course's tasks
    for kind, script in there.items():
        if not any(run.kind == kind and iteration_time(run) for run in timed):
            command = f"{script}/run_glue.py --max_steps {ITERATIONS}{flags_like(like)}"
            findings.miss(f"40 iterations of {LABELS[kind]}", f"python -m cluster.launch --workers 4 -- {command}")
    # Where task 1 ran several times, that run is compared which differs least from the others.
    ones = sorted(runs.of("task1"), key=lambda one: [len(differences(one.setting, run.setting)) for run in timed])[:1]
    compared = {LABELS[run.kind]: run for run in [*ones, *timed]}
    for run in compared.values():
        check_time(run, findings)
    _check_losses(list(compared.values()), findings)
    return "".join([
        "### Losses\n\n",
        losses_table(compared),
        figures.losses("losses.png", "Training loss, where all runs have one", compared),
        "### Time of an iteration\n\n",
        _times(ones, runs, findings),
        figures.times("times.png", "Mean time of an iteration; error bars: two standard errors", compared),
        "### Communication\n\n",
        _communication(timed),
        "### Who computes, who sends, who waits\n\n",
        *(timeline_of(LABELS[kind], runs.with_timeline(kind), "make demo", findings, figures) for kind in there),
    ])  # fmt: skip


def _check_losses(runs: Sequence[Run], findings: Findings) -> None:
    """Doubt losses that differ from those of the first run, although nothing else differs."""
    for run in runs[1:]:
        what, but = f"losses of {runs[0].name} and {run.name}", ("machine", "device", "torch", "workers")
        if not check_comparable(findings, what, runs[0].setting, run.setting, but):
            continue
        if run.setting["dropout"] != 0:
            findings.doubt("losses are only similar, because dropout was on: add --dropout 0 to all runs")
        elif any(abs(a - b) > 1e-3 for a, b in zip(runs[0].losses[:LOSSES], run.losses[:LOSSES], strict=False)):
            wrong = "one of the two averages gradients or divides the examples incorrectly, or lacks a rank"
            findings.doubt(f"{what} differ with the same seed and batch: {wrong}")


def _times(ones: list[Run], runs: Runs, findings: Findings) -> str:
    """Return a row for task 1, and for the best run of each other task and number of workers."""
    best = [*ones]
    for kind in SCRIPTS:
        by_workers = {run.workers: run for run in reversed(runs.of(kind)) if run.workers > 1}
        best += [run for _, run in sorted(by_workers.items())]
    rows = []
    for run in best:
        time, cells = iteration_time(run), ["–", ""]
        for one in ones:
            alone, what = iteration_time(one), f"the speed-up of {run.name} over {one.name}"
            bounds = {"the number of workers": run.workers, "the cores": cores(run)}
            of, bound = min(bounds.items(), key=lambda pair: pair[1])
            if run is not one and time and alone and check_comparable(findings, what, one.setting, run.setting):
                cells = ratio(findings, what, alone, time, bound, of)
        threads = run.records[0]["host"]["threads"]
        rows.append([LABELS[run.kind], run.workers, threads, text(time, 4), *cells, f"`{run.name}`"])
    return table("task | workers | threads each | s per iteration | speed-up | note | run", rows)


def _communication(timed: list[Run]) -> str:
    rows = []
    for run in timed:
        for record in run.records[:2]:  # the root, and one of the others
            cells, count = ["–", "–"], max(1, len(record["iterations"]))
            steps = record["iterations"][1:ITERATIONS]
            measured = [step["phases"]["communication"] for step in steps]
            if measured and None not in measured:  # DDP communicates inside backward
                share = sum(measured) / sum(step["seconds"] for step in steps)
                cells = [f"{statistics.fmean(measured):.4f}", f"{share:.0%}"]
            calls = ", ".join(f"{of['count'] / count:.3g} {of['name']}" for of in record["collectives"])
            sent = sum(of["bytes"] for of in record["collectives"]) / count / 1e6
            rows.append([LABELS[run.kind], record["rank"], *cells, calls, f"{sent:.2f}", f"`{run.name}`"])
    return table("task | rank | seconds | of an iteration | calls | MB | run", rows)


def timeline_of(label: str, found: list[Run], command: str, findings: Findings, figures: ReportFigures) -> str:
    """Return the timeline of the first of these runs; without one, name the command that makes it."""
    if not found:
        findings.miss(f"the timeline of {label}", command)
        return ""
    return figures.timeline(f"One step of {label} ({found[0].name})", found[0], findings)


def flags_like(run: Run | None) -> str:
    """Return the flags that make a new run comparable with this one; without one, those that the course asks for."""
    if run is None:
        return " --dropout 0"
    config, flags = run.config, {}
    if not run.setting["model"].startswith("tiny"):
        flags["model_name_or_path"] = shown(Path(config["model_name_or_path"]))
    if config["data_dir"]:
        names = ("task_name", "max_seq_length", "learning_rate")
        flags |= {"data_dir": shown(Path(config["data_dir"]))} | {name: config[name] for name in names}
    epochs = EPOCHS if config["data_dir"] else SAMPLE_GLUE["epochs"]
    defaults = {"num_train_epochs": epochs, "seed": 42, "dropout": None}
    flags |= {name: config[name] for name, default in defaults.items() if config[name] != default}
    return "".join(f" --{name} {value}" for name, value in flags.items())
