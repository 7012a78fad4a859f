"""Reads the records of runs and says what is wrong with each: a bad record is named and left out, nothing is guessed.

A run is a folder with rank{r}.json of every worker; common/README.md describes the keys.
"""

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KINDS = {  # (the record's task, whether it is GPT-2) -> what the report calls the run
    ("task1_single", False): "task1",
    ("task2a_gather_scatter", False): "task2a",
    ("task2b_allreduce", False): "task2b",
    ("task3_ddp", False): "task3",
    ("task3_ddp", True): "task3_gpt2",
    ("task4_traffic", False): "task4",
    ("pipeline", True): "pipeline",
}  # and "beyond", of which a record names the strategy
OWN_FOLDERS = {task for task, _ in KINDS}  # where a run goes without --output_dir
DAMAGED = (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)
ITERATIONS = 40  # what the course asks for; the first of them is a warm-up and does not count


@dataclass(frozen=True, eq=False)
class Run:
    """One run, from the records that can be read."""

    name: str  # its folder, relative to the folder of all runs
    folder: Path
    kind: str  # a value of KINDS, or "beyond"; "" for a script that the report does not need
    records: list[dict[str, Any]]  # lowest rank first
    problems: list[str]
    setting: dict[str, Any]  # what two runs must have in common to be compared, by the names that a reader knows
    seconds: list[float]  # of each iteration, on the lowest rank
    losses: list[float]  # of each iteration, as the mean over the workers

    @property
    def workers(self) -> int:
        return self.setting["workers"]

    @property
    def machines(self) -> set[str]:
        return {record["host"]["name"] for record in self.records}

    @property
    def config(self) -> dict[str, Any]:
        """The flags of the script."""
        return self.records[0]["config"]

    @property
    def epochs(self) -> int:
        """The number of whole epochs."""
        return len(self.seconds) // max(1, self.records[0]["steps_per_epoch"])


@dataclass(frozen=True)
class Runs:
    """What the report is made from. unusable: folders without a record that can be read, and why."""

    folder: Path
    found: list[Run]
    unusable: list[str]
    figures: Path  # what the GPT-2 scripts leave in submit_figures/

    def of(self, kind: str, demo: bool = False) -> list[Run]:
        """Return the student's runs of a kind (or those of `make demo`), best first: whole, long, in its own folder."""

        def order(run: Run) -> tuple[object, ...]:
            return bool(run.problems), -min(len(run.seconds), ITERATIONS), run.name not in OWN_FOLDERS, run.name

        return sorted(
            (run for run in self.found if run.kind == kind and run.name.startswith("demo/") == demo), key=order
        )

    def with_timeline(self, kind: str) -> list[Run]:
        """Return the runs with --timeline; those of `make demo`, which the report uses for nothing else, come last."""
        return [run for run in [*self.of(kind), *self.of(kind, demo=True)] if run.records[0].get("timeline")]


def differences(one: Mapping[str, object], other: Mapping[str, object], but: Collection[str] = ()) -> list[str]:
    """Return in what the settings of two runs, or two ranks, differ: "seed 42 vs. 7"."""
    keys = [key for key in one if key not in but and one[key] != other.get(key)]
    return [f"{key} {one[key]} vs. {other.get(key)}" for key in keys]


def find_runs(folder: Path, figures: Path) -> Runs:
    """Return the runs in `folder` and up to two levels below it, without those of `make pictures`."""
    runs = Runs(folder, [], [], figures)
    paths = [folder, *sorted(path for level in ("*", "*/*") for path in folder.glob(level) if path.is_dir())]
    for path in paths:
        name = path.relative_to(folder).as_posix()
        files = sorted(path.glob("rank*.json"), key=lambda file: (len(file.name), file.name))
        run = read_run(path, name, files)
        if isinstance(run, Run) and not name.startswith("pictures/"):
            runs.found.append(run)
        elif isinstance(run, str) and (files or name in OWN_FOLDERS):
            runs.unusable.append(f"{name}: {run}")
    return runs


def read_run(folder: Path, name: str, files: Sequence[Path]) -> Run | str:
    """Read a folder. Records that cannot be read, or are of a different run, are left out; a reason if none remains."""
    records: list[dict[str, Any]] = []
    problems: list[str] = []
    for file in files:
        try:
            record = json.loads(file.read_text(encoding="utf-8"))
            other = differences(_setting(records[0] if records else record), _setting(record), but=("machine",))
            losses = [math.nan if step["loss"] is None else float(step["loss"]) for step in record["iterations"]]
            if record["world_size"] < 1 or not all(step["seconds"] > 0 for step in record["iterations"]):
                raise ValueError("expected numbers above 0")
        except DAMAGED as error:
            problems.append(f"{file.name} is damaged, or of another version of the scripts ({error!r}); run it again")
            continue
        if other:
            problems.append(f"{file.name} is from a different run than {files[0].name}: {'; '.join(other)}")
            continue
        records.append(record | {"losses": losses})
        if any(map(math.isnan, losses)) and record["task"].startswith("task"):  # a stage of a pipeline has no loss
            problems.append(f"a loss of rank {record['rank']} is not a number")
    if not records:
        return "; ".join(problems) or "no record in it (the run was interrupted or is still running)"
    setting = _setting(records[0])
    if missing := sorted(set(range(setting["workers"])) - {record["rank"] for record in records}):
        names = ", ".join(f"rank{rank}.json" for rank in missing)
        problems.append(f"without {names} of {setting['workers']} workers: copy it from its machine, or run again")
    kind = (
        "beyond"
        if "strategy" in records[0]["config"]
        else KINDS.get((records[0]["task"], setting["task"] == "text"), "")
    )
    seconds = [float(step["seconds"]) for step in records[0]["iterations"]]
    losses = [math.fsum(step) / len(step) for step in zip(*(record["losses"] for record in records), strict=False)]
    return Run(name, folder, kind, records, problems, setting, seconds, losses)


def _setting(record: dict[str, Any]) -> dict[str, Any]:
    """Raises one of DAMAGED if something is missing or of another type."""
    config, size = record["config"], int(record["world_size"])
    is_gpt2 = "n_epochs" in config
    epochs = config["n_epochs" if is_gpt2 else "num_train_epochs"]
    return {
        "workers": size,
        "model": Path(config["model_name_or_path"]).name,
        "parameters": int(record["parameters"]),
        "data": Path(config["data_dir"] or "embedded sample").name,
        "task": "text" if is_gpt2 else str(config["task_name"]),
        "examples": int(record["examples"]["train"]),
        "seed": int(config["seed"]),
        "total batch": int(config["batch_size"]) if is_gpt2 else int(config["per_gpu_train_batch_size"]) * size,
        "tokens per example": int(config["model_max_length" if is_gpt2 else "max_seq_length"]),
        "dropout": None if config["dropout"] is None else float(config["dropout"]),
        "learning rate": float(config["learning_rate"]),
        "steps of the schedule": max(int(config["max_steps"]), int(record["steps_per_epoch"]) * int(epochs)),
        "device": str(record["host"]["device"]).split(":")[0],
        "machine": str(record["host"]["name"]),
        "torch": str(record["versions"]["torch"]),
    }
