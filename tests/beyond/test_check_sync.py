"""Write the check, b.18: it looks at 24 wrong and 8 right averaging steps; points by the wrong ones that it finds.

A check that complains about a right step gets nothing: nobody would look at what it says.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from grader.arithmetic import difference
from grader.grading import Grade
from grader.in_rank import in_rank, run
from grader.ranks.phrases import short
from grader.wire import drawn
from tests.beyond.averaging_steps import RIGHT, WRONG, Step

if TYPE_CHECKING:  # what a function finds in a rank
    from grader.inside.tools import Context, torch

graded = pytest.mark.graded


@in_rank(join=False)
def answers(context: Context, lesson: ModuleType, inputs: Any) -> object:
    """Yield what the student's check says about each step."""
    for step in inputs:
        dtype = getattr(torch, step["dtype"])
        before, after = (
            [{name: None if one is None else one.to(dtype) for name, one in own.items()} for own in step[side]]
            for side in ("before", "after")
        )
        calls = [[lesson.Call(**call | {"dtype": dtype}) for call in own] for own in step["calls"]]
        yield lesson.check(before, after, calls)


def evidence(step: Step) -> str:
    """Say where a wrong step differs from the right one."""
    for name, right in step.right.items():
        for rank, held in enumerate(step.after[name]):
            if (("after", rank, name) in step.missing) != (name == "unused"):
                return f"rank {rank}, {name}: None where it needs the mean, or zeros where it needs None"
            if not np.array_equal(held, right[rank]):
                return difference(f"rank {rank}, {name}", held, right[rank])
    return "every rank holds the mean: look at the calls"


def must_find(grade: Grade, least: int) -> None:
    """Fail if the check complains about a right step, or finds fewer wrong ones."""
    draw = drawn.generator(grade.seed, 18)
    right = {what: Step(draw, **setting) for what, setting in RIGHT.items()}
    wrong = {what: mistake.make(draw) for what, mistake in WRONG.items()}
    steps = right | wrong
    order = draw.permutation(list(steps)).tolist()
    (values,) = run(grade, answers, [[steps[what].sent() for what in order]]).values
    answer = dict(zip(order, values, strict=True))
    for what, step in steps.items():
        got, size = answer[what], f"{step.ranks} ranks, {step.pattern}, {step.dtype}"
        if not (got is None or (isinstance(got, str) and got)):
            grade.fail(f"expected None or a text that says what is wrong, got {short(repr(got), 60)}")
        if what in right and got is not None:
            grade.fail(f"a right step is called wrong ({what}; {size})", f"check says: {short(got, 200)}", what)
    missed = [what for what in wrong if answer[what] is None]
    if len(wrong) - len(missed) < least:
        step, number = wrong[missed[0]], f"{len(missed)} of {len(wrong)} wrong steps are called right"
        others = "; ".join(what.replace("rank {rank}", "one rank") for what in missed[1:4])
        grade.fail(
            f"{number}, such as one in which {missed[0].replace('{rank}', str(step.rank))}",
            f"{step.ranks} ranks, {step.pattern}, {step.dtype}: {evidence(step)}" + (others and f"\n  also: {others}"),
            missed[0],
        )


@graded("b.18")
def test_a_check_finds_a_quarter_of_the_wrong_steps(grade: Grade) -> None:
    grade.imports_only_allowed(grade.file)
    must_find(grade, len(WRONG) // 4)


@graded("b.18")
def test_a_check_finds_half_of_the_wrong_steps(grade: Grade) -> None:
    must_find(grade, len(WRONG) // 2)


@graded("b.18")
def test_a_check_finds_three_quarters_of_the_wrong_steps(grade: Grade) -> None:
    must_find(grade, 3 * len(WRONG) // 4)


@graded("b.18")
def test_a_check_finds_every_wrong_step(grade: Grade) -> None:
    must_find(grade, len(WRONG))
