"""A training loop on one worker: 1.2 gradients, 1.3 the optimizer's step, 1.4 evaluation after every epoch.

train() runs on a model small enough to be computed here. The rules for steps also hold for several workers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from grader.arithmetic import Tolerance, common_factor
from grader.compare import Expected, check
from grader.grading import Grade
from grader.session import region_at
from grader.wire.values import Fields
from tests.gradients import test_averaging as averaging
from tests.training import loop_shared as loop
from tests.training import reference
from tests.training import test_sampling as sampling
from tests.training.loop_shared import (
    CLIP,
    Batch,
    Evaluation,
    OptimizerStep,
    Training,
    must_have_batches,
    must_step,
    tolerance,
)

graded = pytest.mark.graded
CRASHES = loop.CRASHES
Place = tuple[int, str]  # rank, name
SAME = 5e-5  # of a metric: a run in float32 is off by up to 5e-6


def train(grade: Grade, **changes: Any) -> Training:
    """Run two epochs of 7 examples in batches of 3: the third batch is short."""
    setting = {"train": 7, "batch": 3, "joined": False, "num_train_epochs": 2}
    return loop.glue(grade, 1, **setting | changes)


# --- 1.2: the gradient of every batch ---


def cause_of_gradients(batch: Batch, right: Mapping[str, np.ndarray], loss: float) -> str:
    """Return the mistake that leaves these gradients instead of the batch's; "" if it is no known one."""
    got = batch.gradients[-1]
    none = [name for name in right if got.get(name) is None or not np.any(got[name])]
    if len(none) == len(right):
        if batch.has_backward:
            return "no parameter has a gradient, though backward was called: the gradients are cleared right after it"
        return (
            "no parameter has a gradient: backward was not called on the batch's loss (did you forget the parentheses?)"
        )
    if none:
        return f"{', '.join(none)} have no gradient, but others do: compute those of all parameters"
    factor = common_factor([(got[name], array) for name, array in right.items()])
    if factor is None:
        return ""
    if factor < 0:
        cause = "the sign is reversed, so the step increases the loss"
    elif abs(factor - loss) <= 1e-3 * loss:
        cause = "this is the loss itself: call backward() without it, its argument is a gradient"
    elif factor < 1:
        cause = "is the loss divided? It is a mean already"
    else:
        cause = "does backward run more than once, or is the loss multiplied?"
    return f"every gradient is {factor:.3f} times the batch's: {cause}"


def check_backward(training: Training, batches: Sequence[Batch]) -> None:
    """Check that every batch adds its own gradient to the one that was there, by a backward pass of its loss."""
    before: Fields = {}
    if not batches:
        raise training.grade.lacking(training.result, "train() took no step: expected one for every batch")
    for number, batch in enumerate(batches, 1):
        loss, own = training.gradient(0, batch.steps_before, batch.examples)
        expected = {name: Expected(array, tolerance=tolerance(own)) for name, array in own.items()}
        added = {name: replace(one, value=one.value + before.get(name, 0.0)) for name, one in expected.items()}
        is_right = any(
            all(one.is_right(got.get(name)) for name, one in table.items())
            for got in batch.gradients
            for table in (expected, added)
        )
        if not is_right:
            cause = cause_of_gradients(batch, own, loss)
            expected = {name: replace(one, message=cause) for name, one in expected.items()}
            check(training.grade, f"after the backward pass of batch {number}, ", batch.gradients[-1], expected)
        before = {name: array for name, array in batch.gradients[-1].items() if array is not None}
    for number, batch in enumerate(batches, 1):
        if not batch.has_backward:
            training.grade.fail(
                f"the gradients of batch {number} do not come from a backward pass of its loss: call its backward(). "
                "DistributedDataParallel, in task 3, does not see what torch.autograd.grad or other code computes"
            )


@graded("1.2", weight=2)
def test_backward_gives_the_gradient_of_the_batch(grade: Grade) -> None:
    training = train(grade)
    trace = training.ranks[0]
    step = trace.steps[0] if trace.steps else trace.unfinished
    must_have_batches(training, [step])
    must_not_clip(training, step, only_in=grade.region)  # a second clip in the lines of 1.3 costs points of 1.3
    check_backward(training, [batch for batch in step.batches if batch.gradients][:1])


@graded("1.2")
def test_every_batch_has_a_gradient_of_its_own(grade: Grade) -> None:
    training = train(grade, learning_rate=0.0)  # steps, right or wrong, move nothing
    batches = [batch for batch in training.ranks[0].batches if batch.gradients]
    # Without the optimizer's steps, something else may move the parameters: then only the first batch is known.
    check_backward(training, batches if training.ranks[0].steps else batches[:1])


# --- 1.3: a step for every batch; the rules that hold on several workers, too ---


