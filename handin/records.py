"""Reads the records of runs and says what is wrong with each: a bad record is named and left out, nothing is guessed.

A run is a folder with rank{r}.json of every worker; task 1's README describes the keys.
"""

import json
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.timeline.parts import Parts, mean

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
DEMO, PICTURES = "demo", "pictures"  # folders of `make demo`, of which the report takes timelines, and `make pictures`
DAMAGED = (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)
ITERATIONS = 40  # what the course asks for; the first of them is a warm-up and does not count


@dataclass(frozen=True)
class Rank:
    """What the report uses of one rank's record. Times are in seconds."""

    rank: int
    world_size: int
    kind: str  # a value of KINDS, or "beyond"; "" for a script that the report does not need
    config: dict[str, Any]
    setting: dict[str, Any]  # what two runs must have in common to be compared, by the names that a reader knows
    threads: int
    steps_per_epoch: int
    losses: list[float]  # of every iteration; nan where this rank has none
    seconds: list[float]
    communication: list[float | None]
    evaluations: list[tuple[int, dict[str, float]]]  # epoch, from 1; metrics
    collectives: list[tuple[str, int, int]]  # name, calls and bytes in the whole run
    memory: dict[str, float]  # and messages, of a run of beyond/
    processor: Any  # see common/workers/processor.py
    timeline: dict[int, dict[str, float | None]]  # row of the timeline -> mean of the parts of its steps


@dataclass(frozen=True, eq=False)
class Run:
    """The readable records of one run, lowest rank first, and what is wrong with it."""

    name: str  # its folder, relative to the folder of all runs
    folder: Path
    ranks: tuple[Rank, ...]
    problems: tuple[str, ...]

    @property
    def first(self) -> Rank:
        return self.ranks[0]

    @property
    def is_demo(self) -> bool:
        return self.name.startswith(f"{DEMO}/")

    @property
    def workers(self) -> int:
        return self.first.world_size

    @property
    def setting(self) -> dict[str, Any]:
        return self.first.setting

    @property
    def iterations(self) -> int:
        return len(self.first.seconds)

    @property
    def epochs(self) -> int:
        """The number of whole epochs."""
        return self.iterations // max(1, self.first.steps_per_epoch)

    @property
    def losses(self) -> list[float]:
        """The loss of every iteration, as the mean over the workers."""
        return [math.fsum(losses) / len(losses) for losses in zip(*(rank.losses for rank in self.ranks), strict=False)]

    def flag(self, name: str) -> Any:
        """Return what the run had for a flag of its script; None if its script has no such flag."""
        return self.first.config.get(name)


@dataclass(frozen=True)
class Runs:
    """What the report is made from. unusable: folders without a record that can be read, and why."""

    folder: Path
    found: list[Run]
    unusable: list[str]
    figures: Path  # what the GPT-2 scripts leave in submit_figures/

    def of(self, kind: str) -> list[Run]:
        """Return the student's runs of a kind, best first: whole, long enough, in its own folder."""

        def order(run: Run) -> tuple:
            return bool(run.problems), -min(run.iterations, ITERATIONS), run.name not in OWN_FOLDERS, run.name

        return sorted((run for run in self.found if run.first.kind == kind and not run.is_demo), key=order)

    def with_timeline(self, kind: str) -> list[Run]:
        """Return the runs with --timeline; those of `make demo` come last."""
        demo = [run for run in self.found if run.first.kind == kind and run.is_demo]
        return [run for run in [*self.of(kind), *demo] if run.first.timeline]


def differences(one: dict[str, Any], other: dict[str, Any], but: Collection[str] = ()) -> list[str]:
    """Return in what the settings of two runs, or two ranks, differ: "seed 42 vs. 7"."""
    keys = [key for key in one if key not in but and one[key] != other.get(key)]
    return [f"{key} {one[key]} vs. {other.get(key)}" for key in keys]


def find_runs(folder: Path, figures: Path) -> Runs:
    """Return the runs in `folder` and up to three levels below it."""
    runs = Runs(folder, [], [], figures)
    paths = sorted(path for level in ("*", "*/*", "*/*/*") for path in folder.glob(level) if path.is_dir())
    for path in [folder, *paths]:
        name = path.relative_to(folder).as_posix()
        files = sorted(path.glob("rank*.json"), key=lambda file: (len(file.name), file.name))
        run = read_run(path, name, files)
        if run.ranks and not name.startswith(f"{PICTURES}/"):
            runs.found.append(run)
        elif run.problems:
            runs.unusable.append(f"{name}: {'; '.join(run.problems)}")
        elif name in OWN_FOLDERS:
            runs.unusable.append(f"{name}: no record in it (the run was interrupted or is still running)")
    return runs


