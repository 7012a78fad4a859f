"""Records of runs as the task scripts write them, made up in an instant, and the report: for the tests of submit.py."""

import json
from collections.abc import Sequence
from pathlib import Path

from course.table import load_course
from handin.report_pictures import Pictures
from handin.sections import Findings
from handin.student import make_student
from handin.write_report import write_markdown

COURSE = load_course()
ADA = make_student("ab1234", "First Last")
PHASES = ("data", "forward", "backward", "communication", "optimizer")
COLLECTIVES = {
    "task1_single": [],
    "task2a_gather_scatter": ["gather", "scatter"],
    "task2b_allreduce": ["all_reduce"],
    "task3_ddp": ["all_reduce", "broadcast"],
}


def make_record(
    task: str, rank: int = 0, world_size: int = 1, *, seconds: float | Sequence[float] = 0.1, steps: int = 40,
    per_epoch: int = 13, losses: Sequence[float] = (), accuracies: Sequence[float] = (0.5, 0.6, 0.7), **config: object,
) -> dict:  # fmt: skip
    """One rank's record. Times alternate by 1 % around `seconds`, if it is one; the batch of all workers is 64."""
    losses = losses or [0.7 - 0.001 * i for i in range(steps)]
    if isinstance(seconds, float):
        seconds = [5 * seconds] + [seconds * (1.01 if i % 2 else 0.99) for i in range(1, steps)]
    return {
        "task": task,
        "rank": rank,
        "world_size": world_size,
        "config": {
            "task": task, "model_name_or_path": "/anywhere/tiny-bert-v2", "data_dir": None, "learning_rate": 0.001,
            "dropout": 0.0, "seed": 42, "max_steps": 40, "world_size": world_size, "rank": rank, "rank_on_node": rank,
            "task_name": "rte", "max_seq_length": 32, "per_gpu_train_batch_size": 64 // world_size,
            "num_train_epochs": 3, **config,
        },
        "versions": {"python": "3.11.7", "torch": "2.13.0+cpu", "transformers": "5.23.0"},
        "host": {"name": "laptop", "device": "cpu", "threads": 1},
        "parameters": 218754,
        "examples": {"train": 832, "dev": 320},
        "steps_per_epoch": per_epoch,
        "iterations": [
            {"loss": loss, "seconds": time, "phases": dict.fromkeys(PHASES)}
            for loss, time in zip(losses, seconds, strict=True)
        ],
        "evaluations": [
            {"epoch": epoch, "metrics": {"acc": value}} for epoch, value in enumerate(accuracies, 1) if rank == 0
        ],
        "collectives": [
            {"name": name, "count": 41 * steps, "bytes": 875016 * steps} for name in COLLECTIVES.get(task, [])
        ],
        "seconds_per_iteration": sum(seconds[1:]) / max(1, steps - 1),
    }  # fmt: skip


def write_run(folder: Path, task: str, world_size: int = 1, **options) -> Path:
    """The records of all ranks of a run, and their losses, in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(world_size):
        record = make_record(task, rank, world_size, **options)
        (folder / f"rank{rank}.json").write_text(json.dumps(record))
        (folder / f"loss_{rank}.txt").write_text("".join(f"{step['loss']}\n" for step in record["iterations"]))
    return folder


def write_ladder(runs: Path, **options) -> None:
    """Task 1 on one worker and 2a, 2b and 3 on four, each with a time of its own."""
    for (task, workers), seconds in zip(
        {"task1_single": 1, "task2a_gather_scatter": 4, "task2b_allreduce": 4, "task3_ddp": 4}.items(),
        (0.3, 0.2, 0.15, 0.1),
        strict=True,
    ):
        write_run(runs / task, task, workers, **{"seconds": seconds, **options})


def change(path: Path, **changes: object) -> None:
    """Change keys of a record; `config` and the like are merged."""
    record = json.loads(path.read_text())
    for key, value in changes.items():
        record[key] = {**record.get(key, {}), **value} if isinstance(value, dict) else value
    path.write_text(json.dumps(record))


def read_report(tree: Path, words: dict[str, str] | None = None) -> tuple[str, Findings]:
    """The report's text and findings, with nothing drawn, which takes a second."""
    findings = Findings()
    text = write_markdown(tree, COURSE, ADA, tree / "runs", words or {}, findings, Pictures(tree / "report/figures"))
    return text, findings


def section(text: str, head: str) -> str:
    return text.partition(f"\n## {head}\n")[2].partition("\n## ")[0]