def must_not_clip(training: Training, step: OptimizerStep, only_in: str = "") -> None:
    """Fail if clip_grad_norm_ has another limit than --max_grad_norm, which the provided line passes.

    only_in: look only at calls in the lines of this region.
    """
    for clip in step.clips:
        limit, elsewhere = clip.data["limit"], region_at(training.grade.session.tree, clip.where) != only_in
        if np.isfinite(limit) and limit != training.limit and not (only_in and elsewhere):
            training.grade.fail(
                f"clip_grad_norm_ is called with max_norm {limit:g} ({clip.where}), but --max_grad_norm is "
                f"{training.limit:g} in this run: the provided line already clips, so remove yours"
            )


def check_steps(training: Training, steps: int) -> None:
    """Check that every step begins with the right parameters and uses the mean gradient of its batches, unclipped."""
    must_step(training, steps)
    for number in training.common_steps:
        check_parameters(training, number)
        for trace in training.ranks:
            must_not_clip(training, trace.steps[number])
        check_gradients(training, number)
    if (made := max(len(trace.steps) for trace in training.ranks)) > steps:
        training.grade.fail(observed=f"expected an optimizer step for each of {steps} batches, got {made}")
    loop.check_noise(training)
    loop.check_no_draws(training)
    for rank, trace in enumerate(training.ranks):
        for number, step in enumerate(trace.steps):
            if step.data["remembered"] != number:
                training.grade.fail(
                    f"before step {number + 1} on rank {rank} the optimizer has lost its state, as AdamW loses its "
                    "moments: build one optimizer before the loop, and clear gradients only, never optimizer.state"
                )


def check_parameters(training: Training, number: int) -> None:
    for rank, trace in enumerate(training.ranks):
        got, right = trace.steps[number].data["parameters"], training.parameters(rank, number)
        one = Expected(
            None, "something changed the parameters, which only the optimizer's steps may", tolerance=tolerance(right)
        )
        expected = {name: replace(one, value=right[name]) for name in training.names if name in got}
        check(training.grade, f"before step {number + 1} on rank {rank}, ", got, expected)


def gradients_of(training: Training, number: int, where: str = "") -> tuple[dict[Place, Any], dict[Place, Expected]]:
    """Return the gradients of a step by rank and name, and what is right. `where` begins each mistake's sentence."""
    got: dict[Place, Any] = {}
    expected: dict[Place, Expected] = {}
    for rank, gradients in training.step_gradients(number).items():
        step = training.ranks[rank].steps[number]
        if missing := [name for name in training.names if name not in step.data["gradients"]]:
            training.grade.fail(
                f"the optimizer ({step.where}) does not update {', '.join(missing)}: was it built from a part of the "
                "model, or is a part frozen?"
            )
        mistakes = {where + sentence: make(gradients) for sentence, make in loop.MISTAKES.items()}
        right = gradients.right
        for name in training.names:
            got[rank, name] = step.data["gradients"][name]
            expected[rank, name] = replace(
                averaging.mean_of([own[name] for own in gradients.own], rank, training.payloads, 0.0),
                value=right[name],
                everywhere={sentence: arrays[name] for sentence, arrays in mistakes.items()},
                tolerance=tolerance(right),
            )
    return got, expected


def has_right_gradients(training: Training, number: int) -> bool:
    got, expected = gradients_of(training, number)
    return all(one.is_right(got[key]) for key, one in expected.items())


def can_be_judged(training: Training, number: int) -> bool:
    """Return whether every rank has a batch in this step, and an optimizer of all parameters."""
    steps = [trace.steps[number] for trace in training.ranks]
    return all(step.examples and set(training.names) <= step.data["gradients"].keys() for step in steps)


def wrong_steps(training: Training, number: int) -> str:
    """Say which steps from `number` on are wrong; "" if all of them are."""
    later = [step for step in training.common_steps[number:] if can_be_judged(training, step)]
    wrong = [step for step in later if not has_right_gradients(training, step)]
    if wrong == later:
        return ""
    one_after_another = len(wrong) > 1 and wrong == list(range(wrong[0], wrong[-1] + 1))
    which = f"{wrong[0] + 1} to {wrong[-1] + 1}" if one_after_another else ", ".join(str(n + 1) for n in wrong)
    steps = "step" if len(wrong) == 1 else "steps"
    whole = wrong == list(range(training.steps_per_epoch))
    return f"in {steps} {which} only{' (the first epoch)' if whole else ''}, "


