"""Judges what a training loop records, losses and metrics, and in which mode it trains and evaluates."""

import math

import numpy as np

from grader.checks import reference
from grader.checks.training.steps import Training
from grader.checks.training.traces import Evaluation, RankTrace
from grader.checks.training.updates import check_noise

SAME = 5e-5  # a run in float32 is off by up to 5e-6


def check_losses(training: Training) -> None:
    """One loss for every step: that of the step's own batch on this rank, before the update."""
    training.must_have_steps(training.setting.steps_per_epoch)
    for rank, trace in enumerate(training.ranks):
        if len(trace.losses) != len(trace.steps):
            message = f"expected a loss for each of {len(trace.steps)} steps on rank {rank}, got {len(trace.losses)}"
            raise training.grade.lacking(training.result, message)
        rights = []
        for number, (told, step) in enumerate(zip(trace.losses, trace.steps, strict=True)):
            if told["kind"]:
                training.grade.fail(
                    f"the loss is recorded as a {told['kind']}, expected a number: a tensor keeps the whole graph in "
                    "memory, and the record cannot be written as JSON; use loss.item()"
                )
            if not step.examples:
                training.grade.fail("the optimizer steps again without a new batch before it")
            rights.append(training.gradient(step.examples, rank, number)[0])
        values = [told["value"] for told in trace.losses]
        wrong = [i for i in range(len(values)) if not _alike(values[i], rights[i])]
        if wrong:
            cause = _wrong_loss(training, rank, wrong[0], values, rights)
            text = f"step {wrong[0] + 1} on rank {rank}: expected the loss {rights[wrong[0]]:.6f}"
            training.grade.fail(f"{cause}\n{text}, got {values[wrong[0]]:.6f}".lstrip("\n"))


def _alike(got: float, right: float) -> bool:
    return math.isclose(got, right, rel_tol=1e-4, abs_tol=1e-6)  # a small loss is a difference of larger numbers


def _wrong_loss(training: Training, rank: int, i: int, got: list[float], right: list[float]) -> str:
    """The known mistake that gives this loss, the first that is wrong; "" if none does."""
    n, step = len(training.ranks), training.ranks[rank].steps[i]
    if not math.isfinite(got[i]):
        return "the loss is inf or nan"
    after, _ = training.gradient(step.examples, rank, i + 1)
    if _alike(got[i], after):
        return "the recorded loss is that after the update: record the forward pass's loss before the step"
    if _alike(got[i] * n, right[i]):
        return f"the recorded loss is divided by {n}: average only the gradients; record the worker's own loss"
    if i and _alike(got[i], sum(right[: i + 1]) / (i + 1)):
        return "the recorded loss is the mean of all losses so far: record the loss of each batch"
    if len(got) > 1 and all(x == 0 or _alike(x, y) for x, y in zip(got[1:], right[:-1], strict=True)):
        return "every loss is recorded one step late"
    return ""


def check_evaluations(training: Training, epochs: int, dev: int) -> None:
    """After every epoch: all of the dev set once, in eval mode, and its metrics to the record."""
    training.must_have_steps()
    train, trace = training.setting.train, training.ranks[0]
    if len(trace.evaluations) != epochs:
        message = f"expected {epochs} evaluations, one after every epoch, got {len(trace.evaluations)}"
        raise training.grade.lacking(training.result, message)
    for epoch, evaluation in enumerate(trace.evaluations):
        _check_evaluation(training, trace, epoch, evaluation, list(range(train, train + dev)))
    training.must_see_batches()


def _check_evaluation(training: Training, trace: RankTrace, epoch: int, evaluation: Evaluation, dev: list[int]) -> None:
    fail, after = training.grade.fail, training.setting.steps_per_epoch * (epoch + 1)
    when, told = f"evaluation {epoch + 1}", evaluation.told
    if evaluation.after_step != after:
        fail(f"{when} runs after {evaluation.after_step} steps, expected after {after}, the end of the epoch")
    if sorted(evaluation.examples) != dev:
        seen = set(evaluation.examples)
        what = "the training set" if seen and not seen & set(dev) else f"{len(evaluation.examples)} examples"
        fail(f"{when} sees {what}, expected the {len(dev)} examples of the dev set, each once")
    if evaluation.in_train_mode:
        fail(f"{when} runs in train mode, with dropout: call model.eval() before")
    if told is None:
        fail(f"{when} was not passed to record.evaluation")
    if kinds := [kind for kind in told["kinds"] if kind]:
        fail(f"{when} passes a {kinds[0]} to record.evaluation, expected the epoch number and plain numbers")
    if told["epoch"] != epoch:
        fail(
            f"{when} is recorded for epoch {told['epoch']}, expected {epoch}: pass epoch as the loop counts it, from 0"
        )
    right = _metrics(
        training,
        reference.logits(training.before(0, after), training.setting.ids[0][dev]),
        training.setting.labels[0][dev],
    )
    got = told["metrics"]
    if set(got) != set(right) or not all(abs(got[name] - value) <= SAME for name, value in right.items()):
        fail(f"{when} of {training.setting.task.upper()}: expected the metrics {_words(right)}, got {_words(got)}")


def _metrics(training: Training, logits: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """GLUE's metrics of a task, by their short names; a regression has scores (B, 1)."""
    if logits.shape[1] > 1:
        return {"acc": float((logits.argmax(axis=1) == labels).mean())}
    scores = logits[:, 0]
    ranks = [np.argsort(np.argsort(values)) for values in (scores, labels)]  # drawn scores: no two are equal
    pearson, spearman = (float(np.corrcoef(*pair)[0, 1]) for pair in ((scores, labels), ranks))
    return {"pearson": pearson, "spearmanr": spearman, "corr": (pearson + spearman) / 2}


def _words(metrics: dict[str, float]) -> str:
    return "{" + ", ".join(f"'{name}': {value:.4f}" for name, value in metrics.items()) + "}"


def check_train_mode(training: Training) -> None:
    """Every batch is trained on in train mode, after an evaluation too, and dropout draws anew."""
    training.must_have_steps()
    check_noise(training)
    for trace in training.ranks:
        wrong = [number for number, step in enumerate(trace.steps) if not step.in_train_mode]
        if wrong:
            again = " (evaluate() leaves the model in eval mode)" if wrong[0] else ""
            training.grade.fail(f"step {wrong[0] + 1} trains in eval mode, without dropout: call model.train(){again}")
        evaluated = trace.evaluations and trace.evaluations[0].after_step < len(trace.steps)
        if not evaluated:
            raise training.grade.lacking(training.result, "no step follows an evaluation: evaluate after every epoch")