def read_run(folder: Path, name: str, files: Sequence[Path]) -> Run:
    """Read the records of one folder. Those that cannot be read, or are of a different run, are left out."""
    ranks: list[Rank] = []
    problems: list[str] = []
    for file in files:
        try:
            rank = read_rank(json.loads(file.read_text(encoding="utf-8")))
        except DAMAGED as error:
            problems.append(f"{file.name} is damaged, or of another version of the scripts ({error!r}); run it again")
            continue
        if ranks and (reasons := differences(ranks[0].setting, rank.setting, but=("machine",))):
            problems.append(f"{file.name} is from a different run than {files[0].name}: {'; '.join(reasons)}")
        else:
            ranks.append(rank)
        bad = [number for number, loss in enumerate(rank.losses, 1) if math.isnan(loss)]
        if bad and rank.kind.startswith("task"):  # a stage of a pipeline has no loss
            problems.append(f"the loss of rank {rank.rank} in iteration {bad[0]} is not a number")
    missing = sorted(set(range(ranks[0].world_size)) - {rank.rank for rank in ranks}) if ranks else []
    if missing:
        names = ", ".join(f"rank{rank}.json" for rank in missing)
        problems.append(f"without {names} of {ranks[0].world_size} workers: copy it from its machine, or run again")
    return Run(name, folder, tuple(ranks), tuple(problems))


def read_rank(record: Any) -> Rank:
    """Return one rank's record. Raises one of DAMAGED if something that the report uses is missing or wrong."""
    config, host, iterations, steps = record["config"], record["host"], record["iterations"], record["steps_per_epoch"]
    is_gpt2 = "n_epochs" in config
    size, batch = int(record["world_size"]), config["batch_size" if is_gpt2 else "per_gpu_train_batch_size"]
    if size < 1 or not all(step["seconds"] > 0 for step in iterations):
        raise ValueError("a world size or a time is not above 0")
    epochs = config["n_epochs" if is_gpt2 else "num_train_epochs"]
    rows = [Parts(**row) for row in (record.get("timeline") or {"steps": []})["steps"]]
    measured = {**(record.get("communication") or {}), **(record.get("memory") or {})}
    return Rank(
        rank=int(record["rank"]),
        world_size=size,
        kind="beyond" if "strategy" in config else KINDS.get((record["task"], is_gpt2), ""),
        config=config,
        setting={
            "workers": size,
            "model": Path(config["model_name_or_path"]).name,
            "parameters": int(record["parameters"]),
            "data": Path(config["data_dir"] or "embedded sample").name,
            "task": "text" if is_gpt2 else str(config["task_name"]),
            "examples": int(record["examples"]["train"]),
            "seed": int(config["seed"]),
            "total batch": int(batch) * (1 if is_gpt2 else size),
            "tokens per example": int(config["model_max_length" if is_gpt2 else "max_seq_length"]),
            "dropout": None if config["dropout"] is None else float(config["dropout"]),
            "learning rate": float(config["learning_rate"]),
            "steps of the schedule": max(int(config["max_steps"]), int(steps) * int(epochs)),
            "device": str(host["device"]).split(":")[0],
            "machine": str(host["name"]),
            "torch": str(record["versions"]["torch"]),
        },
        threads=int(host["threads"]),
        steps_per_epoch=int(steps),
        losses=[math.nan if step["loss"] is None else float(step["loss"]) for step in iterations],
        seconds=[float(step["seconds"]) for step in iterations],
        communication=[step["phases"]["communication"] for step in iterations],
        evaluations=[(int(e["epoch"]), {k: float(v) for k, v in e["metrics"].items()}) for e in record["evaluations"]],
        collectives=[(str(e["name"]), int(e["count"]), int(e["bytes"])) for e in record["collectives"]],
        memory={name: float(value) for name, value in measured.items() if value is not None},
        processor=record.get("processor"),
        timeline={row.rank: mean([other for other in rows if other.rank == row.rank]) for row in rows},
    )