def check_gradients(training: Training, number: int) -> None:
    """Check that every rank has the mean of all ranks' gradients, clipped, when the optimizer steps."""
    must_have_batches(training, [trace.steps[number] for trace in training.ranks])
    if has_right_gradients(training, number):
        return
    got, expected = gradients_of(training, number, wrong_steps(training, number))
    if not any(array is not None and np.any(array) for array in got.values()):
        steps = [trace.steps[number] for trace in training.ranks]
        cause = "was backward called, and does nothing clear them before the step?"
        if any(batch.has_backward for step in steps for batch in step.batches):
            cause = "backward has been called, so nothing may clear them in between; call zero_grad after the step"
        training.grade.fail(f"step {number + 1}: there is no gradient when the optimizer steps: {cause}")
    ranks = len(training.ranks)
    of_whom = f"the mean of {ranks} workers' gradients" if ranks > 1 else "the batch's gradient"
    what = f"expected {of_whom}{', clipped,' if training.limit else ''} when the optimizer steps"
    check(training.grade, f"{what}: step {number + 1}, rank {{rank}}, ", got, expected, training.result)


def check_clipping(training: Training, steps: int) -> None:
    """Check that every step averages the gradients over the workers, then clips them, then uses them."""
    must_step(training, steps)
    for number in training.common_steps:
        check_gradients(training, number)


def check_rates(training: Training) -> None:
    """Check the learning rate of each step, and the steps per epoch that build_optimizer gets.

    In a graded run, build_schedule of loop_in_rank.py replaces that of common/optim.py. It gives step i the rate
    loop.RATE / (1 + i).
    """
    must_step(training, 2)
    trace = training.ranks[0]
    must_have_batches(training, trace.steps)
    rates = [step.data["rate"] for step in trace.steps]
    built = [build.data["steps_per_epoch"] for build in trace.events.get("build", [])]
    steps = np.arange(len(rates))
    got = {
        "rates": np.asarray([rate if isinstance(rate, float) else np.nan for rate in rates]),
        "steps per epoch": built[:1],  # none if train() builds no optimizer
    }
    twice = "scheduler.step() is called twice in every step: the script calls it already, below your lines"
    advice = "call scheduler.step() once in every step, after the step of the optimizer, and leave the rates to it"
    expected = {
        "rates": Expected(loop.RATE / (1 + steps), advice, "the learning rates", {twice: loop.RATE / (1 + 2 * steps)}),
        "steps per epoch": Expected(
            [training.steps_per_epoch],
            "build_optimizer got {got} steps per epoch, expected {expected}: pass the number of batches, len(loader)",
        ),
    }
    check(training.grade, "", got, expected)
    for number in training.common_steps:
        check_parameters(training, number)


def check_losses(training: Training) -> None:
    """Check that one loss is recorded for every step: that of the step's batch, before the update."""
    must_step(training, training.steps_per_epoch)
    trace = training.ranks[0]
    must_have_batches(training, trace.steps)
    if len(trace.losses) != len(trace.steps):
        message = f"expected a loss for each of {len(trace.steps)} steps, got {len(trace.losses)}"
        raise training.grade.lacking(training.result, message)
    for number, (step, loss) in enumerate(zip(trace.steps, trace.losses, strict=True)):
        right = training.gradient(0, number, step.examples)[0]
        others = [
            training.gradient(rank, number, one.steps[number].examples)[0]
            for rank, one in enumerate(training.ranks)
            if rank and number in training.common_steps
        ]
        expected = {
            "type": Expected(
                "",
                "the loss is recorded as a {got}, expected a number: a tensor keeps the whole graph in memory, and the "
                "record cannot be written as JSON; use loss.item()",
            ),
            "value": Expected(
                np.asarray(right),
                "the recorded loss is not that of the step's forward pass: record the number of every batch as it is",
                "the loss",
                {loop.CHANGED_LOSS: np.asarray(right + sum(others))} if others else {},
                tolerance=Tolerance(limit=1e-4 * abs(right) + 1e-6),  # a small one is a difference of larger numbers
            ),
        }
        check(training.grade, f"step {number + 1}: ", loss | {"value": np.asarray(loss["value"])}, expected)


@graded("1.3")
def test_every_step_moves_the_parameters_by_the_gradient_of_a_new_batch(grade: Grade) -> None:
    check_steps(train(grade, batch=2), 8)  # the batch size of the evaluation is 3
    sampling.check_every_example_once(train(grade))
    sampling.check_orders_differ(train(grade))


@graded("1.3")
def test_gradients_are_clipped_before_the_step(grade: Grade) -> None:
    check_clipping(train(grade, max_grad_norm=CLIP), 6)


@graded("1.3")
def test_the_learning_rate_changes_after_the_step(grade: Grade) -> None:
    check_rates(train(grade, train=10))  # 4 steps in an epoch: a number that nothing else has
    made = len(train(grade, learning_rate=0.0).ranks[0].steps)
    if made < 6:
        grade.fail(
            f"with a learning rate of 0, expected an optimizer step for each of 6 batches, got {made}: warm-up begins "
            "at 0, and AdamW's averages need the gradient of every batch"
        )


