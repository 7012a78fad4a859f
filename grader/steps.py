"""A run of train() on a toy, read from its events: what every rank did in each step, beside what is right.

A step is all that a rank does up to its optimizer's step; `Training.gradient` computes in numpy what it should be, from
the examples that the ranks' forward passes really saw.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from grader import diagnosis, draws, reference
from grader.calls import Call, Event
from grader.grading import Grade
from grader.outcome import RankResult, Result

Arrays = dict[str, np.ndarray]
SMALL = 0.1  # the gradient of a batch that fits well is a difference of numbers larger than it
FLOAT32 = 20.0  # a forward and backward pass of a toy in float32 is off by up to 1e-5 of a gradient's norm


@dataclass
class Step:
    """One rank's step. Gradients and parameters by name; None where the rank did not come so far."""

    examples: list[int] = field(default_factory=list)
    forwards: int = 0
    after_dev: bool = False  # a batch of the dev set went through with gradients
    in_train_mode: bool = True
    calls: list[Call] = field(default_factory=list)
    clip: dict | None = None  # gradients when clip_grad_norm_ was first called, and the examples seen by then
    clip_examples: list[int] = field(default_factory=list)
    grads: dict | None = None  # gradients and parameters when the optimizer stepped
    before: dict | None = None
    after: dict | None = None
    rate: float = 0.0
    where: str = ""
    order: list[str] = field(default_factory=list)


@dataclass
class Evaluation:
    """What ran without gradients, up to the next step or to record.evaluation."""

    after_step: int
    examples: list[int] = field(default_factory=list)
    in_train_mode: bool = False
    told: dict | None = None  # epoch and metrics given to the record


@dataclass
class RankTrace:
    """One rank's steps, evaluations and losses, and `rest`: what came after the last whole step."""

    steps: list[Step]
    evaluations: list[Evaluation]
    losses: list[dict]
    builds: list[Event]  # calls of build_optimizer
    rest: Step


def read(rank: RankResult, train: int) -> RankTrace:
    """The trace of one rank; examples from number `train` on are those of the dev set."""
    trace = RankTrace([], [], [], [], Step())
    step = trace.rest
    open_evaluation: Evaluation | None = None

    for event in rank.events:
        data = event.data
        if isinstance(event, Call):
            step.calls.append(event)
        elif event.name == "begin":
            step = trace.rest = Step()
        elif event.name == "build":
            trace.builds.append(event)
        elif event.name == "forward" and not _evaluates(data, train):
            open_evaluation = None
            _see(step, event)
        elif event.name == "forward":
            if open_evaluation is None:
                open_evaluation = Evaluation(len(trace.steps))
                trace.evaluations.append(open_evaluation)
            step.after_dev |= bool(data["grad"])
            open_evaluation.examples += [draws.number(token) for token in data["first"]]
            open_evaluation.in_train_mode |= bool(data["training"])
        elif event.name == "evaluation":
            if open_evaluation is None:
                open_evaluation = Evaluation(len(trace.steps))
                trace.evaluations.append(open_evaluation)
            open_evaluation.told, open_evaluation = data, None
        elif event.name == "clip":
            if step.clip is None:
                step.clip, step.clip_examples = data["grads"], list(step.examples)
        elif event.name == "step":
            step.grads, step.before, step.rate = data["grads"], data["params"], data["rate"]
            step.where = event.where
        elif event.name == "stepped":
            step.after = data["params"]
            trace.steps.append(step)
            step = trace.rest = Step()
        elif event.name == "loss":
            trace.losses.append(data)
        step.order.append(event.name)
    return trace


def _evaluates(forward: dict, train: int) -> bool:
    """A forward pass without gradients, or one of the dev set, whatever is forgotten around it."""
    return not forward["grad"] or all(draws.number(token) >= train for token in forward["first"])


def _see(step: Step, event: Event) -> None:
    step.examples += [draws.number(token) for token in event.data["first"]]
    step.forwards += 1
    step.in_train_mode &= bool(event.data["training"])


@dataclass(frozen=True)
class Setting:
    """What a run was given: a toy's weights, and examples of which those from number `train` on are the dev set."""

    kind: str  # classifier or language model
    weights: Arrays
    ids: np.ndarray  # (examples, T)
    labels: Any
    train: int
    steps_per_epoch: int


