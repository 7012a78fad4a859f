"""1F1B, b.13: the order in which each stage of a pipeline works.

The tests judge schedules by the rules of the lesson's steps, and two steps on real ranks: the values that they compute,
and when they exchange which messages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

import pytest

from grader.call_checks import phases
from grader.compare import check
from grader.grading import Grade
from grader.in_rank import in_rank, run
from grader.ranks.calls import Call
from grader.ranks.outcome import Result
from grader.ranks.phrases import short
from grader.wire import drawn
from grader.wire.values import Fields
from tests.beyond.stages_shared import IN_RANK, MODELS, Model, StagePart, number

if TYPE_CHECKING:  # what a function finds in a rank
    from grader.inside.tools import Context, copy_of, dist
    from tests.beyond.stages_in_rank import gradients, small_gpt2

graded = pytest.mark.graded
SIZES = [(m, n) for m in range(1, 7) for n in range(1, 6)] + [(16, 4), (3, 9), (9, 9), (32, 2), (12, 1)]
KINDS = ("forward", "backward")
IN_TURN = "after the warm-up, one forward and one backward in turn, until all forwards are done"
Actions = Sequence[tuple[str, int]]  # (kind, micro-batch)
# (micro-batches, actions of each stage) -> what is broken, "" if nothing is
Rule = Callable[[int, Sequence[Actions]], str]


# --- what a rank does ---


def plain(actions: object, most: int) -> list[list[object]] | str:
    """Return (kind, micro-batch) of each action; a text if this is no list of actions."""
    if not isinstance(actions, list | tuple):
        return f"a {type(actions).__name__}"
    pairs = []
    for action in actions[:most]:
        kind, number = getattr(action, "kind", None), getattr(action, "micro_batch", None)
        if kind not in ("forward", "backward") or type(number) is not int:
            return f"a list with {str(action)[:80]}"
        pairs.append([kind, number])
    return pairs


@in_rank(uses=[plain], join=False)
def schedules(context: Context, lesson: ModuleType, _inputs: object) -> object:
    """Yield what the function returns for every stage of each size, in two calls, the second one by keyword."""
    for m, n in context.arguments["sizes"]:
        calls = [
            (lesson.one_f_one_b(m, n, i), lesson.one_f_one_b(micro_batches=m, stages=n, stage=i)) for i in range(n)
        ]
        yield [[plain(actions, 2 * m + 50) for actions in pair] for pair in calls]


@in_rank(uses=[IN_RANK], preload=MODELS)
def steps_of_a_pipeline(context: Context, lesson: ModuleType, inputs: Fields) -> object:
    """Yield loss and gradients of each step, and the largest number of micro-batches that were alive at once."""
    from beyond.stage_runner import Stage, StageRunner

    a = context.arguments
    model = small_gpt2(a["sizes"], inputs["weights"])
    assert dist.group.WORLD is not None
    runner = StageRunner(Stage(model, context.rank, context.world_size), dist.group.WORLD)
    actions = lesson.one_f_one_b(a["micro_batches"], context.world_size, context.rank)
    for tokens in inputs["tokens"]:
        model.zero_grad()
        runner.most_alive = 0
        context.event("run")
        loss = runner.run(actions, tokens.chunk(a["micro_batches"]))
        context.event("finish")
        runner.finish()
        yield gradients(model) | {"the loss": copy_of(loss), "most_alive": int(runner.most_alive)}


# --- the rules: each says what is broken, "" if nothing is ---


def once(m: int, schedule: Sequence[Actions]) -> str:
    """Say whether every stage has one forward and one backward of every micro-batch."""
    expected = [(kind, i) for kind in KINDS for i in range(m)]
    for stage, actions in enumerate(schedule):
        counts = Counter(actions)
        for kind, i in expected:
            if counts[kind, i] != 1:
                return f"stage {stage} has {counts[kind, i] or 'no'} {kind} of micro-batch {i}, expected one"
        for place, (kind, i) in enumerate(actions):
            if (kind, i) not in expected:
                words = f"stage {stage} has a {kind} of micro-batch {i}; there are {m}, numbered from 0"
                if ("backward", 0) in actions[place:]:  # the warm-up is not over
                    words += ": limit the warm-up to the micro-batches that there are"
                return words
    return ""


def in_order(_m: int, schedule: Sequence[Actions]) -> str:
    """Say whether micro-batches are in order, and no backward comes before its forward."""
    for stage, actions in enumerate(schedule):
        for kind in KINDS:
            for i, following in pairwise(j for one, j in actions if one == kind):
                if following < i:
                    return f"stage {stage} takes the {kind} of micro-batch {i} before that of micro-batch {following}"
        for kind, i in actions:
            if kind == "backward" and actions.index((kind, i)) < actions.index(("forward", i)):
                return f"stage {stage} has the backward of micro-batch {i} before its forward"
    return ""


def few_alive(m: int, schedule: Sequence[Actions]) -> str:
    """Say whether the last stage keeps at most one micro-batch alive, and each stage before it one more."""
    limit = len(schedule)
    for stage, actions in enumerate(schedule):
        alive = most_alive([kind for kind, _ in actions])
        if alive > limit - stage:
            words = f"stage {stage} keeps {alive} micro-batches alive, expected at most {limit - stage}"
            forwards = [kind for kind, _ in actions].index("backward")
            if forwards > limit - stage:
                words += f": {forwards} forwards come before its first backward, expected {limit - stage}"
                causes = ["all of them, as in GPipe"] if forwards == m else []
                causes += ["the warm-up is one forward too long"] if forwards == limit - stage + 1 else []
                return words + (f" ({', or '.join(causes)})" if causes else "")
            return words
    return ""


def most_alive(kinds: Sequence[str]) -> int:
    return max(accumulate((1 if kind == "forward" else -1 for kind in kinds), initial=0))


def warm_up(m: int, schedule: Sequence[Actions]) -> str:
    """Say whether the last stage makes one forward before its first backward, and each stage before it one more."""
    before = [[kind for kind, _ in actions].index("backward") for actions in schedule]
    right, reason = 1, "the last stage starts its first backward right after its first forward"
    for stage in reversed(range(len(schedule))):
        if before[stage] != right:
            return f"stage {stage} runs {before[stage]} forwards before its first backward, expected {right}: {reason}"
        right, reason = min(m, right + 1), f"one more than stage {stage}, and never more than {m}"
    return ""


def alternating(_m: int, schedule: Sequence[Actions]) -> str:
    """Say whether forwards and backwards take turns, from the first backward to the last forward."""
    for stage, actions in enumerate(schedule):
        kinds = [kind for kind, _ in actions]
        begin, end = kinds.index("backward"), len(kinds) - kinds[::-1].index("forward")
        for place, (one, other) in enumerate(pairwise(kinds[begin:end]), begin):
            if one == other:
                return f"stage {stage} has two {one}s in a row, its actions {place} and {place + 1}: {IN_TURN}"
    return ""


def check_rules(grade: Grade, *rules: Rule) -> None:
    """Check the rules for all sizes. Show the smallest size that breaks the first broken rule."""
    sizes = SIZES + drawn.generator(grade.seed, 50).integers(7, 12, (3, 2)).tolist()
    (values,) = run(grade, schedules, [None], sizes=sizes).values
    by_size: dict[tuple[int, int], list[Actions]] = {}
    for (m, n), calls in zip(sizes, values, strict=True):
        for stage, (first, second) in enumerate(calls):
            call = f"one_f_one_b({m}, {n}, {stage})"
            if isinstance(first, str):
                grade.fail(
                    observed=f'{call}: expected a list of Action("forward" or "backward", i), got {short(first)}'
                )
            if first != second:
                grade.fail(f"{call}: a second call gives a different list: begin every call with an empty one")
        by_size[m, n] = [[(kind, i) for kind, i in first] for first, _ in calls]
    reversed_stages = {size: schedule[::-1] for size, schedule in by_size.items()}
    for rule in rules:
        broken = {size: words for size, schedule in by_size.items() if (words := rule(size[0], schedule))}
        if broken:
            m, n = size = min(broken, key=sum)
            is_reversed = not any(one(size[0], schedule) for size, schedule in reversed_stages.items() for one in rules)
            cause = "the stages are in reverse order, stage 0 is the first one: " if is_reversed else ""
            lines = [
                f"  stage {i}: {' '.join(f'{kind[0].upper()}{j}' for kind, j in actions)}"
                for i, actions in enumerate(by_size[size])
            ]
            grade.fail(f"micro_batches={m}, stages={n}: {cause}{broken[size]}\n" + "\n".join(lines) + "\n")


# --- a pipeline of real ranks ---


class ScheduleSetting(NamedTuple):
    """A pipeline: its stages, micro-batches in a batch, and examples in a micro-batch."""

    stages: int
    micro_batches: int
    examples: int = 2


SETTINGS = (
    ScheduleSetting(4, 6, 1),
    ScheduleSetting(4, 3, 1),
    ScheduleSetting(3, 3),
    ScheduleSetting(1, 3),
    ScheduleSetting(2, 1),
)


def check_pipeline(grade: Grade, setting: ScheduleSetting) -> None:
    """Check two steps on real ranks: the values of one worker, and no more micro-batches alive than the lesson says."""
    n, m, _ = setting
    model = Model(grade, max(n, 2), m * setting.examples, limits=[1e9, 1e9])
    parts = [StagePart(stage, n) for stage in range(n)]
    inputs = [model.inputs(part, stage) for stage, part in enumerate(parts)]
    where = f"micro_batches={m}, stages={n}"
    result = run(grade, steps_of_a_pipeline, inputs, where=f"{where}: ", micro_batches=m, **model.arguments)
    for stage, steps in enumerate(result.values):
        for step, (got, right) in enumerate(zip(steps, model.right["steps"], strict=True)):
            at = f"{where}, step {step}, stage {stage}"
            check_alive(grade, f"{at}, as the runner counts: ", got["most_alive"], setting, stage)
            check_messages(grade, f"{at}, as its messages show: ", result, setting, stage, step)
            expected = number("the loss", right["loss"] if stage == n - 1 else 0.0)
            expected |= model.expected(parts[stage], right["gradients"])
            check(grade, f"{at}, compared with one worker: ", got, expected, result)


def check_alive(grade: Grade, where: str, alive: int, setting: ScheduleSetting, stage: int) -> None:
    limit = min(setting.stages - stage, setting.micro_batches)
    if alive != limit:
        early = ": backward begins too early, so that the next stage has no work"
        late = ": all forwards come before the first backward, as in GPipe"
        cause = early if alive < limit else late if alive == setting.micro_batches else ""
        grade.fail(f"{where}{alive} micro-batches are alive at once, expected {limit}{cause}")


def check_messages(grade: Grade, where: str, result: Result, setting: ScheduleSetting, stage: int, step: int) -> None:
    """Check the same with the broker's calls: a student's code could change the runner's count in its own process."""
    if setting.stages == 1:
        return
    calls = [phase.calls for phase in phases(result, stage) if phase.event.name == "run"][step]
    check_alive(grade, where, most_alive(order_of(calls, stage, setting.stages - 1)), setting, stage)


