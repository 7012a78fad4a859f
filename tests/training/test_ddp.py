"""DistributedDataParallel, 3.1 for BERT and 3.2 for GPT-2: its backward pass averages, each gradient travels once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
import pytest

from grader.arithmetic import Tolerance, close, flat
from grader.call_checks import Payloads
from grader.compare import Expected, check
from grader.grading import Grade
from grader.in_rank import in_rank, run
from grader.ranks.calls import Call, Event
from grader.ranks.outcome import RankResult, Result
from grader.wire.values import Fields
from tests.gradients import test_averaging as averaging
from tests.training import loop_shared, reference, small_models
from tests.training.loop_shared import CLIP, IN_RANK, PRELOAD, SLACK, Training, glue, gpt2, must_step, tolerance
from tests.training.test_averaging_in_steps import AVERAGING, check_sent_once
from tests.training.test_loop import check_clipping, check_steps

if TYPE_CHECKING:  # what a function finds in a rank
    from grader.inside.tools import Context, copy_of, surroundings, torch
    from tests.training.loop_in_rank import MODELS, by_name

graded = pytest.mark.graded
CRASHES = loop_shared.CRASHES
GLUE, GPT2 = "task3_ddp/run_glue.py", "task3_ddp/run_gpt2.py"
EXAMPLES = 3  # on each rank
HOOKS = "torch.distributed.algorithms.ddp_comm_hooks."


@in_rank(uses=IN_RANK, preload=PRELOAD, first="watch_library")
def wrap(context: Context, lesson: ModuleType, inputs: Fields) -> object:
    """Return what one backward pass through the wrapped model leaves, and what wrap() has changed."""
    from common.workers.process_group import Worker

    ids = inputs["ids"]
    model = MODELS[context.arguments["script"]](inputs["weights"])
    modules = list(model.modules())  # wrapped parts add modules of their own
    before = surroundings(model, modules)
    wrapped = lesson.wrap(model, Worker(context.rank, context.world_size))
    after = surroundings(model, modules)
    torch.autograd.backward(wrapped(input_ids=ids, labels=inputs.get("labels", ids)).loss)
    return {name: copy_of(parameter.grad) for name, parameter in by_name(model.parameters()).items()} | {
        "class": type(wrapped).__name__,
        "changed": [name for name in before if before[name] != after[name]],
    }


SUMMED = (
    "every gradient is the sum of the workers' gradients: did you divide by world_size in your communication hook? "
    "Without such a hook DistributedDataParallel has averaged already, and something sums once more, as an all_reduce "
    "in a hook or after backward does: remove it"
)


# --- wrap(), called alone ---


def draw(grade: Grade, script: str, rank: int, ranks: int) -> tuple[Fields, reference.Arrays]:
    """Return the inputs of a rank, and the gradients that its own examples give."""
    ids, labels = small_models.examples(grade.seed, EXAMPLES, EXAMPLES * rank, rank)
    if script == "glue":
        weights = small_models.classifier(grade.seed, EXAMPLES * ranks)
        inputs = {"weights": weights, "ids": ids, "labels": labels}
        return inputs, reference.classifier(weights, ids, labels)[1]
    weights = small_models.language_model(grade.seed, EXAMPLES * ranks)
    return {"weights": weights, "ids": ids}, reference.language_model(weights, ids)[1]


def cause_of_own_gradients(result: Result, returned: str) -> str:
    """Return why ranks may still have their own gradients. returned: the class of what wrap() returned."""
    calls = [call for rank in result.ranks for call in rank.calls if call.name == "all_reduce"]
    if not calls:
        sent = "no gradient was sent to the other workers"
        if returned != "DistributedDataParallel":
            return f"{sent}: wrap() returns a {returned}, and not the DistributedDataParallel around it"
        return f"{sent}: does the backward pass go through DistributedDataParallel?"
    if all(len(call.members) == 1 for call in calls):
        return "every worker has its own process group, so nothing is averaged"
    return "only part of the model is wrapped in DistributedDataParallel: wrap the whole model"


def untied(inputs: Sequence[Fields], script: str) -> dict[str, reference.Arrays]:
    """Return mistake -> the mean gradients of a GPT-2 whose first and last layer no longer share their matrix."""
    parts = {"embedding": (1, 0), "lm_head": (0, 1)} if script == "gpt2" else {}
    return {
        f"{{name}} has only the gradient of the {layer}: wte and lm_head share one matrix, so do not replace it": (
            reference.mean([reference.language_model(one["weights"], one["ids"], *part)[1] for one in inputs])
        )
        for layer, part in parts.items()
    }


def check_wrapped(grade: Grade, script: str) -> None:
    """Check that one backward pass leaves the mean on every rank, by DDP itself, and that all else is unchanged."""
    for ranks in (3, 2, 4, 1):
        inputs, own = zip(*(draw(grade, script, rank, ranks) for rank in range(ranks)), strict=True)
        result = run(grade, wrap, inputs, script=script)
        got = {(rank, name): one for rank, value in enumerate(result.values) for name, one in value.items()}
        payloads = Payloads(result)
        short = {call.dtype for one in result.ranks for call in one.calls} & {"float16", "bfloat16"}
        rounded = f"gradients travel as {min(short)}, which rounds them: leave out what converts them" if short else ""
        total = max(map(reference.norm, own))  # where the ranks' gradients cancel, their rounding errors do not
        expected: dict[tuple[int, str], Expected] = {}
        for rank in range(ranks):
            for name, right in reference.mean(own).items():
                mistakes: Fields = {
                    "a parameter has no gradient: is it frozen, or not part of the wrapped module?": None
                }
                if ranks > 1:
                    mistakes[SUMMED] = right * ranks
                mistakes["DistributedDataParallel leaves the mean: do not divide it by world_size"] = right / ranks
                mistakes[cause_of_own_gradients(result, got[0, "class"])] = own[rank][name]
                mistakes |= {words: arrays[name] for words, arrays in untied(inputs, script).items()}
                mistakes |= averaging.mean_of([one[name] for one in own], rank, payloads, total).mistakes
                expected[rank, name] = Expected(right, rounded, mistakes=mistakes, tolerance=Tolerance(total, SLACK))
        where = f"after backward on rank {{rank}} of {ranks}, through the {got[0, 'class']} that wrap() returns, "
        check(grade, where, got, expected)
        for one in result.ranks:
            must_be_of_reducer(grade, one, one.calls)
            if changed := one.value["changed"]:
                grade.fail(observed=f"wrap() changes {changed[0]} on rank {one.rank}, but must leave it unchanged")


# --- how DDP sends ---


def must_be_of_reducer(grade: Grade, rank: RankResult, calls: Iterable[Event]) -> None:
    """Fail unless DDP itself averages in these calls: flat buckets, sent by autograd, not by a student or a library.

    DDP's reducer may pass the buckets to a hook, which looks like a hook on a parameter. Then the broadcast of the
    weights, which DDP makes when it is built, shows that there is a reducer.
    """
    averages = [call for call in calls if isinstance(call, Call) and call.name in AVERAGING and call.dtype == "float32"]
    own = [call for call in rank.calls if call.name == "broadcast" and call.inside == "DistributedDataParallel"]
    has_reducer = sum(call.received for call in own) >= sum(call.sent for call in averages)
    for call in averages:
        hooked = has_reducer and (not call.inside or call.inside.startswith(HOOKS))
        if call.inside != "backward" and not hooked:
            by = f"inside {call.inside}" if call.inside else "by your own line"
            grade.fail(f"{call.name} ({call.where}) is called {by}: let DistributedDataParallel average the gradients")
        if len(call.shape) != 1:
            grade.fail(
                observed=f"a tensor of shape {call.shape} is averaged: DistributedDataParallel sends flat buckets"
            )


def must_be_run_by_reducer(grade: Grade, result: Result) -> None:
    """Apply must_be_of_reducer to every call of a whole script."""
    for rank in result.ranks:
        for call in rank.calls:
            must_be_of_reducer(grade, rank, [call])


def check_own_gradients_sent(training: Training) -> None:
    """Check that each rank passes its own gradients to the collectives that average, in any order, times one factor."""
    for number in training.common_steps:
        for rank, gradients in training.step_gradients(number).items():
            calls = [call for call in training.ranks[rank].steps[number].calls if call.name in AVERAGING]
            got = flat([call.sent_arrays() for call in calls if call.dtype == "float32"])
            right = flat(list(gradients.own[rank].values()))
            right = np.concatenate([right, np.zeros(max(0, len(got) - len(right)))])  # a buffer may be filled up
            got = got * (np.linalg.norm(right) / max(float(np.linalg.norm(got)), 1e-30))
            if not close(np.sort(got), np.sort(right), tolerance(gradients.own[rank])):
                names = " and ".join(sorted({call.name for call in calls}))
                training.grade.fail(
                    observed=f"what rank {rank} passes to {names} in step {number + 1} is not its own gradients"
                )


def check_traffic(training: Training) -> None:
    """Check that the weights are broadcast once, and every gradient is sent once a step, by the backward pass."""
    must_step(training)
    training.grade.must_return(training.result)
    size = sum(4 * training.weights[name].size for name in training.names)
    for trace in training.ranks:
        for number, step in enumerate(trace.steps[1:], 2):
            again = [call for call in step.calls if call.name == "broadcast" and call.dtype == "float32"]
            if sum(call.received for call in again) >= size:
                training.grade.fail(
                    f"the weights are broadcast again in step {number} ({again[0].where}): wrap the model once, before "
                    "the first epoch"
                )
    check_sent_once(training, "DDP has already averaged; remove {calls}")
    check_own_gradients_sent(training)
    check_reducer(training)


def check_reducer(training: Training) -> None:
    for trace, rank in zip(training.ranks, training.result.ranks, strict=True):
        for step in trace.steps:
            must_be_of_reducer(training.grade, rank, step.calls)


# --- the graded tests ---


def train_glue(grade: Grade) -> Training:
    return glue(grade, 2, train=12, batch=3, num_train_epochs=2, max_grad_norm=CLIP, learning_rate=0.0)


def train_gpt2(grade: Grade) -> Training:
    return gpt2(grade, 2, train=6, batch=2, n_epochs=2, max_grad_norm=CLIP, learning_rate=0.0)


@graded("3.1")
def test_the_wrapped_model_averages_in_its_backward_pass(grade: Grade) -> None:
    check_wrapped(grade, "glue")


@graded("3.1")
def test_task3_trains_through_the_wrapped_model(grade: Grade) -> None:
    check_steps(glue(grade, 3, train=15, batch=2, num_train_epochs=2), 6)  # the last batch has one example
    check_clipping(train_glue(grade), 4)
    check_reducer(train_glue(grade))
    loop_shared.check_goes_on(glue(grade, 2, train=12, batch=3, lost=True))


@graded("3.1")
def test_every_gradient_travels_once(grade: Grade) -> None:
    check_traffic(train_glue(grade))


@graded("3.2")
def test_the_wrapped_gpt2_averages_in_its_backward_pass(grade: Grade) -> None:
    check_wrapped(grade, "gpt2")


@graded("3.2", needs=["1.3"])
def test_gpt2_trains_through_the_wrapped_model(grade: Grade) -> None:
    check_steps(gpt2(grade, 3, train=5, batch=2, n_epochs=1), 3)
    check_clipping(train_gpt2(grade), 6)
    check_traffic(train_gpt2(grade))
    loop_shared.check_goes_on(gpt2(grade, 2, train=4, batch=2, n_epochs=1, lost=True))


@graded("3.2", absence=True)
def test_task3_imports_only_what_the_course_allows(grade: Grade) -> None:
    grade.imports_only_allowed(GLUE, GPT2)