class Training:
    """A run of train() on `world_size` ranks and what is right for it."""

    def __init__(self, grade: Grade, result: Result, setting: Setting) -> None:
        self.grade, self.result, self.setting = grade, result, setting
        self.weights, self.ids = setting.weights, setting.ids
        self.names = [name for name in setting.weights if name != "frozen"]
        self.ranks = [read(rank, setting.train) for rank in result.ranks]

    def must_have_steps(self, count: int = 1) -> None:
        """The verdict of the run unless every rank has made so many optimizer steps."""
        made = min(len(rank.steps) for rank in self.ranks)
        if made < count:
            forwards = max((step.forwards for rank in self.ranks for step in rank.steps), default=1)
            cause = f": {forwards} batches come before one step" if forwards > 1 else ""
            cause = cause if made else ": is its step called, with brackets?"
            raise self.grade.lacking(
                self.result, f"expected {count} optimizer steps, one for each batch, got {made}{cause}"
            )

    def must_not_hang(self) -> None:
        """The verdict at once if the ranks do not agree or wait for ever: what came before is then of no interest."""
        if self.result.outcome in ("mismatch", "deadlock", "deadline"):
            self.grade.must_return(self.result)

    def refuse_dev(self, step: Step) -> None:
        if step.after_dev and not step.examples:
            self.grade.fail("a batch of the training comes from the dev set: train on data.train")

    def gradient(self, params: dict, examples: list[int]) -> tuple[float, Arrays]:
        """Loss and gradients of a batch, for parameters that came from a rank."""
        weights = self.weights | params
        rows = np.asarray(examples, int)
        if self.setting.kind == "classifier":
            return reference.classifier(weights, self.ids[rows], self.setting.labels[rows])
        return reference.language_model(weights, self.ids[rows])

    def own_gradients(self, number: int) -> list[Arrays]:
        """What each rank's own batch of a step gives, at the parameters the rank really had."""
        steps = [rank.steps[number] for rank in self.ranks]
        idle = next((step for step in steps if not step.examples), None)
        if idle:
            self.refuse_dev(idle)
            self.grade.fail(f"the optimizer steps again ({idle.where}) without a new batch before it")
        return [self.gradient(step.before or {}, step.examples)[1] for step in steps]

    def differ(self, got: dict | None, expected: Arrays) -> str:
        """The first tensor that is not as expected, in words; "" if all are."""
        total = max(reference.norm(expected), SMALL)
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
    **config: Any,
):
    """train() of a run_glue.py on a toy classifier; `batch` is that of one worker.

    Without `synced`, sync_gradients does nothing: which examples a worker sees does not hang on how it averages. With
    `right`, so many of the dev set's labels are those that the model finds before it is trained.
    """
    config = {"per_gpu_train_batch_size": batch, "learning_rate": 0.1} | config
    arguments: dict[str, Any] = {
        "train": train,
        "dev": dev,
        "joined": joined,
        "synced": synced,
        "right": right,
        "config": config,
        "weights_seed": grade.seed,
    }
    result = grade.run("grader.probes_train:glue", world_size, **arguments)
    ids, labels = _together(grade.seed, train, dev)
    weights = draws.classifier(grade.seed, train + dev)
    if right is not None:
        labels[train:] = draws.answer(weights, ids[train:], right)
    steps_per_epoch = math.ceil(math.ceil(train / world_size) / batch)
    return Training(grade, result, Setting("classifier", weights, ids, labels, train, steps_per_epoch))


def gpt2(grade: Grade, world_size: int, *, train: int, batch: int, dev: int = 4, **config: Any):
    """train() of a run_gpt2.py on a toy language model; `train` blocks and `batch` are those of one worker."""
    config = {"batch_size": batch * world_size, "learning_rate": 0.1} | config
    arguments: dict[str, Any] = {
        "train": train,
        "dev": dev,
        "joined": True,
        "config": config,
        "weights_seed": grade.seed,
    }
    result = grade.run("grader.probes_train:gpt2", world_size, **arguments)
    parts = [draws.examples(grade.seed, train, rank * train)[0] for rank in range(world_size)]
    parts.append(draws.examples(grade.seed, dev, train * world_size)[0])
    total = train * world_size
    weights = draws.language_model(grade.seed, total + dev)
    setting = Setting("language model", weights, np.concatenate(parts), None, total, math.ceil(train / batch))
    return Training(grade, result, setting)


def _together(seed: int, train: int, dev: int) -> tuple[np.ndarray, np.ndarray]:
    parts = [draws.examples(seed, train, 0), draws.examples(seed, dev, train)]
    ids, labels = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return ids, labels
