"""Which of several runs the report uses, and the commands that make those that are missing."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from handin.measures import ITERATIONS, iteration_time, not_comparable
from handin.runs import SLOTS, Run

_TIMED = ("task2a", "task2b", "task3")


@dataclass(frozen=True)
class Chosen:
    """`metrics`: task 1 over its epochs; `one`: task 1 as the others' yardstick; `timed`: one run each of 2a, 2b, 3;
    `scaled`: all runs of these three on several workers."""

    metrics: Run | None
    one: Run | None
    timed: tuple[Run, ...]
    scaled: tuple[Run, ...]

    @property
    def used(self) -> tuple[Run, ...]:
        runs = [self.metrics, self.one, *self.timed, *self.scaled]
        return tuple(dict.fromkeys(run for run in runs if run))


def choose(runs: Sequence[Run]) -> Chosen:
    """Whole runs before damaged ones, the task's own folder before others, long before short.

    Of task 1, the run with most epochs gives the metrics. The yardstick is the one that differs least from the others.
    """

    def best(slot: str) -> Run | None:
        return min((run for run in runs if run.slot == slot), key=_rank, default=None)

    timed = tuple(run for slot in _TIMED if (run := best(slot)))
    ones = [run for run in runs if run.slot == "task1"]
    metrics = min(ones, key=lambda run: (-min(run.whole_epochs, 3), *_rank(run)), default=None)
    one = min(
        ones,
        key=lambda run: (sum(len(not_comparable(run, other)) for other in timed), *_rank(run)),
        default=None,
    )
    scaled = tuple(run for run in runs if run.slot in _TIMED and run.workers > 1)
    return Chosen(metrics, one, timed, scaled)


def _rank(run: Run) -> tuple[bool, bool, bool, int, str]:
    own_folder = Path(run.name).name == SLOTS[run.slot][0]
    short = len(run.first["iterations"]) < ITERATIONS
    return (not run.is_complete or bool(run.problems), short, not own_folder, -len(run.first["iterations"]), run.name)


def missing_runs(chosen: Chosen, tree: Path) -> list[tuple[str, str]]:
    """What is not there, or cannot be used, with the command that makes it like the runs that are there."""
    flags = _flags_like(chosen.timed[0] if chosen.timed else chosen.metrics, tree)
    missing = []
    if chosen.metrics is None:
        missing.append(("task 1 over its epochs", f"python task1_single/run_glue.py{flags}"))
    timed = {run.slot: run for run in chosen.timed}
    for slot in _TIMED:
        if slot not in timed or iteration_time(timed[slot]) is None:
            script = f"{SLOTS[slot][0]}/run_glue.py --max_steps {ITERATIONS}{flags}"
            missing.append((f"40 iterations of {slot}", f"python -m cluster.launch --workers 4 -- {script}"))
    return missing


def _flags_like(run: Run | None, tree: Path) -> str:
    """The flags that make another task's run comparable with this one."""
    if run is None:
        return ""
    config = run.first["config"]
    flags = []
    if not Path(str(config.get("model_name_or_path"))).name.startswith("tiny"):
        flags.append(f"--model_name_or_path {_short(config.get('model_name_or_path'), tree)}")
    if config.get("data_dir"):
        flags.append(f"--data_dir {_short(config['data_dir'], tree)}")
        flags += [f"--{name} {config.get(name)}" for name in ("task_name", "max_seq_length", "learning_rate")]
    if config.get("dropout") is not None:
        flags.append(f"--dropout {config['dropout']:g}")
    if config.get("seed") != 42:
        flags.append(f"--seed {config.get('seed')}")
    return "".join(f" {flag}" for flag in flags)


def _short(path: object, tree: Path) -> str:
    full = Path(str(path))
    return str(full.relative_to(tree)) if full.is_relative_to(tree) else str(path)
