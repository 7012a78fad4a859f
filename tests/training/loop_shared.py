"""Training loops, step by step as loop_in_rank.py in the ranks notes them, and what every step must be.

The right values are computed here with numpy, from the drawn weights and the examples that went through the model;
every rank has examples of its own. The gradients that a rank reports only choose among gradients that are computed
here. So a mistake in one region does not hide that another region is right, and no report makes a wrong gradient right.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from grader.arithmetic import Tolerance, common_factor
from grader.call_checks import Payloads
from grader.grading import Grade
from grader.in_rank import in_rank, run_to_any_end
from grader.ranks.calls import Call, Event
from grader.ranks.outcome import RankResult, Result
from grader.wire.values import Fields
from tests.training import reference, small_models
from tests.training.reference import Arrays, clipped, mean, norm

if TYPE_CHECKING:  # what a function finds in a rank
    from grader.inside.tools import Context
    from tests.training.loop_in_rank import run_train

IN_RANK = ("tests/training/config_in_rank.py", "tests/training/loop_in_rank.py")
PRELOAD = ("scripts", "steps")
CLIP = 0.05  # below the norm of any gradient here, so that clipping always shows
RATE = 0.1 / small_models.LOSS_SCALE
SMALL = 0.1 * small_models.LOSS_SCALE  # a batch that fits well: its gradient is a difference of larger numbers
SLACK = 20.0  # float32: a forward and backward pass is off by up to 1e-5 of a gradient's norm
CRASHES = {  # torch's and Python's words -> what they mean here
    "got batch_size=0": "config.per_gpu_train_batch_size is the batch of one worker already: do not divide it again",
    "has no attribute 'local_rank'": "the configuration has no local_rank: the rank of this worker is config.rank",
    "evaluation() missing 1 required positional argument": "record.evaluation needs two arguments, the epoch number "
    "and the metrics, in this order",
    "'dict' and 'int' ... record.evaluation(": "the arguments of record.evaluation are swapped: pass the epoch number "
    "first, then the metrics",
    "'Features' object has no attribute ... evaluate(": "evaluate() takes the whole `data`, and "
    "finds the dev set in it",
    "has no attribute 'items' ... record.evaluation(": "record.evaluation takes the whole dictionary that evaluate() "
    "returns, and not one number of it",
    "KeyError ... record.evaluation(": "evaluate() returns other metrics for this task: pass on its whole dictionary",
}
CLASSES = {"rte": 2, "mnli": 3, "sts-b": 1}
CHANGED_LOSS = "a collective changes the recorded loss: it works in place, also on loss.detach(), which has its memory"


@in_rank(uses=IN_RANK, preload=PRELOAD, first="watch_library")
def call_train(context: Context, lesson: ModuleType, inputs: Fields) -> None:
    run_train(context, lesson, inputs)


# --- what a rank did ---


@dataclass
class Batch:
    """A batch that went through the model in training, with the gradients at the moments when they were used."""

    examples: list[int]
    steps_before: int
    in_train_mode: bool
    noise: float | None
    drawn: list[str]  # the global random generators that were used since the batch before
    gradients: list[Mapping[str, Any]] = field(default_factory=list)  # at each clipping and each step that follow it
    has_backward: bool = False  # a backward pass went through its loss


@dataclass
class OptimizerStep:
    """What a rank did up to one step of its optimizer; `data` and `where` are those of the step itself."""

    batches: list[Batch] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    clips: list[Event] = field(default_factory=list)
    uses_dev_set: bool = False  # with gradients
    data: Fields = field(default_factory=dict)
    where: str = ""

    @property
    def examples(self) -> list[int]:
        return [number for batch in self.batches for number in batch.examples]


@dataclass
class Evaluation:
    """The passes without gradients, up to the next batch or to record.evaluation."""

    steps_before: int
    examples: list[int] = field(default_factory=list)
    in_train_mode: bool = False
    recorded: Fields | None = None


@dataclass
class TrainingTrace:
    """What one rank did in train(). unfinished: the events after the last complete step."""

    steps: list[OptimizerStep] = field(default_factory=list)
    unfinished: OptimizerStep = field(default_factory=OptimizerStep)
    evaluations: list[Evaluation] = field(default_factory=list)
    losses: list[Fields] = field(default_factory=list)
    events: dict[str, list[Event]] = field(default_factory=dict)  # all others, by name

    @property
    def batches(self) -> list[Batch]:
        return [batch for step in [*self.steps, self.unfinished] for batch in step.batches]


def read(rank: RankResult, train: int) -> TrainingTrace:
    """Return the trace of a rank. A batch is an evaluation if it runs without gradients, or if all its examples are of
    the dev set: those from number `train` on."""
    trace, evaluation = TrainingTrace(), None
    for event in rank.events:
        step, data = trace.unfinished, event.data
        if isinstance(event, Call):
            step.calls.append(event)
        elif event.name == "begin":
            trace.unfinished = OptimizerStep()
        elif event.name == "forward":
            examples = [small_models.number(token) for token in data["first"]]
            if data["grad"] and any(number < train for number in examples):
                step.batches.append(Batch(examples, len(trace.steps), data["training"], data["noise"], data["drawn"]))
                evaluation = None
                continue
            if evaluation is None:
                evaluation = Evaluation(len(trace.steps))
                trace.evaluations.append(evaluation)
            evaluation.examples += examples
            evaluation.in_train_mode |= bool(data["training"])
            step.uses_dev_set |= bool(data["grad"])
        elif event.name == "backward":  # "inside" differs if a hook is called by hand
            for batch in trace.batches[-1:]:
                batch.has_backward |= event.inside == "backward"
        elif event.name == "evaluation":
            if evaluation is None:
                trace.evaluations.append(Evaluation(len(trace.steps)))
            trace.evaluations[-1].recorded, evaluation = data, None
        elif event.name in ("clip", "step"):
            for batch in trace.batches[-1:]:
                batch.gradients.append(data["gradients"])
            if event.name == "clip":
                step.clips.append(event)
            else:
                step.data, step.where = data, event.where
        elif event.name == "stepped":
            trace.steps.append(step)
            trace.unfinished = OptimizerStep()
        elif event.name == "loss":
            trace.losses.append(data)
        else:
            trace.events.setdefault(event.name, []).append(event)
    return trace


# --- the gradients of a step ---


class StepGradients(NamedTuple):
    """The gradients in one step of a rank. `own`: each rank's, from its own examples."""

    own: list[Arrays]
    rank: int
    before: Arrays  # the gradients that this rank used in the step before
    limit: float  # of clipping; 0: none

    @property
    def mean(self) -> Arrays:
        return mean(self.own)

    @property
    def right(self) -> Arrays:
        return clipped(self.mean, self.limit)

    def added(self, gradients: Arrays) -> Arrays:
        return {name: array + self.before.get(name, 0.0) for name, array in gradients.items()}


