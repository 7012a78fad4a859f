"""Chooses the runs that the report uses, computes their times and speed-ups, and says which of them are doubtful."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common.arguments import SAMPLE_GLUE
from common.workers.processor import disturbance, other_programs
from handin.runs import SLOTS, Run, differences

ITERATIONS = 40  # what the course asks for; the first of them is not counted
_BLOCK = 5


@dataclass(frozen=True)
class Time:
    """Mean seconds per iteration without the first, its standard error, and how many iterations it is of."""

    mean: float
    error: float
    count: int

    def __str__(self) -> str:
        return with_deviation(self.mean, self.error if self.count > 1 else None, digits=4)


def with_deviation(mean: float, deviation: float | None, digits: int) -> str:
    """Return a table's cell, such as "0.1000 ± 0.0002"; one value has no deviation, and its cell shows none."""
    if deviation is None:
        return f"{mean:.{digits}f}"
    return f"{mean:.{digits}f}\u00a0±\u00a0{deviation:.{digits}f}"  # no line break inside


def iteration_time(run: Run) -> Time | None:
    """Of the lowest rank (the ranks wait for each other in every step); None with fewer than two iterations.

    The standard error is that of the means of blocks of 5 iterations: neighbours are alike, since what else the
    machine does lasts longer than one iteration. So all iterations alone would promise too much.
    """
    seconds = [step["seconds"] for step in run.first["iterations"][1:ITERATIONS]]
    if not seconds:
        return None
    blocks = [statistics.fmean(seconds[i : i + _BLOCK]) for i in range(0, len(seconds) - _BLOCK + 1, _BLOCK)]
    values = blocks if len(blocks) > 1 else seconds
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.inf
    return Time(statistics.fmean(seconds), error, len(seconds))


def speedup(slow: Time, fast: Time, limit: float = math.inf, of: str = "workers") -> tuple[float, str]:
    """Return the ratio of two times, and a doubt: "" if the ratio can be trusted.

    limit: the number of workers or partitions (`of`), which no speed-up can exceed if both runs do the same work.
    """
    ratio, margin = slow.mean / fast.mean, 2 * math.hypot(slow.error, fast.error)
    if abs(slow.mean - fast.mean) <= margin:
        return ratio, "within the noise: the times differ by less than twice the standard error of their difference"
    if ratio > limit:
        return ratio, f"exceeds the number of {of}, {limit}: the slower run was disturbed or did different work"
    return ratio, ""


def doubts_about(run: Run, timed: bool) -> list[str]:
    """Return what is suspicious in one run; if the report uses its times, also what makes these unreliable."""
    doubts = [*run.problems]
    losses = [loss for loss in run.mean_losses if not math.isnan(loss)]
    if len(losses) > 2 and len(set(losses)) == 1:
        doubts.append(f"the training loss is {losses[0]:.6f} in every iteration: no parameter changes")
    doubts += _constant_metrics(run)
    if timed:
        doubts += _spoilt_times(run)
    return doubts


def _constant_metrics(run: Run) -> list[str]:
    """Metrics of the dev set that are all the same after every whole epoch."""
    whole = [e["metrics"] for e in run.first["evaluations"] if 1 <= e["epoch"] <= run.whole_epochs]
    if len(whole) < 2 or not whole[0] or any(metrics != whole[0] for metrics in whole):
        return []
    words = ", ".join(f"{name} {value}" for name, value in whole[0].items())
    return [
        f"on the dev set {words} after each of {len(whole)} epochs: the model gives one answer to everything, "
        "or what is evaluated is not the model that is trained"
    ]


def _other_programs(run: Run) -> float | None:
    """Return how many cores other programs used; None for a run on several machines, or without this measurement."""
    on_one_machine = len({record["host"]["name"] for record in run.records}) == 1
    times = [record["processor"] for record in run.records if record.get("processor")]
    return other_programs(times) if on_one_machine and len(times) == run.workers else None


def _spoilt_times(run: Run) -> list[str]:
    doubts = []
    if warning := disturbance(_other_programs(run)):
        doubts.append(f"{warning}; run it again")
    if len(run.first["iterations"]) < ITERATIONS:
        doubts.append(f"only {len(run.first['iterations'])} iterations; the course asks for {ITERATIONS}")
    seconds = [step["seconds"] for step in run.first["iterations"][1:ITERATIONS]]
    half = len(seconds) // 2
    if half >= 10:
        early, late = statistics.median(seconds[:half]), statistics.median(seconds[half:])
        if max(early, late) > 1.3 * min(early, late):
            doubts.append(
                f"its iterations took {early:.4f} s in the first half and {late:.4f} s in the second (medians): "
                "something else ran on the machine; run it again"
            )
    return doubts


def compare_losses(runs: Sequence[Run]) -> list[str]:
    """Doubts about the losses of runs that should be alike, each against the first."""
    checked = ((run, run.first.get("gradient")) for run in runs)  # what --check_gradients has said
    doubts = [f"{run.name}: {words}" for run, words in checked if words and "x 1.0000" not in words]
    first = runs[0]
    for run in runs[1:]:
        other = differences(first, run, but=("machine", "device", "torch", "transformers"))
        if other:
            doubts.append(f"losses of {first.name} and {run.name} are not comparable: {'; '.join(other)}")
        elif run.setting["dropout"] == 0:
            pairs = list(zip(first.mean_losses[:5], run.mean_losses[:5], strict=False))
            largest = max((abs(a - b) for a, b in pairs), default=0.0)
            if largest > 1e-3 and run.is_complete and first.is_complete:
                doubts.append(
                    f"the first five losses of {first.name} and {run.name} differ by up to {largest:.2g}, "
                    "although seed and batch are the same and dropout is off: one of the two runs averages gradients "
                    "or divides the examples incorrectly"
                )
    if any(run.setting["dropout"] != 0 for run in runs) and len(runs) > 1:
        doubts.append(
            "losses are only similar, not equal, because dropout was on: workers drop different units than one worker "
            "does (add --dropout 0 to all of these runs to compare them exactly)"
        )
    return doubts


def not_comparable(run: Run, other: Run) -> list[str]:
    """Why the times of two runs cannot be compared; empty if they can."""
    return differences(run, other, but=("dropout", "learning rate", "steps of the schedule"))


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
