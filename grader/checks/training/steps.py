"""Runs train() of a student's script on a toy model, and says what is right for it.

`Training.gradient` computes in numpy what a step should be, from the drawn weights and the examples that the ranks'
forward passes really saw. Every rank has tokens and labels of its own: no rank can know the gradient of another. What a
rank reports is compared with that, and never part of it; see parameters.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from grader.checks import diagnosis, reference
from grader.checks.training import parameters
from grader.checks.training.traces import Step, read
from grader.grading import Grade
from grader.ranks.outcome import Result
from grader.wire import drawn
from grader.wire.values import Fields

Arrays = dict[str, np.ndarray]
SMALL = 0.1 * drawn.LOSS_SCALE  # the gradient of a batch that fits well is a difference of numbers larger than it
FLOAT32 = 20.0  # a forward and backward pass of a toy in float32 is off by up to 1e-5 of a gradient's norm
RATE = 0.1 / drawn.LOSS_SCALE
CLASSES = {"rte": 2, "mnli": 3, "sts-b": 1}


@dataclass(frozen=True)
class Setting:
    """What a run was given: a toy's weights, and each rank's examples; those from number `train` on are the dev set."""

    kind: str  # classifier or language model
    weights: Arrays
    ids: list[np.ndarray]  # of each rank: (examples, T); -1 in the rows that it does not have
    labels: list[np.ndarray]  # of each rank: (examples,)
    train: int
    steps_per_epoch: int
    rate: float = RATE  # of the first step; step i has rate / (1 + i)
    limit: float = 0.0  # of clipping; 0: none
    task: str = "rte"


class Training:
    """A run of train() on `world_size` ranks and what is right for it."""

    def __init__(self, grade: Grade, result: Result, setting: Setting) -> None:
        self.grade, self.result, self.setting = grade, result, setting
        self.weights = setting.weights
        self.names = [name for name in setting.weights if name != "offset"]
        self.ranks = [read(rank, setting.train) for rank in result.ranks]
        self._paths: list[list[Arrays]] = [[setting.weights] for _ in self.ranks]  # of each rank, from step to step
        self._used: list[Arrays] = [{} for _ in self.ranks]  # the gradient of the latest step in _paths

    def must_have_steps(self, count: int = 1) -> None:
        """The verdict of the run unless every rank has made so many optimizer steps."""
        made = min(len(rank.steps) for rank in self.ranks)
        if made < count:
            forwards = max((step.forwards for rank in self.ranks for step in rank.steps), default=1)
            cause = f": {forwards} batches come before one step" if forwards > 1 else ""
            cause = cause if made else ": is optimizer.step called, with parentheses?"
            raise self.grade.lacking(
                self.result, f"expected {count} optimizer steps, one for each batch, got {made}{cause}"
            )

    def must_see_batches(self) -> None:
        """Fails where an optimizer steps without a batch: the computed parameters would stay as they are."""
        for rank, trace in enumerate(self.ranks):
            for number, step in enumerate(trace.steps):
                if not step.examples:
                    self.grade.fail(f"step {number + 1} on rank {rank} has no new batch before it")

    def must_not_hang(self) -> None:
        """The verdict at once if the ranks do not agree or wait for ever: what came before is then of no interest."""
        if self.result.outcome in ("mismatch", "deadlock", "deadline"):
            self.grade.must_return(self.result)

    def refuse_dev(self, step: Step) -> None:
        if step.after_dev and not step.examples:
            self.grade.fail("a training batch comes from the dev set: train on data.train")

    def before(self, rank: int, number: int) -> Arrays:
        """The parameters that a rank must have before this step, computed here; see parameters."""
        while len(self._paths[rank]) <= number:
            self._follow(len(self._paths[rank]) - 1)
        weights = self._paths[rank][number]
        for name in self.names:
            if not np.all(np.isfinite(weights[name])):
                self.grade.fail(f"{name} holds nan or inf on rank {rank}: the training diverged")
        return weights

    def _follow(self, number: int) -> None:
        """Go this step on all ranks; one that has not come so far stays where it is."""
        there = [rank for rank, trace in enumerate(self.ranks) if len(trace.steps) > number]
        steps = {rank: self.ranks[rank].steps[number] for rank in there}
        own = {rank: self.gradient(steps[rank].examples, rank, number)[1] for rank in there if steps[rank].examples}
        mean = reference.mean(list(own.values())) if own else {}
        for rank, gradient in own.items():
            latest = self.gradient(steps[rank].latest, rank, number)[1]
            piled = [parameters.added(new, self._used[rank]) for new in (mean, gradient)]
            limited = [reference.clipped(one, self.setting.limit) for one in (mean, gradient)]
            candidates = [*limited, mean, gradient, latest, *piled]
            self._used[rank] = parameters.used(steps[rank], candidates, max(reference.norm(mean), SMALL))
        for rank, paths in enumerate(self._paths):
            weights = paths[number]
            if rank in steps:
                weights = parameters.moved(weights, steps[rank], self._used[rank], self.setting.rate, number)
            paths.append(weights)

    def gradient(self, examples: list[int], rank: int, number: int) -> tuple[float, Arrays]:
        """Loss and gradients of a rank's batch at the parameters before step `number`."""
        weights = self.before(rank, number)
        rows = np.asarray(examples, int)
        ids = self.setting.ids[rank]
        if not len(rows) or rows.min() < 0 or rows.max() >= len(ids) or (ids[rows] < 0).any():
            self.grade.fail(f"rank {rank} trains on examples that it was not given")
        if self.setting.kind == "classifier":
            return reference.classifier(weights, ids[rows], self.setting.labels[rank][rows])
        return reference.language_model(weights, ids[rows])

    def refuse_idle(self, steps: Iterable[Step]) -> None:
        """Fails if the optimizer steps without a batch: all else that is then wrong follows from it."""
        if idle := next((step for step in steps if not step.examples), None):
            self.refuse_dev(idle)
            self.grade.fail(f"the optimizer steps again ({idle.where}) without a new batch before it")

    def own_gradients(self, number: int) -> list[Arrays]:
        """What each rank's own batch of a step gives, at the parameters that it must have."""
        steps = [rank.steps[number] for rank in self.ranks]
        self.refuse_idle(steps)
        return [self.gradient(step.examples, rank, number)[1] for rank, step in enumerate(steps)]

    def differ(self, got: dict | None, expected: Arrays) -> str:
        """The first tensor that is not as expected, in words; "" if all are."""
        total = max(reference.norm(expected), SMALL)
        if unknown := set(got or {}) - set(expected):
            return f"{min(unknown)[:80]} is not a parameter of the model"
        for name, value in expected.items():
            mine = (got or {}).get(name)
            if not reference.close(mine, value, total, FLOAT32):
                return diagnosis.parameter_words(name, mine, value)
        return ""


