"""A rank's run of train(), read from its events: batches, steps, evaluations and losses.

A step is all that a rank does up to its optimizer's step.
"""

from dataclasses import dataclass, field

from grader.ranks.calls import Call, Event
from grader.ranks.outcome import RankResult
from grader.wire import drawn


@dataclass
class Batch:
    """One training batch: its examples, how many steps came before it, and the gradients seen after it."""

    examples: list[int]
    after_step: int
    noise: float | None
    seen: list[dict] = field(default_factory=list)
    passed: bool = False  # a backward pass went through its loss


@dataclass
class Step:
    """One rank's step. Gradients and parameters by name; None where the rank did not come so far."""

    examples: list[int] = field(default_factory=list)
    latest: list[int] = field(default_factory=list)  # of the last batch alone
    forwards: int = 0
    after_dev: bool = False  # a batch of the dev set went through with gradients
    in_train_mode: bool = True
    calls: list[Call] = field(default_factory=list)
    clip: dict | None = None  # gradients when clip_grad_norm_ was first called, and the examples seen by then
    clip_examples: list[int] = field(default_factory=list)
    limits: list[tuple[float, str]] = field(default_factory=list)  # of every call of clip_grad_norm_, and its place
    grads: dict | None = None  # gradients and parameters when the optimizer stepped
    before: dict | None = None
    after: dict | None = None
    rate: float = 0.0
    remembered: int = 0  # earlier steps that the optimizer's state knows of
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
    """One rank's steps, batches, evaluations and losses, and `rest`: what came after the last whole step."""

    steps: list[Step]
    batches: list[Batch]
    evaluations: list[Evaluation]
    losses: list[dict]
    builds: list[Event]  # calls of build_optimizer
    rest: Step


class Reader:
    """Reads one rank's events in their order; examples from number `train` on are those of the dev set."""

    def __init__(self, train: int) -> None:
        self.train = train
        self.trace = RankTrace([], [], [], [], [], Step())
        self.open: Evaluation | None = None

    @property
    def step(self) -> Step:
        return self.trace.rest

    def read(self, event: Event) -> None:
        if isinstance(event, Call):
            self.step.calls.append(event)
        elif event.name == "begin":
            self.trace.rest = Step()
        elif event.name == "backward":
            if self.trace.batches and event.inside == "backward":  # and not a call of the hook by hand
                self.trace.batches[-1].passed = True
        elif event.name == "build":
            self.trace.builds.append(event)
        elif event.name == "forward":
            self._forward(event.data)
        elif event.name == "evaluation":
            self._evaluation().told, self.open = event.data, None
        elif event.name in ("clip", "step"):
            self._gradients(event)
        elif event.name == "stepped":
            self.step.after = event.data["params"]
            self.trace.steps.append(self.step)
            self.trace.rest = Step()
        elif event.name == "loss":
            self.trace.losses.append(event.data)
        self.step.order.append(event.name)

    def _evaluation(self) -> Evaluation:
        if self.open is None:
            self.open = Evaluation(len(self.trace.steps))
            self.trace.evaluations.append(self.open)
        return self.open

    def _forward(self, data: dict) -> None:
        numbers = [drawn.number(token) for token in data["first"]]
        # Without gradients, or of the dev set, whatever is forgotten around it: an evaluation.
        if not data["grad"] or all(number >= self.train for number in numbers):
            self.step.after_dev |= bool(data["grad"])
            self._evaluation().examples += numbers
            self._evaluation().in_train_mode |= bool(data["training"])
            return
        self.open = None
        self.step.examples += numbers
        self.step.latest = numbers
        self.step.forwards += 1
        self.step.in_train_mode &= bool(data["training"])
        self.trace.batches.append(Batch(numbers, len(self.trace.steps), data["noise"]))

    def _gradients(self, event: Event) -> None:
        data, step = event.data, self.step
        if self.trace.batches:
            self.trace.batches[-1].seen.append(data["grads"])
        if event.name == "step":
            step.grads, step.before, step.rate = data["grads"], data["params"], data["rate"]
            step.remembered, step.where = data["remembered"], event.where
            return
        step.limits.append((data["limit"], event.where))
        if step.clip is None:
            step.clip, step.clip_examples = data["grads"], list(step.examples)


def read(rank: RankResult, train: int) -> RankTrace:
    """The trace of one rank."""
    reader = Reader(train)
    for event in rank.events:
        reader.read(event)
    return reader.trace
