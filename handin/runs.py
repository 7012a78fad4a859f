"""Finds the records of runs and says what is wrong with each: nothing is guessed, a bad record is named and left out.

A run is a folder with rank{r}.json of every worker (task 1's README has the keys).
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import UnionType
from typing import Any

# What a report is made of: name -> (the record's task, which of the task's two scripts).
SLOTS = {
    "task1": ("task1_single", "glue"),
    "task2a": ("task2a_gather_scatter", "glue"),
    "task2b": ("task2b_allreduce", "glue"),
    "task2b_gpt2": ("task2b_allreduce", "gpt2"),
    "task3": ("task3_ddp", "glue"),
    "task3_gpt2": ("task3_ddp", "gpt2"),
    "task4": ("task4_traffic", "glue"),
    "pipeline": ("pipeline", "gpt2"),
    "beyond": ("beyond", "gpt2"),
}
COURSES = ("demo", "pictures")  # folders in runs/ of `make demo` and `make pictures`: not the student's runs
_OWN_OF_A_RANK = {"rank", "rank_on_node", "output_dir", "overwrite_output_dir", "master_ip", "master_port", "data_dir"}


@dataclass(frozen=True, eq=False)
class Run:
    """The readable records of one run, lowest rank first, and every reason for doubt, each without a full stop."""

    name: str  # its folder, relative to the repository
    slot: str  # a key of SLOTS; "" for any other task
    records: tuple[dict[str, Any], ...]
    problems: tuple[str, ...]

    @property
    def first(self) -> dict[str, Any]:
        """The record of the lowest rank that has one."""
        return self.records[0]

    @property
    def workers(self) -> int:
        return self.first["world_size"]

    @property
    def is_complete(self) -> bool:
        return len(self.records) == self.workers

    @property
    def whole_epochs(self) -> int:
        return len(self.first["iterations"]) // max(1, self.first["steps_per_epoch"])

    @cached_property
    def mean_losses(self) -> list[float]:
        """The loss of each iteration, as the mean over the workers' shares; nan where a worker has none."""
        columns = zip(*([step["loss"] for step in record["iterations"]] for record in self.records), strict=False)
        return [math.nan if None in losses else math.fsum(losses) / len(losses) for losses in columns]

    @cached_property
    def setting(self) -> dict[str, Any]:
        """Return what two runs must have in common to be compared, by the names that a reader knows."""
        config, host = self.first["config"], self.first["host"]
        text = is_gpt2(self.first)
        return {
            "model": Path(config["model_name_or_path"]).name,
            "parameters": self.first["parameters"],
            "data": Path(config["data_dir"] or "embedded sample").name,
            "task": "text" if text else config["task_name"],
            "examples": self.first["examples"]["train"],
            "seed": config["seed"],
            "total batch": config["batch_size"] if text else config["per_gpu_train_batch_size"] * self.workers,
            "tokens per example": config["model_max_length" if text else "max_seq_length"],
            "dropout": config["dropout"],
            "learning rate": config["learning_rate"],
            "steps of the schedule": _schedule_steps(self.first),
            "device": host["device"].split(":")[0],
            "machine": host["name"],
            "torch": self.first["versions"]["torch"],
            "transformers": self.first["versions"]["transformers"],
        }


def _schedule_steps(record: dict[str, Any]) -> int:
    """Return the step at which the learning rate reaches 0 (common/optim.py)."""
    config = record["config"]
    epochs = config["n_epochs" if is_gpt2(record) else "num_train_epochs"]
    return max(config["max_steps"], epochs * record["steps_per_epoch"])


def differences(run: Run, other: Run, but: Iterable[str] = ()) -> list[str]:
    """Return the settings in which two runs differ, such as "seed 42 vs. 7"."""
    left_out = set(but)
    return [
        f"{key} {value} vs. {other.setting[key]}"
        for key, value in run.setting.items()
        if key not in left_out and value != other.setting[key]
    ]


def folders_of_runs(root: Path, folder: Path) -> Iterator[tuple[Path, str]]:
    """Yield `folder` and the folders up to two levels below, each with the name that the report shows.

    Runs of `make demo` and `make pictures` are left out, unless `folder` is theirs.
    """
    below = [path for level in ("*", "*/*") for path in sorted(folder.glob(level)) if path.is_dir()]
    for path in [folder, *below]:
        if path.relative_to(folder).parts[:1] not in [(name,) for name in COURSES]:
            yield path, path.relative_to(root).as_posix() if path.is_relative_to(root) else str(path)


def find_runs(root: Path, folder: Path) -> tuple[list[Run], list[str]]:
    """Return every run in `folder` (see folders_of_runs), and what is there that cannot be used."""
    runs, unusable = [], []
    expected = {task for task, _ in SLOTS.values()} | {"task2b_allreduce_gpt2", "task3_ddp_gpt2"}
    for path, name in folders_of_runs(root, folder):
        files = sorted(path.glob("rank*.json"), key=lambda file: (len(file.name), file.name))
        if not files and path.name in expected and path.parent == folder:
            unusable.append(f"{name}: no record in it (the run was interrupted or is still running)")
        if files:
            run = read_run(path, name, files)
            unusable += [f"{name}: {problem}" for problem in run.problems if not run.records]
            runs += [run] if run.records else []
    return runs, unusable


