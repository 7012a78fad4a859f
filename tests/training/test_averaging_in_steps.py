"""The place of averaging in a step: after backward and before clipping, in 2a.3, 2b.1 and 2b.8.

What averaging itself leaves is judged in tests/gradients/test_averaging.py.
"""

from __future__ import annotations

import pytest

from grader.call_checks import must_be_own_calls
from grader.compare import Expected, check
from grader.grading import Grade
from tests.gradients.test_averaging import BY_HAND
from tests.training import loop_shared
from tests.training.loop_shared import CLIP, Training, check_goes_on, glue, gpt2, tolerance
from tests.training.reference import mean
from tests.training.test_loop import check_clipping, check_losses, check_steps

graded = pytest.mark.graded
CRASHES = loop_shared.CRASHES
AVERAGING = ("all_reduce", "reduce", "gather", "all_gather")


def check_sent_once(training: Training, advice: str) -> None:
    """Check that every step passes each gradient once to the collectives that average. `advice` names {calls}."""
    size = sum(4 * training.weights[name].size for name in training.names)
    for rank, trace in enumerate(training.ranks):
        for number, step in enumerate(trace.steps, 1):
            calls = [call for call in step.calls if call.name in AVERAGING]
            if number == 1:  # before its first step DDP compares sizes and settles on buckets
                calls = [call for call in calls if call.dtype == "float32"]
            sent = sum(call.sent for call in calls)
            if not 0.99 * size <= sent <= 1.05 * size:
                own = " and ".join(sorted({f"{call.name} at {call.where}" for call in calls if not call.inside}))
                cause = f": {advice.replace('{calls}', own)}" if own and sent > size else ""
                training.grade.fail(
                    observed=(
                        f"step {number} on rank {rank} passes {sent} bytes to collectives, expected {size} (every "
                        f"gradient once){cause}"
                    )
                )


def check_sent_by_hand(training: Training) -> None:
    must_be_own_calls(training.grade, training.result, BY_HAND)
    check_sent_once(training, "are they averaged more than once, by {calls}?")


def check_kept(training: Training) -> None:
    """Check that --pytest True keeps the first step's averaged gradients, and ends training there."""
    events = [trace.events.get("kept", []) for trace in training.ranks]
    if any(len(kept) != 1 for kept in events):
        message = "--pytest True: expected gradients to be kept once, in the first step"
        raise training.grade.lacking(training.result, message)
    # Training ends within the first step, so what it used is in the step that is not finished.
    own = [training.gradient(rank, 0, trace.unfinished.examples)[1] for rank, trace in enumerate(training.ranks)]
    got: dict[tuple[int, str], object] = {}
    expected: dict[tuple[int, str], Expected] = {}
    for rank, (kept,) in enumerate(events):
        for name, right in mean(own).items():
            mistakes = {"the kept gradients are this worker's own: average in this run, too": own[rank][name]}
            got[rank, name] = kept.data["gradients"].get(name)
            expected[rank, name] = Expected(right, mistakes=mistakes, tolerance=tolerance(mean(own)))
    where = "--pytest True: expected the mean of all workers' gradients; on rank {rank}, "
    check(training.grade, where, got, expected, training.result)
    training.grade.must_return(training.result)


@graded("2a.3", needs=["2a.2"])
def test_task2a_averages_before_it_clips(grade: Grade) -> None:
    plain = glue(grade, 2, train=14, batch=3, num_train_epochs=2)  # the last batch has one example
    check_steps(plain, 6)
    check_clipping(glue(grade, 2, train=12, batch=3, num_train_epochs=2, max_grad_norm=CLIP, learning_rate=0.0), 4)
    check_sent_by_hand(plain)
    check_goes_on(glue(grade, 2, train=12, batch=3, lost=True))


@graded("2b.1", needs=["2a.2"])
def test_task2b_averages_before_it_clips(grade: Grade) -> None:
    check_steps(glue(grade, 3, train=15, batch=2, num_train_epochs=2), 6)  # the last batch has one example
    clipped = glue(grade, 2, train=12, batch=3, num_train_epochs=2, max_grad_norm=CLIP, learning_rate=0.0)
    check_clipping(clipped, 4)
    check_sent_by_hand(clipped)
    check_goes_on(glue(grade, 2, train=12, batch=3, lost=True))


@graded("2b.8", weight=2)
def test_gpt2_averages_in_every_step_before_it_clips(grade: Grade) -> None:
    plain = gpt2(grade, 3, train=5, batch=2, n_epochs=2)  # the last batch is short
    check_steps(plain, 6)
    check_losses(plain)
    clipped = gpt2(grade, 2, train=6, batch=2, n_epochs=2, max_grad_norm=CLIP, learning_rate=0.0)
    check_clipping(clipped, 6)
    check_sent_by_hand(clipped)
    check_clipping(gpt2(grade, 1, train=4, batch=2, n_epochs=1, max_grad_norm=CLIP), 2)
    check_goes_on(gpt2(grade, 2, train=4, batch=2, n_epochs=1, lost=True))
    check_kept(gpt2(grade, 2, train=4, batch=2, n_epochs=1, pytest=True))