def glue(
    grade: Grade,
    world_size: int,
    *,
    train: int,
    batch: int,
    dev: int = 4,
    joined: bool = True,
    synced: bool = True,
    right: int | None = None,
    task: str = "rte",
    **config: object,
) -> Training:
    """train() of a run_glue.py on a toy classifier; `batch` is that of one worker.

    It does not evaluate unless do_eval=True: what stands before region 1.4 is judged without it. Without `synced`,
    sync_gradients does nothing: which examples a worker sees does not depend on how it averages. With `right`, so many
    of the dev set's labels are those that the model finds before it is trained.
    """
    classes, share = CLASSES[task], -(-train // world_size)
    weights = drawn.classifier(grade.seed, train + dev, classes)
    each: list[Fields] = []
    for rank in range(world_size):
        parts = [
            drawn.examples(grade.seed, train, 0, rank, classes),
            drawn.examples(grade.seed, dev, train, rank, classes),
        ]
        ids, labels = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        if right is not None:
            labels[train:] = drawn.answer(weights, ids[train:], right)
        each.append({"ids": ids, "labels": labels, "weights": weights})
    config = {"per_gpu_train_batch_size": batch, "learning_rate": RATE, "do_eval": False, "task_name": task} | config
    arguments: Fields = {"train": train, "dev": dev, "joined": joined, "synced": synced, "right": right}
    probe = "glue_with_correlations" if task == "sts-b" else "glue"
    result = grade.run(f"grader.probes.train:{probe}", world_size, payloads=True, each=each, config=config, **arguments)
    tokens, answers = ([mine[name] for mine in each] for name in ("ids", "labels"))
    setting = Setting("classifier", weights, tokens, answers, train, -(-share // batch), *_schedule(config), task)
    return Training(grade, result, setting)


def gpt2(
    grade: Grade, world_size: int, *, train: int, batch: int, dev: int = 4, loaded: bool = True, **config: object
) -> Training:
    """train() of a run_gpt2.py on a toy language model; `train` blocks and `batch` are those of one worker.

    It is given a loader, or where it makes its own (`loaded` is False) the blocks.
    """
    total = train * world_size
    weights = drawn.language_model(grade.seed, total + dev)
    each, ids = [], []
    for rank in range(world_size):
        mine = drawn.examples(grade.seed, train, rank * train, rank)[0]
        validation = drawn.examples(grade.seed, dev, total, rank)[0]
        known = np.full((total + dev, drawn.TOKENS), -1)
        known[rank * train : (rank + 1) * train], known[total:] = mine, validation
        each.append({"ids": mine, "validation": validation, "weights": weights})
        ids.append(known)
    config = {"batch_size": batch * world_size, "learning_rate": RATE} | config
    arguments: Fields = {"train": train, "dev": dev, "joined": loaded, "loaded": loaded, "config": config}
    result = grade.run("grader.probes.train:gpt2", world_size, payloads=True, each=each, **arguments)
    setting = Setting("language model", weights, ids, [], total, math.ceil(train / batch), *_schedule(config))
    return Training(grade, result, setting)


def _schedule(config: Fields) -> tuple[float, float]:
    return config["learning_rate"], config.get("max_grad_norm", 0.0)