def read_run(path: Path, name: str, files: Iterable[Path]) -> Run:
    """Read the records of one folder. Those that cannot be read, or are from a different run, are left out."""
    records: list[dict[str, Any]] = []
    problems: list[str] = []
    for file in files:
        record = _read_record(file)
        if isinstance(record, str):
            problems.append(record)
        elif records and (other := _of_another_run(record, records[0])):
            problems.append(
                f"{file.name} is from a different run than {path.name}'s first record ({other}); it is left out"
            )
        else:
            records.append(record)
    if not records:
        return Run(name, "", (), tuple(problems))
    problems += _check_together(records)
    kind = "gpt2" if is_gpt2(records[0]) else "glue"
    slot = next((slot for slot, of in SLOTS.items() if of == (records[0]["task"], kind)), "")
    return Run(name, slot, tuple(records), tuple(problems))


def read_json(file: Path) -> Any:
    """Return what is in a JSON file; None if it cannot be read."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


def _read_record(file: Path) -> dict[str, Any] | str:
    """One record, or why it cannot be used."""
    record = read_json(file)
    if record is None:
        return f"{file.name} is incomplete or damaged (not valid JSON); run it again"
    place = misfit(record, RECORD) or misfit(record["config"], GPT2 if is_gpt2(record) else GLUE, "config")
    if place:
        return f"{file.name} has no usable {place}: written by another version of the scripts; run it again"
    if file.name != f"rank{record['rank']}.json":
        return f"{file.name} says it is rank {record['rank']} of {record['world_size']}; it was renamed or edited"
    return record


def _of_another_run(record: dict[str, Any], first: dict[str, Any]) -> str:
    """The first thing in which a record contradicts that of another rank of the same run."""
    for key in ("task", "world_size", "parameters", "versions"):
        if record[key] != first[key]:
            return f"{key} {record[key]} vs. {first[key]}"
    for key in sorted((record["config"].keys() | first["config"].keys()) - _OWN_OF_A_RANK):
        value, first_value = record["config"].get(key), first["config"].get(key)
        if value != first_value:
            return f"{key} {value} vs. {first_value}"
    return ""


def _check_together(records: list[dict[str, Any]]) -> list[str]:
    problems = []
    first = records[0]
    missing = sorted(set(range(first["world_size"])) - {record["rank"] for record in records})
    if missing:
        names = ", ".join(f"rank{rank}.json" for rank in missing)
        be, it, its = ("are", "them", "their machines") if len(missing) > 1 else ("is", "it", "its machine")
        problems.append(
            f"{names} {be} missing (the run had {first['world_size']} workers): copy {it} from {its}, or run again"
        )
    for record in records:
        rank, steps = record["rank"], len(record["iterations"])
        if steps != len(first["iterations"]):
            problems.append(f"rank {rank} has {steps} iterations, rank {first['rank']} has {len(first['iterations'])}")
        bad = [i for i, step in enumerate(record["iterations"], 1) if step["loss"] is None or math.isnan(step["loss"])]
        if bad:
            problems.append(f"the loss of rank {rank} at iteration {bad[0]} is not a number")
    if not first["iterations"]:
        problems.append("it has no iterations: the run only evaluated, or was interrupted")
    return problems


# The shape that a record must have to be used: anything else was written by another version of the scripts.
Shape = dict | list | type | UnionType | Callable[[Any], bool]
Number = int | float


def is_metrics(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(number, Number) for number in value.values())


def is_time(value: Any) -> bool:
    return isinstance(value, Number) and math.isfinite(value) and value > 0


RECORD: dict[str, Shape] = {
    "task": str,
    "rank": int,
    "world_size": lambda value: isinstance(value, int) and value > 0,
    "config": {
        "model_name_or_path": str,
        "data_dir": str | None,
        "seed": int,
        "dropout": Number | None,
        "learning_rate": Number,
        "max_steps": int,
    },
    "versions": {"torch": str, "transformers": str},
    "host": {"name": str, "device": str},
    "parameters": int,
    "examples": {"train": int},
    "steps_per_epoch": int,
    "iterations": [{"loss": Number | None, "seconds": is_time}],
    "evaluations": [{"epoch": int, "metrics": is_metrics}],
    "collectives": [{"name": str, "count": int, "bytes": int}],
}
GLUE = {"per_gpu_train_batch_size": int, "max_seq_length": int, "task_name": str, "num_train_epochs": int}
GPT2 = {"batch_size": int, "n_epochs": int, "model_max_length": int}


def is_gpt2(record: dict[str, Any]) -> bool:
    """Return whether the record is of a run_gpt2.py; the other script of a task is run_glue.py."""
    return "n_epochs" in record["config"]


def misfit(value: object, shape: Shape, where: str = "") -> str:
    """Return the first place where a value does not fit the shape, such as iterations[0].seconds; "" if it fits."""
    if isinstance(shape, dict):
        if not isinstance(value, dict):
            return where or "content"
        below = ((value.get(key, _ABSENT), inner, f"{where}.{key}".lstrip(".")) for key, inner in shape.items())
    elif isinstance(shape, list):
        if not isinstance(value, list):
            return where
        below = ((item, shape[0], f"{where}[{number}]") for number, item in enumerate(value))
    else:
        fits = isinstance(value, shape) if isinstance(shape, type | UnionType) else shape(value)
        return "" if fits else where
    return next((place for part in below if (place := misfit(*part))), "")


_ABSENT = object()  # fits no shape, as opposed to null