MISTAKES: dict[str, Callable[[StepGradients], Arrays]] = {  # mistake -> the gradients that the optimizer then uses
    "the gradients are not clipped when the optimizer steps: clip after backward and before the step": lambda g: g.mean,
    "the gradients were averaged after they were clipped: clipping is not linear, so average first":
        lambda g: mean([clipped(own, g.limit) for own in g.own]),
    "every worker steps with its own gradient: it was not averaged before the step":
        lambda g: clipped(g.own[g.rank], g.limit),
    "every gradient still contains the gradients of earlier batches: set them to zero after every step":
        lambda g: clipped(g.added(g.mean), g.limit),
    "every tensor is clipped separately: limit the norm of all gradients together":
        lambda g: {name: clipped({name: array}, g.limit)[name] for name, array in g.mean.items()},
}  # fmt: skip
USED: list[Callable[[StepGradients], Arrays]] = [  # what an optimizer may have used, times one factor
    lambda g: g.right, *MISTAKES.values(), lambda g: g.own[g.rank], lambda g: g.added(g.mean),
    lambda g: g.added(g.own[g.rank]),
]  # fmt: skip


def tolerance(gradients: Arrays) -> Tolerance:
    return Tolerance(max(norm(gradients), SMALL), SLACK)


def used(gradients: StepGradients, got: Mapping[str, np.ndarray | None]) -> Arrays:
    """Return which of USED the optimizer used, times its factor; the right gradients if it used none of them.

    Nothing, if there were none: as where they are set to zero before the step.
    """
    if not any(array is not None and np.any(array) for array in got.values()):
        return {}
    for make in USED:
        candidate = make(gradients)
        pairs = [(got.get(name), array) for name, array in candidate.items()]
        factor = common_factor(pairs, tolerance(gradients.mean))
        if factor is not None and 1e-3 <= factor <= 8:  # a second clipping leaves a small one
            return {name: factor * array for name, array in candidate.items()}
    return gradients.right


# --- a run of train() ---


