"""Chooses the runs that the report uses, and lists the commands for those that are missing."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common.arguments import SAMPLE_GLUE
from handin.measures import ITERATIONS, iteration_time, not_comparable
from handin.runs import SLOTS, Run, differences

EPOCHS = 3  # after each of which the course asks for the metric
_TIMED = ("task2a", "task2b", "task3")


@dataclass(frozen=True)
class Chosen:
    """The runs that the report uses.

    metrics: task 1 over its epochs.
    one: task 1, with which the others are compared.
    timed: one run each of 2a, 2b, 3.
    scaled: all runs of these three on several workers.
    traffic: all runs of task 4."""

    metrics: Run | None
    one: Run | None
    timed: tuple[Run, ...]
    scaled: tuple[Run, ...]
    traffic: tuple[Run, ...]

    @property
    def measured(self) -> tuple[Run, ...]:
        """Those whose times are used."""
        return tuple(dict.fromkeys(run for run in (self.one, *self.timed, *self.scaled) if run))


def choose(runs: Sequence[Run]) -> Chosen:
    """Whole runs before damaged ones, the task's own folder before others, long before short.

    Of task 1, the run with most epochs gives the metrics. The yardstick is the one that differs least from the others.
    """

    def best(slot: str) -> Run | None:
        return min((run for run in runs if run.slot == slot), key=_rank, default=None)

    timed = tuple(run for slot in _TIMED if (run := best(slot)))
    ones = [run for run in runs if run.slot == "task1"]
    metrics = min(ones, key=lambda run: (-min(run.whole_epochs, EPOCHS), *_rank(run)), default=None)
    one = min(
        ones,
        key=lambda run: (
            sum(len(not_comparable(run, other)) for other in timed),
            sum(len(differences(run, other)) for other in timed),
            *_rank(run),
        ),
        default=None,
    )
    scaled = tuple(run for run in runs if run.slot in _TIMED and run.workers > 1)
    return Chosen(metrics, one, timed, scaled, tuple(run for run in runs if run.slot == "task4"))


def _rank(run: Run) -> tuple[bool, bool, bool, int, str]:
    own_folder = Path(run.name).name == SLOTS[run.slot][0]
    short = len(run.first["iterations"]) < ITERATIONS
    return (not run.is_complete or bool(run.problems), short, not own_folder, -len(run.first["iterations"]), run.name)


def missing_runs(chosen: Chosen, tree: Path) -> list[tuple[str, str]]:
    """Return the runs that are missing or unusable, with the command that makes each like the existing runs."""
    like = chosen.timed[0] if chosen.timed else chosen.metrics
    flags = _flags_like(like, tree) if like else " --dropout 0"  # with dropout, the losses of the tasks would differ
    missing = []
    command = f"python task1_single/run_glue.py{flags}"
    if chosen.metrics is None:
        missing.append((f"task 1 over {EPOCHS} epochs", command))
    elif chosen.metrics.whole_epochs < EPOCHS:  # in a folder of its own, so that the 40 iterations stay
        what = f"task 1 over {EPOCHS} epochs ({chosen.metrics.name} has only {chosen.metrics.whole_epochs} of them)"
        missing.append((what, f"{command} --output_dir runs/task1_epochs"))
    timed = {run.slot: run for run in chosen.timed}
    for slot in _TIMED:
        if slot not in timed or iteration_time(timed[slot]) is None:
            script = f"{SLOTS[slot][0]}/run_glue.py --max_steps {ITERATIONS}{flags}"
            missing.append((f"40 iterations of {slot}", f"python -m cluster.launch --workers 4 -- {script}"))
    return missing


def _flags_like(run: Run, tree: Path) -> str:
    """The flags that make another task's run comparable with this one."""
    config = run.first["config"]
    flags = []
    if not Path(config["model_name_or_path"]).name.startswith("tiny"):
        flags.append(f"--model_name_or_path {_short(config['model_name_or_path'], tree)}")
    if config["data_dir"]:
        flags.append(f"--data_dir {_short(config['data_dir'], tree)}")
        flags += [f"--{name} {config[name]}" for name in ("task_name", "max_seq_length", "learning_rate")]
    default_epochs = EPOCHS if config["data_dir"] else SAMPLE_GLUE["epochs"]
    if config.get("num_train_epochs", default_epochs) != default_epochs:  # the schedule depends on it
        flags.append(f"--num_train_epochs {config['num_train_epochs']}")
    if config["dropout"] is not None:
        flags.append(f"--dropout {config['dropout']:g}")
    if config["seed"] != 42:
        flags.append(f"--seed {config['seed']}")
    return "".join(f" {flag}" for flag in flags)


def _short(path: str, tree: Path) -> str:
    full = Path(path)
    return str(full.relative_to(tree)) if full.is_relative_to(tree) else path