def order_of(calls: Sequence[Call], stage: int, last: int) -> list[str]:
    """Return the forwards and backwards of a stage, in order.

    Each waits for a message that it needs. A forward of the first stage and a backward of the last one need none: the
    message that they send shows them.
    """
    signs = {("recv", stage - 1): "forward", ("recv", stage + 1): "backward"}
    signs |= {("send", 1): "forward"} if stage == 0 else {}
    signs |= {("send", last - 1): "backward"} if stage == last else {}
    moments = []
    for call in calls:
        if kind := signs.get((call.name, call.root or 0)):
            is_recv = call.name == "recv"
            moment = (call.waited_at if is_recv else call.posted_at) or 0
            moments.append((moment, is_recv, call.posted_at, kind))
    return [kind for *_, kind in sorted(moments)]


# --- the graded tests ---


@graded("b.13")
def test_every_micro_batch_goes_forward_and_backward_once_and_few_are_alive(grade: Grade) -> None:
    grade.imports_only_allowed(grade.file)
    check_rules(grade, once, in_order, few_alive)


@graded("b.13")
def test_backward_begins_as_early_as_it_can_and_no_stage_waits_though_it_has_work(grade: Grade) -> None:
    check_rules(grade, once, in_order, warm_up, alternating)


@graded("b.13")
def test_a_pipeline_in_this_order_computes_what_one_worker_computes(grade: Grade) -> None:
    for setting in (ScheduleSetting(2, int(grade.draw.integers(5, 30))), *SETTINGS):
        check_pipeline(grade, setting)