@dataclass
class Training:
    """A run of train() and what is right for it. `ids`, `labels`: of each rank, -1 in rows that it did not get."""

    grade: Grade
    result: Result
    weights: Arrays
    ids: list[np.ndarray]  # (examples, T)
    labels: list[np.ndarray]  # (examples,); none for a language model
    train: int  # how many of the examples train; the others are the dev set
    steps_per_epoch: int
    rate: float = RATE  # of the first step; step i has rate / (1 + i)
    limit: float = 0.0
    task: str = "rte"

    def __post_init__(self) -> None:
        self.names = [name for name in self.weights if name != "offset"]
        self.ranks = [read(rank, self.train) for rank in self.result.ranks]
        self.paths: list[list[Arrays]] = [[self.weights] for _ in self.ranks]  # parameters before each step
        self.used: list[list[Arrays]] = [[{}] for _ in self.ranks]  # the gradients that each of these came from

    @cached_property
    def payloads(self) -> Payloads:
        return Payloads(self.result)

    @property
    def common_steps(self) -> range:
        """Return the numbers of the steps that all ranks have made."""
        return range(min(len(trace.steps) for trace in self.ranks))

    def parameters(self, rank: int, number: int) -> Arrays:
        """Return the parameters that a rank must have before this step."""
        while len(self.paths[rank]) <= number:
            self.follow(len(self.paths[rank]) - 1)
        return self.paths[rank][number]

    def follow(self, number: int) -> None:
        """Compute the parameters after this step on all ranks; on a rank that has not made it, they stay the same."""
        gradients = self.step_gradients(number)
        for rank, trace in enumerate(self.ranks):
            parameters, latest = self.paths[rank][number], self.used[rank][number]
            if len(trace.steps) > number:
                data, right = trace.steps[number].data, self.rate / (1 + number)
                latest = used(gradients[rank], data["gradients"]) if rank in gradients else latest
                # Follow the rate that the rank reports, unless it is far off: with a rate near 0 nothing trains.
                rate = data["rate"] if isinstance(data["rate"], float) else math.nan
                rate = rate if 0.4 * right <= rate <= 2 * self.rate else right
                parameters = {name: array - rate * latest.get(name, 0.0) for name, array in parameters.items()}
            self.paths[rank].append(parameters)
            self.used[rank].append(latest)

    def gradient(self, rank: int, number: int, examples: list[int]) -> tuple[float, Arrays]:
        """Return loss and gradients of a rank's examples at its parameters before step `number`."""
        rows, ids = np.asarray(examples, int), self.ids[rank]
        if not len(rows) or rows.min() < 0 or rows.max() >= len(ids) or (ids[rows] < 0).any():
            self.grade.fail(observed=f"rank {rank} trains on examples that it was not given")
        if self.labels:
            return reference.classifier(self.parameters(rank, number), ids[rows], self.labels[rank][rows])
        return reference.language_model(self.parameters(rank, number), ids[rows])

    def step_gradients(self, number: int) -> dict[int, StepGradients]:
        """Return the gradients of a step, of each rank that has made it with a batch."""
        made = {rank: trace.steps[number] for rank, trace in enumerate(self.ranks) if len(trace.steps) > number}
        made = {rank: step for rank, step in made.items() if step.examples}
        own = {rank: self.gradient(rank, number, step.examples)[1] for rank, step in made.items()}
        return {
            rank: StepGradients([*own.values()], place, self.used[rank][number], self.limit)
            for place, rank in enumerate(made)
        }


def must_step(training: Training, at_least: int = 1) -> None:
    """Fail unless every rank makes `at_least` steps. A deadlock is reported first."""
    if training.result.outcome in ("mismatch", "deadlock", "deadline"):
        training.grade.must_return(training.result)
    made = len(training.common_steps)
    if made < at_least:
        batches = max((len(step.batches) for trace in training.ranks for step in trace.steps), default=1)
        cause = f": {batches} batches come before one step" if batches > 1 else ""
        cause = cause if made else ": is optimizer.step called, with parentheses?"
        message = f"expected an optimizer step for each of {at_least} batches, got {made}{cause}"
        raise training.grade.lacking(training.result, message)


def must_have_batches(training: Training, steps: Iterable[OptimizerStep]) -> None:
    """Fail if a step has no batch of its own."""
    for step in steps:
        if not step.examples and step.uses_dev_set:
            training.grade.fail("a training batch comes from the dev set: train on data.train")
        if not step.examples and step.data:
            training.grade.fail(f"the optimizer steps again ({step.where}) without a new batch before it")


def check_noise(training: Training) -> None:
    """Check that no two batches of a rank get the same random numbers: dropout would drop the same units."""
    for trace in training.ranks:
        noises = [batch.noise for batch in trace.batches if batch.noise is not None]
        repeated = [number for number, noise in enumerate(noises) if noise in noises[:number]]
        if repeated:
            first = noises.index(noises[repeated[0]])
            training.grade.fail(
                f"batches {first + 1} and {repeated[0] + 1} use the same random numbers, so dropout drops the same "
                "units: seed the generators once, before training"
            )


