"""A run of train() on a toy, read from its events: what every rank did in each step, beside what is right.

A step is all that a rank does up to its optimizer's step; `Expected` computes in numpy what each step should be, from
the examples that the ranks' forward passes really saw.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from grader import diagnosis, draws, reference
from grader.calls import Call, Event
from grader.grading import Grade
from grader.outcome import RankResult, Result

Arrays = dict[str, np.ndarray]
FLOAT32 = 20.0  # a forward and backward pass of a toy in float32 is off by up to 1e-5 of a gradient's norm


@dataclass
class Step:
    """One rank's step. Gradients and parameters by name; None where the rank did not come so far."""

    examples: list[int] = field(default_factory=list)
    forwards: int = 0
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
    loss_after: list[int]  # how many optimizer steps had been made when each loss was recorded
    steps_per_epoch: int
    rest: Step


def read(rank: RankResult, names: Sequence[str]) -> RankTrace:
    """The trace of one rank; `names` are those of the trainable parameters."""
    trace = RankTrace([], [], [], [], 0, Step())
    step = trace.rest
    open_evaluation: Evaluation | None = None

    def named(values: Any) -> dict:
        return dict(zip(names, values, strict=False)) if isinstance(values, list) else {}

    for event in rank.events:
        data = event.data
        if isinstance(event, Call):
            step.calls.append(event)
        elif event.name == "begin":
            step = trace.rest = Step()
        elif event.name == "build":
            trace.steps_per_epoch = int(data["steps_per_epoch"])
        elif event.name == "forward" and data["grad"]:
            open_evaluation = None
            _see(step, event)
        elif event.name == "forward":
            if open_evaluation is None:
                open_evaluation = Evaluation(len(trace.steps))
                trace.evaluations.append(open_evaluation)
            open_evaluation.examples += [draws.number(token) for token in data["first"]]
            open_evaluation.in_train_mode |= bool(data["training"])
        elif event.name == "evaluation":
            if open_evaluation is None:
                open_evaluation = Evaluation(len(trace.steps))
                trace.evaluations.append(open_evaluation)
            open_evaluation.told, open_evaluation = data, None
        elif event.name == "clip":
            if step.clip is None:
                step.clip, step.clip_examples = named(data["grads"]), list(step.examples)
        elif event.name == "step":
            step.grads, step.before, step.rate = named(data["grads"]), named(data["params"]), data["rate"]
            step.where = event.where
        elif event.name == "stepped":
            step.after = named(data["params"])
            trace.steps.append(step)
            step = trace.rest = Step()
        elif event.name == "loss":
            trace.losses.append(data)
            trace.loss_after.append(len(trace.steps))
        step.order.append(event.name)
    return trace


def _see(step: Step, event: Event) -> None:
    step.examples += [draws.number(token) for token in event.data["first"]]
    step.forwards += 1
    step.in_train_mode &= bool(event.data["training"])


class Training:
    """A run of train() on `world_size` ranks and what is right for it."""

    def __init__(self, grade: Grade, result: Result, kind: str, weights: Arrays, ids: np.ndarray, labels: Any) -> None:
        self.grade, self.result, self.kind = grade, result, kind
        self.weights, self.ids, self.labels = weights, ids, labels
        self.names = [name for name in weights if name != "frozen"]
        self.ranks = [read(rank, self.names) for rank in result.ranks]

    def must_have_steps(self, count: int = 1) -> None:
        """The verdict of the run unless every rank has made so many optimizer steps."""
        made = min(len(rank.steps) for rank in self.ranks)
        if made < count:
            raise self.grade.lacking(
                self.result,
                f"expected {count} optimizer steps, one for each batch, got {made}: is its step called, with brackets?",
            )

    def must_not_hang(self) -> None:
        """The verdict at once if the ranks do not agree or wait for ever: what came before is then of no interest."""
        if self.result.outcome in ("mismatch", "deadlock", "deadline"):
            self.grade.must_return(self.result)

    def gradient(self, params: dict, examples: list[int]) -> tuple[float, Arrays]:
        """Loss and gradients of a batch, for parameters that came from a rank."""
        weights = self.weights | params
        rows = np.asarray(examples, int)
        if self.kind == "classifier":
            return reference.classifier(weights, self.ids[rows], self.labels[rows])
        return reference.language_model(weights, self.ids[rows])

    def own_gradients(self, number: int) -> list[Arrays]:
        """What each rank's own batch of a step gives, at the parameters the rank really had."""
        steps = [rank.steps[number] for rank in self.ranks]
        idle = next((step for step in steps if not step.examples), None)
        if idle:
            self.grade.fail(f"the optimizer steps again ({idle.where}) without a new batch before it")
        return [self.gradient(step.before or {}, step.examples)[1] for step in steps]

    def differ(self, got: dict | None, expected: Arrays) -> str:
        """The first tensor that is not as expected, in words; "" if all are."""
        total = reference.norm(expected)
        for name, value in expected.items():
            mine = (got or {}).get(name)
            if not reference.close(mine, value, total, FLOAT32):
                return diagnosis.parameter_words(name, mine, value)
        return ""


def glue(grade: Grade, world_size: int, *, train: int, batch: int, dev: int = 4, joined: bool = True, **config: Any):
    """train() of a run_glue.py on a toy classifier; `batch` is that of one worker."""
    config = {"per_gpu_train_batch_size": batch, "learning_rate": 0.1} | config
    arguments: dict[str, Any] = {
        "train": train,
        "dev": dev,
        "joined": joined,
        "config": config,
        "weights_seed": grade.seed,
    }
    result = grade.run("grader.probes_train:glue", world_size, **arguments)
    ids, labels = _together(grade.seed, train, dev)
    return Training(grade, result, "classifier", draws.classifier(grade.seed, train + dev), ids, labels)


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
    weights = draws.language_model(grade.seed, train * world_size + dev)
    return Training(grade, result, "language model", weights, np.concatenate(parts), None)


def _together(seed: int, train: int, dev: int) -> tuple[np.ndarray, np.ndarray]:
    parts = [draws.examples(seed, train, 0), draws.examples(seed, dev, train)]
    ids, labels = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return ids, labels
