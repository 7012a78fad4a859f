"""Judges the steps of a training loop: gradients, clipping, updates, rates, losses, evaluation."""

import math

import numpy as np

from grader import diagnosis, reference
from grader.steps import Evaluation, RankTrace, Step, Training


def check_backward(training: Training) -> None:
    """The first batch's gradient is there when it is clipped, or at the latest when the optimizer steps."""
    trace = training.ranks[0]
    step = trace.steps[0] if trace.steps else trace.rest
    if not step.forwards or (step.clip is None and step.grads is None):
        raise training.grade.lacking(training.result, "train() took no step: expected one for every batch")
    seen = step.examples if step.clip is None else step.clip_examples or step.examples
    _, expected = training.gradient(training.weights, seen)
    found = [gradients for gradients in (step.clip, step.grads) if gradients is not None]
    if any(not training.differ(gradients, expected) for gradients in found):
        return
    words = training.differ(found[-1], expected)
    if all(gradient is None or not np.any(gradient) for gradient in found[-1].values()):
        words = "no parameter has a gradient: backward was not called (without its brackets it is only named)"
    training.grade.fail(f"after the backward pass of the first batch, {words}")


def check_steps(training: Training, steps: int) -> None:
    """Without clipping: each update is minus the rate times the mean gradient of the step's own batches."""
    training.must_not_hang()
    training.must_have_steps()
    for number in range(min(len(rank.steps) for rank in training.ranks)):
        check_gradients(training, number, limit=0.0)
        for rank, trace in enumerate(training.ranks):
            _check_update(training, rank, trace, number)
    training.must_have_steps(steps)
    made = max(len(rank.steps) for rank in training.ranks)
    if made != steps:
        training.grade.fail(f"expected {steps} optimizer steps, one for each batch, got {made}")


def _check_update(training: Training, rank: int, trace: RankTrace, number: int) -> None:
    step = trace.steps[number]
    previous = (trace.steps[number - 1].after if number else None) or training.weights
    kept = {name: np.asarray(previous[name]) for name in training.names}
    if words := training.differ(step.before, kept):
        training.grade.fail(f"before step {number + 1} on rank {rank} something moved the parameters: {words}")
    moved = {name: kept[name] - step.rate * (step.grads or {})[name] for name in training.names}
    if words := training.differ(step.after, moved):
        training.grade.fail(f"step {number + 1} on rank {rank} ({step.where}) is no plain step: {words}")


def check_gradients(training: Training, number: int, limit: float) -> None:
    """When the optimizer steps, every rank holds the mean of all ranks' gradients, clipped to `limit` (0: not)."""
    own = training.own_gradients(number)
    mean = reference.mean(own)
    expected = reference.clipped(mean, limit)
    for rank, trace in enumerate(training.ranks):
        step = trace.steps[number]
        words = training.differ(step.grads, expected)
        if words:
            cause = _cause(training, number, own, limit)
            of_whom = f"the mean of {len(own)} workers' gradients" if len(own) > 1 else "the batch's gradient"
            what = f"expected {of_whom}{', clipped,' if limit else ''} when the optimizer steps"
            training.grade.fail(f"{cause}\n{what}: step {number + 1}, rank {rank}, {words}".lstrip("\n"))


def _cause(training: Training, number: int, own: list, limit: float) -> str:
    """The known mistake that leaves these gradients at the optimizer's step; "" if none does."""
    got = [rank.steps[number].grads or {} for rank in training.ranks]

    def everywhere(candidates: list) -> bool:
        return not any(training.differ(mine, right) for mine, right in zip(got, candidates, strict=True))

    mean = reference.mean(own)
    clipped_own = [reference.clipped(mine, limit) for mine in own]
    if all(gradient is None or not np.any(gradient) for mine in got for gradient in mine.values()):
        return "there is no gradient when the optimizer steps: was backward called, and zero_grad only after the step?"
    if limit and everywhere([mean] * len(own)):
        return "the gradients are not clipped when the optimizer steps: clip after backward and before the step"
    if len(own) > 1 and limit and everywhere([reference.mean(clipped_own)] * len(own)):
        return "the gradients were averaged after they were clipped: clipping is not linear, so average first"
    if len(own) > 1 and everywhere(clipped_own):
        return "every worker steps with its own gradient: it was not averaged before the step"
    if len(own) > 1 and everywhere([{k: g * len(own) for k, g in mean.items()}] * len(own)):
        return f"every gradient is {len(own):.3f} times the mean on {len(own)} workers: did you divide by world_size?"
    if number and _piled_up(training, number, limit):
        return "the gradients of earlier batches are still in it: set them to zero after every step"
    if limit:
        return ""
    names = list(mean)
    lists = [[mine.get(name) for name in names] for mine in got]
    return diagnosis.forgotten_waits(training.result) or diagnosis.name_wrong_mean(
        lists, [[mine[name] for name in names] for mine in own]
    )


def _piled_up(training: Training, number: int, limit: float) -> bool:
    """Whether what is there is the gradient at hand and that of the step before."""
    trace = training.ranks[0]
    earlier, now = trace.steps[number - 1].grads or {}, trace.steps[number].grads or {}
    own = reference.mean(training.own_gradients(number))
    if any(value is None for value in [*earlier.values(), *now.values()]):
        return False
    total = {name: own[name] + earlier[name] for name in own}
    return not training.differ(now, reference.clipped(total, limit))