def check_no_draws(training: Training) -> None:
    """Check that between two batches of an epoch nothing but the model draws from the global random generators."""
    for rank, trace in enumerate(training.ranks):
        for number, batch in enumerate(trace.batches):
            if batch.drawn and number % training.steps_per_epoch:
                training.grade.fail(
                    f"between batches {number} and {number + 1} on rank {rank}, {batch.drawn[0]} changes: draw nothing "
                    "and seed nothing in a step, or dropout draws other masks"
                )


def check_goes_on(training: Training) -> None:
    """Check that all ranks make all steps although the last rank's loss is nan from the first step on."""
    steps = [len(trace.steps) for trace in training.ranks]
    if training.grade.verdict(training.result) or min(steps) < training.steps_per_epoch:
        training.grade.fail(
            "the last rank has a loss and gradients of nan, and not all ranks make all steps: do not make backward, "
            f"averaging or the step depend on the loss or on gradients; all others wait for this rank\n"
            f"{training.grade.verdict(training.result) or f'steps of each rank: {steps}'}"
        )


# --- runs ---


def glue(
    grade: Grade, ranks: int, *, train: int, batch: int, dev: int = 4, joined: bool = True, synced: bool = True,
    right: int | None = None, task: str = "rte", lost: bool = False, **config: Any,
) -> Training:  # fmt: skip
    """Run train() of a run_glue.py on a small classifier; `batch` is that of one worker.

    It does not evaluate unless do_eval=True. Without `synced`, sync_gradients does nothing. With `right`, the untrained
    model predicts exactly that many labels of the dev set correctly. `lost`: the last rank's losses are nan.
    """
    classes = CLASSES[task]
    weights = small_models.classifier(grade.seed, train + dev, classes)
    inputs: list[Fields] = []
    for rank in range(ranks):
        parts = [
            small_models.examples(grade.seed, count, first, rank, classes)
            for count, first in ((train, 0), (dev, train))
        ]
        ids, labels = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        if right is not None:
            labels[train:] = small_models.answer(weights, ids[train:], right)
        spoilt = {"offset": weights["offset"] * np.nan} if lost and rank == ranks - 1 else {}
        inputs.append({"ids": ids, "labels": labels, "weights": weights | spoilt})
    config = {"per_gpu_train_batch_size": batch, "learning_rate": RATE, "do_eval": False, "task_name": task, **config}
    function = replace(call_train, join=joined, preload=(*PRELOAD, "correlations") if task == "sts-b" else PRELOAD)
    result = run_to_any_end(grade, function, inputs, script="glue", train=train, synced=synced, config=config)
    all_ids, all_labels = [own["ids"] for own in inputs], [own["labels"] for own in inputs]
    # Steps of an epoch: the last batch may be short. Written so that it is not the formula that 4.2 asks for.
    steps = len(range(0, len(range(0, train, ranks)), batch))
    rates = config["learning_rate"], config.get("max_grad_norm", 0.0)
    return Training(grade, result, weights, all_ids, all_labels, train, steps, *rates, task)


def gpt2(
    grade: Grade, ranks: int, *, train: int, batch: int, dev: int = 4, loaded: bool = True, lost: bool = False,
    **config: Any,
) -> Training:  # fmt: skip
    """Run train() of a run_gpt2.py on a small language model; `train` blocks and `batch` are those of one worker.

    train() gets a loader, or, if it makes its own (`loaded` is False), the blocks.
    """
    total, all_ids, inputs = train * ranks, [], []
    weights = small_models.language_model(grade.seed, total + dev)
    for rank in range(ranks):
        own, validation = (
            small_models.examples(grade.seed, count, first, rank)[0]
            for count, first in ((train, rank * train), (dev, total))
        )
        ids = np.full((total + dev, small_models.TOKENS), -1)
        ids[rank * train : (rank + 1) * train], ids[total:] = own, validation
        all_ids.append(ids)
        spoilt = {"offset": weights["offset"] * np.nan} if lost and rank == ranks - 1 else {}
        inputs.append({"ids": own, "validation": validation, "weights": weights | spoilt})
    config = {"batch_size": batch * ranks, "learning_rate": RATE, **config}
    result = run_to_any_end(
        grade, replace(call_train, join=loaded), inputs, script="gpt2", loaded=loaded, config=config
    )
    rates = config["learning_rate"], config.get("max_grad_norm", 0.0)
    return Training(grade, result, weights, all_ids, [], total, math.ceil(train / batch), *rates)
