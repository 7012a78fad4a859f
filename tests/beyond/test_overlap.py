"""The gradient reducer: b.4 the hook that sends buckets during backward, b.5 finish and no_sync.

The tests of b.4 judge messages alone: their content, their order, and when they are sent. Those of b.5 judge gradients
after finish(): each must be the mean. It does not matter whether send or finish divides.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from grader.arithmetic import norm, same_numbers
from grader.call_checks import Payloads, must_be_own_calls
from grader.compare import Expected, check
from grader.grading import Grade
from grader.in_rank import in_rank, run
from grader.ranks.calls import Call
from grader.wire.values import Fields
from tests.beyond import toy_shared as shared
from tests.beyond.toy_shared import MicroBatch, ToySetting
from tests.gradients import test_averaging as averaging

if TYPE_CHECKING:  # what a function finds in a rank
    from grader.inside.tools import Context, copy_of, dist, dtype_of
    from tests.beyond.toy_in_rank import Toy, note_reached, run_backward

graded = pytest.mark.graded
CRASHES = shared.CRASHES
IN_RANK = "tests/beyond/toy_in_rank.py"
HELD = 3  # what messages hold first; no gradient is drawn so
HINTS = {  # words of the reducer, of torch and of the graders -> what they mean here
    "a second backward before finish()": "gradient_ready was called twice for a parameter in one step: is it "
    "registered once, and does it return at once while self.sync is False?",
    "got (NoneType": "parameter.grad is None: a parameter without a gradient counts as zeros",
    "'NoneType' object has no attribute 'wait'": "bucket.work is None: the bucket was never sent (is next_bucket 0 "
    "again in each step?), or its all_reduce was not called with async_op=True",
    "changed while it was being sent": "a message must be complete when its all_reduce starts: divide before that, or "
    "after wait(). A hook of register_hook runs too early: backward adds to parameter.grad only after it",
    "the ranks do not agree": f"the ranks do not send the same buckets: {shared.ONCE}",
}
OF_FINISH = {
    "a second backward before finish()": "gradient_ready was called twice for a parameter in one step: does finish "
    "reset `missing` in every step, also if nothing was left to send, and does no_sync set self.sync to False?"
}
REPLACED = (
    "bucket.flat was replaced by another tensor, but the pieces are views of the old one: copy the gradients into the "
    "pieces, which fills bucket.flat"
)


@dataclass(frozen=True, kw_only=True)
class OverlapSetting(ToySetting):
    """A toy, and the buckets that must be sent in each step (empty: not checked).

    late: for each step, the rank that begins its last backward when all others have ended, or None.
    interrupted: steps in which an exception ends every no_sync.
    """

    bucket_bytes: int
    buckets: list[list[list[int]]] = field(default_factory=list)
    late: list[int | None] = field(default_factory=list)
    interrupted: list[int] = field(default_factory=list)


# The gradients become ready as 5 4, 3 2 1, 0; in the first step buckets go by the reversed order of registration.
PLAIN = OverlapSetting(
    shapes=[[3, 4], [4], [2, 3, 2], [1], [4, 3], [5]],  # 48, 16, 48, 4, 48 and 20 bytes: two buckets are exactly full
    uses=[[[[0, 1, 2, 3, 4, 5]]]],
    bucket_bytes=68,
    buckets=[[[5, 4], [3, 2, 1], [0]]],
)
LATE = replace(PLAIN, late=[2])
SPECIAL = replace(PLAIN, zero=[1, 2, 3], infinite=[4])  # on the last rank, all of one bucket is zero
# On ranks above 0 bucket 1 is complete first, and must wait for bucket 0. All buckets have the same size, so that torch
# reports no mismatch if they are mixed up.
CROSSED = replace(
    PLAIN,
    shapes=[[4]] * 6,
    uses=[[[[0, 1, 2, 3, 4, 5], [4, 5, 0, 1, 2, 3]]]],
    bucket_bytes=32,
    buckets=[[[5, 4], [3, 2], [1, 0]]],
)
TIED = OverlapSetting(  # 0 is used first and last, so it is complete at the end; 2 is frozen
    shapes=[[4, 3], [4], [5], [2, 3]],
    uses=[[[[0, 1, 2, 3, 0]]]],
    bucket_bytes=40,
    buckets=[[[3, 1], [0]]],
    frozen=[2],
    tied=0,
)
MIXED = OverlapSetting(  # 2.6 MB, more than a bucket holds, beside small ones of three dtypes
    shapes=[[3], [640, 1024], [4], [2, 3], [16, 33]],
    uses=[[[[0, 1, 2, 3, 4]]]],
    bucket_bytes=10_000,
    buckets=[[[4], [3, 2], [1], [0]]],
    dtypes=["float32", "float32", "float64", "float64", "bfloat16"],
)
TWICE = replace(PLAIN, uses=[[[[0, 1, 2, 3, 4, 5]], [[5, 3, 1, 0, 2, 4]]]])  # two micro-batches, the first without sync
ALONE = replace(PLAIN, bucket_bytes=10_000, buckets=[[[5, 4, 3, 2, 1, 0]]])
# 0 is tied, 3 frozen, 5 unused; 4 is used by rank 0 alone, and in the third step by the others alone.
ODD = OverlapSetting(
    shapes=[[4, 3], [4], [2, 2], [5], [3, 5], [6], [7]],
    uses=[
        [[[0, 1, 2, 3, 4, 6, 0], [0, 1, 2, 3, 6, 0]]],
        [[[0, 2, 1, 6, 4, 0], [0, 1, 6, 2, 0]]],
        [[[6, 1, 0], [2, 4, 1, 0]]],
        [[[0, 2, 1, 6, 4, 0], [0, 1, 6, 2, 0]]],
    ],
    bucket_bytes=70,
    buckets=[[[6], [5], [4], [2, 1], [0]]],
    dtypes=["float32"] * 6 + ["float64"],
    frozen=[3],
    tied=0,
)
ACCUMULATED = OverlapSetting(  # in the second step, no_sync ends with an exception, which must not keep it from sending
    shapes=[[3, 4], [4], [6], [2, 3]],
    uses=[[[[0, 1, 2, 3]], [[0, 1, 2, 3]]], [[[0, 1, 2, 3]], [[0, 2, 1, 3]], [[0, 1, 2, 3]]]],
    bucket_bytes=50,
    buckets=[[[3, 2], [1], [0]]] * 2,
    interrupted=[1],
)
# In the first step gradients become ready as 1 3 2 4 on rank 0, and in another order on other ranks; 0 is not used.
LATER_STEPS = OverlapSetting(
    shapes=[[4]] * 5,
    uses=[[[[4, 2, 3, 1], [1, 2, 3, 4]]], *[[[[4, 2, 3, 1], [4, 2, 1, 3]]]] * 2],
    bucket_bytes=32,
    buckets=[[[4, 3], [2, 1], [0]], *[[[1, 3], [2, 4], [0]]] * 2],
    late=[None, 1, 2],
)


# --- what a rank does ---


@in_rank(uses=[IN_RANK])
def reduce_gradients(context: Context, lesson: ModuleType, inputs: Fields) -> object:
    """Yield the gradients at the end of each step. Without `finish`, messages are in transit until then.

    With `rest`, all buckets hold other numbers first, and those that backward has not completed are sent, too.
    """
    arguments = context.arguments
    toy = Toy(arguments, note_reached(context))
    reducer = lesson.GradientReducer(toy, arguments["bucket_bytes"])
    for bucket in reducer.buckets if arguments["rest"] else ():
        bucket.flat.fill_(arguments["held"])
    for step, micros in enumerate(inputs["uses"]):
        flats = [(bucket, getattr(bucket, "flat", None)) for bucket in getattr(reducer, "buckets", ())]
        for number in range(len(micros) - 1):
            if not arguments["finish"]:
                reducer.sync = False
                run_backward(context, toy, inputs, step, number)
                reducer.sync = True
                continue
            try:
                with reducer.no_sync():
                    run_backward(context, toy, inputs, step, number)
                    if step in arguments["interrupted"]:
                        raise KeyboardInterrupt
            except KeyboardInterrupt:
                pass
        run_backward(context, toy, inputs, step, len(micros) - 1, arguments["late"][step])
        if arguments["finish"]:
            reducer.finish()
        else:
            for bucket in reducer.buckets[reducer.next_bucket :] if arguments["rest"] else ():
                reducer.send(bucket)
            dist.barrier()  # so that all messages arrive
        left: Fields = {f"parameter {k}": copy_of(parameter.grad) for k, parameter in enumerate(toy.numbered)}
        left |= {f"dtype {k}": dtype_of(parameter.grad) for k, parameter in enumerate(toy.numbered)}
        left["replaced"] = any(getattr(bucket, "flat", None) is not flat for bucket, flat in flats)
        yield left | {"moved": [k for k, p in enumerate(toy.numbered) if not bool((p == 1).all())]}
        for parameter in toy.numbered:
            parameter.grad = None


# --- what is right ---


class Reduced:
    """One run of a setting. own: the gradients that each rank has at the end of a step, [rank][step][parameter]."""

    def __init__(
        self, grade: Grade, ranks: int, setting: OverlapSetting, finish: bool = True, rest: bool = False
    ) -> None:  # fmt: skip
        self.grade, self.ranks, self.setting = grade, ranks, setting
        drawn = shared.draw(grade.seed, ranks, setting)
        self.computed = drawn.computed
        self.own = [[[sum(each) for each in zip(*step, strict=True)] for step in steps] for steps in drawn.computed]
        arguments = setting.arguments | {"bucket_bytes": setting.bucket_bytes, "finish": finish}
        arguments |= {"rest": rest, "held": HELD}
        arguments |= {"late": setting.late or [None] * len(setting.uses), "interrupted": setting.interrupted}
        why_stuck = partial(shared.why_hooks_are_stuck, where_to_wait="wait in finish()")
        hints = HINTS | (OF_FINISH if finish else {})
        self.result = run(grade, reduce_gradients, drawn.inputs, hints, why_stuck, **arguments)
        must_be_own_calls(grade, self.result, "send each bucket with dist.all_reduce")

    def micros(self, rank: int, step: int) -> list[MicroBatch]:
        micros = shared.micro_batches(self.grade, self.result, self.setting, rank)
        for micro in micros:  # finish() may use other collectives to agree on the order
            micro.sends = [send for send in micro.sends if send.call.name == "all_reduce"]
        return [micro for micro in micros if micro.step == step]

    # --- messages ---

    def check_messages(self, times: bool = False) -> None:
        """Check that only the last micro-batch of a step sends, every bucket once, in the order of the buckets.

        times: check also that each is sent as soon as it is complete and those before it have been sent.
        """
        for step, rank in itertools.product(range(len(self.setting.buckets)), range(self.ranks)):
            where, buckets = f"step {step}: rank {rank}", self.setting.buckets[step]
            *before, last = self.micros(rank, step)
            for micro in (micro for micro in before if micro.sends):
                self.grade.fail(
                    f"{where} sends {len(micro.sends)} messages in micro-batch {micro.number}, under no_sync "
                    f"({micro.sends[0].call.where}): only the last micro-batch sends, and its messages hold the sum "
                    "over all of them"
                )
            self._check_buckets(step, rank, where, [send.call for send in last.sends])
            advice = "Each parameter's hook must send every complete bucket, in a loop"
            if step:  # the first step was right
                advice = "Does finish() reset `missing` of each bucket to the parameters of this bucket?"
            if before:
                advice = "Does no_sync set sync back to True at its end, also after an exception?"
            if times:
                shared.check_times(self.grade, where, last, buckets, enumerate(last.sends), advice)

    def _check_buckets(self, step: int, rank: int, where: str, calls: list[Call]) -> None:
        """Check that each message is one bucket with the right bytes, and that the buckets are in order."""
        buckets, sent = self.setting.buckets[step], list[int]()
        for number, call in enumerate(calls):
            content = self._content(call, step, rank, number)
            if isinstance(content, str):
                self.grade.fail(observed=f"{where} sends {content} (message {number}, {call.where})")
            sent.append(content)
            dtype = self.setting.dtype(buckets[content][0])
            size = shared.BYTES[dtype] * sum(self.own[rank][step][k].size for k in buckets[content])
            if call.sent != size:
                got = f"{call.sent} bytes of {call.dtype} ({call.where})"
                words = "a message has the parameters' dtype, and nothing beside their gradients"
                self.grade.fail(f"{where} sends bucket {content} as {got}, expected {size} bytes of {dtype}: {words}")
        shared.check_order(self.grade, where, sent, len(buckets), calls[0].where if calls else "")

    def _content(self, call: Call, step: int, rank: int, number: int) -> int | str:
        """Return the bucket whose gradients are in a message, times any factor; else say what is in it.

        Zeros may fit several: first the one with the message's number.
        """
        message, own, buckets = [call.sent_arrays()], self.own[rank][step], self.setting.buckets[step]
        for i in sorted(range(len(buckets)), key=lambda i: i != number):
            rounding = shared.ROUNDING[self.setting.dtype(buckets[i][0])]
            if same_numbers(message, [own[k] for k in buckets[i]], rounding):
                return i
        emptied = [np.where(message[0] == HELD, 0, message[0])]
        if any(same_numbers(emptied, [own[k] for k in bucket]) for bucket in buckets):
            return "what the message held before: a parameter without a gradient counts as zeros, so write zeros there"
        last = self.computed[rank][step][-1]
        if any(same_numbers(message, [last[k] for k in bucket]) for bucket in buckets):
            return "only the gradients of the last micro-batch: those accumulated under no_sync are lost"
        return "other numbers than its own gradients of one bucket: send one message for each bucket, its `flat`"

    def check_finish(self) -> None:
        """Check that finish() sends all remaining buckets before it waits for one."""
        for step, rank in itertools.product(range(len(self.setting.uses)), range(self.ranks)):
            calls = [send.call for send in self.micros(rank, step)[-1].sends]
            advice = "send all remaining buckets, then wait"
            shared.check_together(self.grade, f"step {step}: rank {rank}", calls, advice)

    # --- gradients ---

    def check_means(self) -> None:
        """Check that after each finish() every gradient is the mean of all ranks, and the parameter is unchanged."""
        payloads = Payloads(self.result)
        for step in range(len(self.setting.uses)):
            left = [steps[step] for steps in self.result.values]
            got = {(rank, name): one for rank, own in enumerate(left) for name, one in own.items()}
            expected: dict[tuple[int, str], Expected] = {}
            for rank in range(self.ranks):
                expected[rank, "moved"] = Expected([], "parameter {got} itself changed: only its gradient may")
                for k in range(len(self.setting.shapes)):
                    expected |= self._after_step(step, rank, k, payloads, any(own["replaced"] for own in left))
            where = f"step {step}: expected the mean of {self.ranks} ranks' gradients; on rank {{rank}}, "
            if not all(one.is_right(got.get(key)) for key, one in expected.items()):
                self.check_messages()  # a wrong message explains a wrong mean
            check(self.grade, where, got, expected, self.result)

    def _after_step(
        self, step: int, rank: int, k: int, payloads: Payloads, replaced: bool
    ) -> dict[tuple[int, str], Expected]:
        """Return the gradient, and its dtype, that a parameter of a rank must have at the end of a step."""
        if k in self.setting.frozen:
            message = f"parameter {k} requires no gradient, but has one"
            return {(rank, f"parameter {k}"): Expected(None, message)}
        by_rank, dtype = [steps[step][k] for steps in self.own], self.setting.dtype(k)
        # A bfloat16 has 8 bits: room for the rounding of each gradient, and of the mean.
        limit = 2.0**-6 * np.mean(np.abs(by_rank), axis=0) if dtype == "bfloat16" else None
        one = averaging.mean_of(by_rank, rank, payloads, norm(by_rank), limit)
        # The first mistake that fits is named: the reducer's own come first.
        parts = (0.0, 1.0, 1 / self.ranks) if replaced else ()
        old = {f"{REPLACED} (param.grad is {part:.3g} times this rank's own)": part * by_rank[rank] for part in parts}
        one = replace(one, mistakes=old | self._mistakes(step, k) | dict(one.mistakes))
        of_dtype = Expected(dtype, name=f"the dtype of parameter {k}'s gradient")
        return {(rank, f"parameter {k}"): one, (rank, f"dtype {k}"): of_dtype}

    def _mistakes(self, step: int, k: int) -> Fields:
        """Return sentence -> the gradient that a mistake in the reducer leaves."""

        def mean(by_rank: list[list[list[Any]]], at: int) -> np.ndarray:
            return np.asarray(np.mean([steps[at][k] for steps in by_rank], axis=0))

        last = [[micros[-1] for micros in steps] for steps in self.computed]
        some_rank_has_none = any(not np.any(self.own[rank][step][k]) for rank in range(self.ranks))
        never = np.full(self.setting.shapes[k], np.inf)  # fits no gradient: all parameters need the same sentences
        mistakes: Fields = {
            "a parameter that had no gradient on this rank has none afterwards: set it to the mean, in which this "
            "rank counts as zeros":
                None if some_rank_has_none else never,
            "param.grad is the mean of only the last micro-batch: those under no_sync are missing": mean(last, step),
        }  # fmt: skip
        if step:
            piece = mean(self.own, step - 1)
            sent = [own if np.any(own) else piece for own in (steps[step][k] for steps in self.own)]
            stale = "a worker without a gradient sends what the message held after the step before: write zeros there"
            mistakes[stale] = np.asarray(np.mean(sent, axis=0))
        for earlier in range(step):
            mistakes[f"param.grad is still the gradient of step {earlier}"] = mean(self.own, earlier)
            added = mean(self.own, earlier) + mean(self.own, step)
            mistakes[f"the gradient of step {earlier} is added to param.grad"] = added
        return mistakes


# --- the graded tests ---


@graded("b.4")
def test_backward_sends_every_bucket_with_this_rank_s_gradients(grade: Grade) -> None:
    for ranks, setting in ((3, PLAIN), (4, TIED), (2, MIXED), (2, TWICE), (1, ALONE), (3, SPECIAL)):
        Reduced(grade, ranks, setting, finish=False).check_messages()
    first_step = replace(ODD, uses=ODD.uses[:1])
    Reduced(grade, 3, first_step, finish=False, rest=True).check_messages()


@graded("b.4")
def test_a_bucket_leaves_as_soon_as_it_is_complete_and_no_hook_waits(grade: Grade) -> None:
    for setting in (PLAIN, LATE):
        Reduced(grade, 3, setting, finish=False).check_messages(times=True)


@graded("b.4")
def test_all_ranks_send_the_same_buckets_in_the_same_order(grade: Grade) -> None:
    Reduced(grade, 3, CROSSED, finish=False).check_messages(times=True)


@graded("b.5")
def test_after_finish_every_gradient_is_the_mean_in_every_step(grade: Grade) -> None:
    for ranks, setting in ((3, PLAIN), (3, ODD), (2, ODD), (4, ODD), (1, ODD), (2, MIXED), (3, SPECIAL)):
        reduced = Reduced(grade, ranks, setting)
        reduced.check_means()
        reduced.check_finish()


@graded("b.5")
def test_micro_batches_under_no_sync_send_nothing_and_add_up(grade: Grade) -> None:
    reduced = Reduced(grade, 2, ACCUMULATED)
    reduced.check_messages(times=True)
    reduced.check_means()


@graded("b.5")
def test_from_the_second_step_on_buckets_leave_in_the_order_in_which_gradients_become_ready(grade: Grade) -> None:
    reduced = Reduced(grade, 3, LATER_STEPS)
    reduced.check_messages(times=True)
    reduced.check_means()