@graded("1.3")
def test_the_loss_is_recorded_before_the_update(grade: Grade) -> None:
    check_losses(train(grade))


# --- 1.4: evaluation ---


def check_evaluations(training: Training, epochs: int, dev: int) -> None:
    """Check that every epoch ends with an evaluation: each dev example once, in eval mode, and recorded metrics."""
    must_step(training)
    must_have_batches(training, training.ranks[0].steps)
    evaluations = training.ranks[0].evaluations
    if len(evaluations) != epochs:
        message = f"expected {epochs} evaluations, one after every epoch, got {len(evaluations)}"
        raise training.grade.lacking(training.result, message)
    for epoch, evaluation in enumerate(evaluations):
        check_evaluation(training, epoch, evaluation, list(range(training.train, training.train + dev)))


def check_evaluation(training: Training, epoch: int, evaluation: Evaluation, dev: list[int]) -> None:
    """Check one evaluation: when it runs, on which examples, in which mode, and with which metrics."""
    recorded, steps, examples = evaluation.recorded or {}, training.steps_per_epoch * (epoch + 1), evaluation.examples
    what = "the training set" if examples and not set(examples) & set(dev) else f"{len(examples)} examples"
    got = {
        "steps": evaluation.steps_before, "examples": sorted(examples), "mode": evaluation.in_train_mode,
        "recorded": evaluation.recorded is not None, "epoch": recorded.get("epoch"),
        "types": [name for name in recorded.get("types", []) if name],
    }  # fmt: skip
    expected = {
        "steps": Expected(steps, "runs after {got} steps, expected after {expected}, the end of the epoch"),
        "examples": Expected(dev, f"sees {what}, expected the {len(dev)} examples of the dev set, each once"),
        "mode": Expected(False, "runs in train mode, with dropout: call model.eval() before"),
        "recorded": Expected(True, "was not passed to record.evaluation"),
        "types": Expected([], "passes a {got} to record.evaluation, expected the epoch number and plain numbers"),
        "epoch": Expected(
            epoch, "is recorded for epoch {got}, expected {expected}: pass epoch as the loop counts it, from 0"
        ),
    }
    when = f"evaluation {epoch + 1}"
    check(training.grade, f"{when} ", got, expected)
    logits = reference.logits(training.parameters(0, steps), training.ids[0][dev])
    right, metrics = metrics_of(logits, training.labels[0][dev]), recorded["metrics"]
    if set(metrics) != set(right) or any(not abs(metrics[name] - value) <= SAME for name, value in right.items()):
        words = " and ".join(f"{name} {value:.4f}" for name, value in right.items())
        given = " and ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        training.grade.fail(observed=f"{when} of {training.task.upper()}: expected the metrics {words}, got {given}")


def metrics_of(logits: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Return GLUE's metrics of a task, by their short names; a regression has scores (B, 1)."""
    if logits.shape[1] > 1:
        return {"acc": float((logits.argmax(axis=1) == labels).mean())}
    scores = logits[:, 0]
    ranks = [np.argsort(np.argsort(values)) for values in (scores, labels)]  # drawn scores: no two are equal
    pearson, spearman = (float(np.corrcoef(*pair)[0, 1]) for pair in ((scores, labels), ranks))
    return {"pearson": pearson, "spearmanr": spearman, "corr": (pearson + spearman) / 2}


@graded("1.4", weight=2)
def test_the_dev_set_is_evaluated_after_every_epoch(grade: Grade) -> None:
    check_evaluations(train(grade, do_eval=True), 2, 4)
    # The tiny learning rate keeps the answers as they were. There are batches of 3, 3 and 2. If all answers are right,
    # every wrong count is lower; if the first one is wrong, neither the last batch nor the mean of the batches has 7/8.
    for right in (8, 7):
        check_evaluations(train(grade, dev=8, right=right, learning_rate=1e-9, do_eval=True), 2, 8)
    for task in ("mnli", "sts-b"):  # three labels, and a score
        check_evaluations(train(grade, dev=8, task=task, do_eval=True), 2, 8)


@graded("1.4", absence=True)
def test_training_continues_in_train_mode(grade: Grade) -> None:
    training = train(grade, num_train_epochs=3, do_eval=True)
    must_step(training)
    loop.check_noise(training)
    for number, step in enumerate(training.ranks[0].steps, 1):
        if not all(batch.in_train_mode for batch in step.batches):
            after = " (evaluate() leaves the model in eval mode)" if number > 1 else ""
            grade.fail(f"step {number} trains in eval mode, without dropout: call model.train(){after}")
