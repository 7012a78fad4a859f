"""Judges what a training loop records, losses and metrics, and in which mode it trains and evaluates."""

import math

from grader import reference
from grader.steps import Evaluation, RankTrace, Training


def check_losses(training: Training) -> None:
    """One loss for every step: that of the step's own batch on this rank, before the update."""
    training.must_have_steps()
    for rank, trace in enumerate(training.ranks):
        if len(trace.losses) != len(trace.steps):
            message = f"expected a loss for each of {len(trace.steps)} steps on rank {rank}, got {len(trace.losses)}"
            raise training.grade.lacking(training.result, message)
        rights = []
        for told, step in zip(trace.losses, trace.steps, strict=True):
            if told["tensor"]:
                training.grade.fail(
                    "the loss is recorded as a tensor, which keeps the whole graph in memory: loss.item()"
                )
            if not step.examples:
                training.grade.fail("the optimizer steps again without a new batch before it")
            rights.append(training.gradient(step.before or {}, step.examples)[0])
        values = [told["value"] for told in trace.losses]
        wrong = [i for i in range(len(values)) if not _alike(values[i], rights[i])]
        if wrong:
            cause = _wrong_loss(training, trace, wrong[0], values, rights)
            text = f"step {wrong[0] + 1} on rank {rank}: expected the loss {rights[wrong[0]]:.6f}"
            training.grade.fail(f"{cause}\n{text}, got {values[wrong[0]]:.6f}".lstrip("\n"))


def _alike(got: float, right: float) -> bool:
    return math.isclose(got, right, rel_tol=1e-4, abs_tol=1e-6)  # a small loss is a difference of larger numbers


def _wrong_loss(training: Training, trace: RankTrace, i: int, got: list[float], right: list[float]) -> str:
    """The known mistake that gives this loss, the first that is wrong; "" if none does."""
    n, step = len(training.ranks), trace.steps[i]
    after, _ = training.gradient(step.after or {}, step.examples)
    if _alike(got[i], after):
        return "it is the loss after the update: record what the forward pass gave, before the step"
    if _alike(got[i] * n, right[i]):
        return f"it is divided by {n}: the gradients are averaged, the loss is the worker's own"
    if i and _alike(got[i], sum(right[: i + 1]) / (i + 1)):
        return "it is the mean of all losses so far: the record wants the loss of each batch"
    if len(got) > 1 and all(x == 0 or _alike(x, y) for x, y in zip(got[1:], right[:-1], strict=True)):
        return "every loss is recorded one step late"
    return ""


def check_evaluations(training: Training, epochs: int, dev: int) -> None:
    """After every epoch, on every rank: all of the dev set once, in eval mode, and its metrics to the record."""
    training.must_have_steps()
    train = training.setting.train
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
    fail, after = training.grade.fail, training.setting.steps_per_epoch * (epoch + 1)
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
    elif training.setting.kind == "classifier":
        params = training.weights | (trace.steps[after - 1].after or {})
        guesses = reference.predictions(params, training.ids[dev])
        right = float((guesses == training.setting.labels[dev]).mean())
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