def check_clipping(training: Training, steps: int, limit: float) -> None:
    """In every step the gradients are averaged over the workers, then clipped to `limit`, then used."""
    training.must_not_hang()
    training.must_have_steps()
    for number in range(min(len(rank.steps) for rank in training.ranks)):
        check_gradients(training, number, limit)
    training.must_have_steps(steps)


def check_rates(training: Training, first: float) -> None:
    """The probe's schedule gives step i the rate first / (1 + i)."""
    training.must_have_steps(2)
    got = [step.rate for step in training.ranks[0].steps]
    right = [first / (1 + number) for number in range(len(got))]
    if np.allclose(got, right, rtol=1e-9):
        return
    text = "expected the rates {}, got {}".format(*(" ".join(f"{x:.4g}" for x in rates[:5]) for rates in (right, got)))
    cause = ""
    if len(set(got)) == 1:
        cause = "the rate never changes: scheduler.step() was not called\n"
    elif np.allclose(got, [first / (2 + number) for number in range(len(got))]):
        cause = "the scheduler steps before the optimizer: the first rate is never used\n"
    training.grade.fail(f"{cause}{text}")


def check_losses(training: Training) -> None:
    """One loss for every step: that of the step's own batch on this rank, before the update."""
    training.must_have_steps()
    for rank, trace in enumerate(training.ranks):
        if len(trace.losses) != len(trace.steps):
            message = f"expected a loss for each of {len(trace.steps)} steps on rank {rank}, got {len(trace.losses)}"
            raise training.grade.lacking(training.result, message)
        for number, (told, step) in enumerate(zip(trace.losses, trace.steps, strict=True)):
            if told["tensor"]:
                training.grade.fail(
                    "the loss is recorded as a tensor, which keeps the whole graph in memory: loss.item()"
                )
            if not step.examples:
                training.grade.fail("the optimizer steps again without a new batch before it")
            right, _ = training.gradient(step.before or {}, step.examples)
            if not math.isclose(told["value"], right, rel_tol=1e-4):
                _fail_loss(training, rank, number, told["value"], right, step)


def _fail_loss(training: Training, rank: int, number: int, got: float, right: float, step: Step) -> None:
    after, _ = training.gradient(step.after or {}, step.examples)
    cause = ""
    if math.isclose(got, after, rel_tol=1e-4):
        cause = "it is the loss after the update: record what the forward pass gave, before the step\n"
    elif math.isclose(got * len(training.ranks), right, rel_tol=1e-4):
        cause = f"it is divided by {len(training.ranks)}: the gradients are averaged, the loss is the worker's own\n"
    training.grade.fail(f"{cause}step {number + 1} on rank {rank}: expected the loss {right:.6f}, got {got:.6f}")


def check_evaluations(training: Training, epochs: int, dev: int) -> None:
    """After every epoch, on every rank: all of the dev set once, in eval mode, and its metrics to the record."""
    training.must_have_steps()
    train = len(training.ids) - dev
    for rank, trace in enumerate(training.ranks):
        of_rank = f" on rank {rank}" if len(training.ranks) > 1 else ""
        if len(trace.evaluations) != epochs:
            message = f"expected {epochs} evaluations{of_rank}, one after every epoch, got {len(trace.evaluations)}"
            raise training.grade.lacking(training.result, message)
        for epoch, evaluation in enumerate(trace.evaluations):
            _check_evaluation(training, trace, epoch, evaluation, list(range(train, train + dev)), of_rank)


def _check_evaluation(
    training: Training, trace: RankTrace, epoch: int, evaluation: Evaluation, dev: list[int], of_rank: str
) -> None:
    fail, after = training.grade.fail, trace.steps_per_epoch * (epoch + 1)
    when = f"evaluation {epoch + 1}{of_rank}"
    if evaluation.after_step != after:
        fail(f"{when} comes after {evaluation.after_step} steps, expected after {after}, the end of the epoch")
    if sorted(evaluation.examples) != dev:
        seen = set(evaluation.examples)
        what = "the training set" if seen and not seen & set(dev) else f"{len(evaluation.examples)} examples"
        fail(f"{when} sees {what}, expected the {len(dev)} examples of the dev set, each once")
    if evaluation.in_train_mode:
        fail(f"{when} runs in train mode, with dropout: call model.eval() before")
    if evaluation.told is None:
        fail(f"{when} is not given to record.evaluation")
    elif training.kind == "classifier":
        params = training.weights | (trace.steps[after - 1].after or {})
        guesses = reference.predictions(params, training.ids[dev])
        right = float((guesses == training.labels[dev]).mean())
        if evaluation.told["epoch"] != epoch:
            fail(f"{when} is recorded for epoch {evaluation.told['epoch']}, expected {epoch}")
        if not math.isclose(evaluation.told["metrics"].get("acc", -1), right, abs_tol=1e-6):
            fail(f"{when}: expected the metrics {{'acc': {right:.4f}}}, got {evaluation.told['metrics']}")


def check_train_mode(training: Training) -> None:
    """Every batch is trained on in train mode, after an evaluation too."""
    training.must_have_steps()
    for trace in training.ranks:
        wrong = [number for number, step in enumerate(trace.steps) if not step.in_train_mode]
        if wrong:
            again = " (evaluate() leaves the model in eval mode)" if wrong[0] else ""
            training.grade.fail(f"step {wrong[0] + 1} trains in eval mode, without dropout: call model.train(){again}")
        evaluated = trace.evaluations and trace.evaluations[0].after_step < len(trace.steps)
        if not evaluated:
            raise training.grade.lacking(training.result, "no step follows an evaluation: evaluate after every epoch")
