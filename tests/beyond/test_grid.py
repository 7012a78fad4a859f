"""Ranks on a grid, b.14: which ranks form a group, how groups are made, and GPT-2 on three grids of four ranks."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import zip_longest
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from grader.call_checks import phases
from grader.compare import Expected, check
from grader.grading import Grade
from grader.in_rank import in_rank, run, run_to_any_end
from grader.ranks.outcome import Result
from grader.ranks.phrases import short
from grader.wire import drawn
from grader.wire.values import Fields
from tests.beyond.stages_shared import IN_RANK, MODELS, Model, StagePart, number

if TYPE_CHECKING:  # what a function finds in a rank
    from grader.inside.tools import Context, copy_of, dist, torch
    from tests.beyond.stages_in_rank import gradients, small_gpt2

graded = pytest.mark.graded
KINDS = ("pipeline", "data", "tensor")
Lists = list[list[int]]
Sizes = tuple[int, int, int]  # pipeline, data, tensor
GRIDS: tuple[Sizes, ...] = (
    (1, 1, 1), (1, 3, 2), (1, 2, 2), (2, 2, 1), (2, 1, 2), (1, 1, 3), (3, 2, 1), (2, 2, 2), (2, 3, 2), (3, 1, 4),
)  # fmt: skip
MADE: tuple[Sizes, ...] = ((1, 2, 2), (3, 2, 1), (2, 1, 2), (2, 2, 2), (1, 1, 1))
MORE = ((1, 5, 1), (7, 1, 1), (1, 1, 6), (1, 4, 2), (4, 1, 2), (4, 2, 1), (2, 4, 1), (1, 2, 4))  # one is drawn
BATCH, MICRO_BATCHES = 8, 2
LIMITS = [1e9, 0.05]  # of the norm: the second step is clipped
PLACES: dict[Sizes, tuple[tuple[int, int, int], ...]] = {  # for each rank: stage, place on the data and tensor axes
    (1, 2, 2): ((0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1)),
    (2, 2, 1): ((0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 1, 0)),
    (2, 1, 2): ((0, 0, 0), (0, 0, 1), (1, 0, 0), (1, 0, 1)),
}


# --- what a rank does ---


def lists_of_ranks(groups: Any) -> list[list[int]] | str:
    """Return lists of lists of whole numbers as they are; anything else as a text."""
    are_lists = isinstance(groups, list) and all(isinstance(group, list) for group in groups)
    if are_lists and all(type(rank) is int for group in groups for rank in group):
        return groups[:64]
    return str(groups)[:100]


@in_rank(uses=[lists_of_ranks], join=False)
def members(context: Context, lesson: ModuleType, _inputs: object) -> object:
    """Yield the groups of each grid, kind by kind."""
    from common.config import Grid

    for pipeline, data, tensor in context.arguments["grids"]:
        value = lesson.members(Grid(pipeline=pipeline, data=data, tensor=tensor))
        if not isinstance(value, dict) or sorted(value) != ["data", "pipeline", "tensor"]:
            yield {"type": list(value) if isinstance(value, dict) else f"a {type(value).__name__}"}
        else:
            yield {"type": "groups"} | {kind: lists_of_ranks(groups) for kind, groups in value.items()}


def as_list(ranks: Iterable[int] | None) -> list[int] | str | None:
    """Return the argument of new_group as whole numbers; None for all ranks."""
    try:
        return None if ranks is None else [int(rank) for rank in list(ranks)][:64]
    except (TypeError, ValueError):
        return str(ranks)[:100]


def spy_new_group(context: Context) -> None:
    context.spy(dist, "new_group", note=lambda ranks=None, *_, **__: {"ranks": as_list(ranks)})


@in_rank(uses=[as_list, spy_new_group], first="spy_new_group")
def groups(context: Context, lesson: ModuleType, inputs: Fields) -> object:
    """Return the ranks of each group that make_groups returns, and a sum over them."""
    from common.config import Grid

    made = lesson.make_groups(Grid(**context.arguments["grid"]))
    by_kind: Fields = {}
    for kind, tensor in inputs.items():
        group = getattr(made, kind, None)
        by_kind[kind] = {"type": type(group).__name__}
        if isinstance(group, dist.ProcessGroup):
            context.event("sum", of=kind)
            dist.all_reduce(tensor, group=group)
            by_kind[kind] = {"type": "group", "ranks": dist.get_process_group_ranks(group), "sum": copy_of(tensor)}
    context.event("ended")
    return by_kind


@in_rank(uses=[IN_RANK], preload=MODELS)
def train(context: Context, _lesson: ModuleType, inputs: Fields) -> object:
    """Return loss, norm and gradients of each step of OnGrid, and the parameters at the end.

    OnGrid is a given file; it imports the student's functions itself.
    """
    from beyond.on_grid import OnGrid
    from common.config import Grid

    a = context.arguments
    model = small_gpt2(a["sizes"], inputs["weights"])

    def make_optimizer(parameters: list[dict]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=a["rate"], momentum=a["momentum"])

    part = OnGrid(model, Grid(**a["grid"]), make_optimizer, weight_decay=0.0, micro_batches=a["micro_batches"])
    steps = []
    for tokens, limit in zip(inputs["tokens"], a["limits"], strict=True):
        part.zero_grad()
        loss = part.forward_backward(tokens)
        part.finish()
        steps.append({"loss": copy_of(loss), "gradients": gradients(model)})
        steps[-1]["norm"] = copy_of(part.clip(limit))
        part.step()
    return {"steps": steps, "parameters": {name: copy_of(value) for name, value in model.named_parameters()}}


# --- members ---


def words(sizes: Sizes) -> str:
    """Return `pipeline=2, data=2, tensor=1`."""
    return ", ".join(f"{kind}={size}" for kind, size in zip(KINDS, sizes, strict=True))


def right_groups(sizes: Sizes) -> tuple[Lists, ...]:
    """Return the right groups of each kind: a rank that is in none yet begins the next; an axis has a stride."""
    pipeline, data, tensor = sizes
    strides, everyone = (data * tensor, tensor, 1), range(pipeline * data * tensor)
    kinds: tuple[Lists, ...] = ([], [], [])
    for groups, stride, size in zip(kinds, strides, sizes, strict=True):
        for rank in everyone:
            if not any(rank in group for group in groups):
                groups.append([*everyone[rank::stride][:size]])
    return kinds


def aspects(groups: Lists) -> Fields:
    """Return what must be right about the groups of a kind. The first aspect that is wrong is the cause."""
    return {
        "every rank is in one group of each kind": sorted(rank for group in groups for rank in group),
        "a group has as many ranks as its axis is long": sorted(map(len, groups)),
        "the ranks of a group differ along one axis only, and the tensor axis is the fastest": sorted(
            map(sorted, groups)
        ),
        "sort the ranks of a group in ascending order": sorted(groups),
        "the groups are right; sort them by their first rank": groups,
    }


def check_members(grade: Grade) -> None:
    """Check the groups of the grids in GRIDS, and of some that are drawn."""
    grids = [*GRIDS, *((p, d, t) for p, d, t in grade.draw.integers(2, 9, size=(3, 3)).tolist())]
    (values,) = run(grade, members, [None], grids=grids).values
    for sizes, got in zip(grids, values, strict=True):
        right = right_groups(sizes)
        where = f"members of a grid with {words(sizes)}: "
        check(
            grade, where, got, {"type": Expected("groups", "expected a dict with pipeline, data and tensor, got {got}")}
        )
        for kind, lists in zip(KINDS, right, strict=True):
            shown = f"expected the {kind} groups {short(str(lists))}, got {short(str(got[kind]))}"
            if isinstance(got[kind], str):
                grade.fail(observed=f"{where}a group is a list of whole numbers; {shown}")
            if got[kind] != lists and got[kind] in right:
                other = KINDS[right.index(got[kind])]
                advice = "the axes are pipeline, data, tensor, and the last is the fastest"
                grade.fail(f"{where}these are the {other} groups: {advice}; {shown}")
            expected = {cause: Expected(value, f"{cause}; {shown}") for cause, value in aspects(lists).items()}
            check(grade, where, aspects(got[kind]), expected)


# --- make_groups ---


def check_groups(grade: Grade) -> None:
    """Check that all ranks call new_group in one order, and that each gets the three groups of which it is a member."""
    for sizes in (*MADE, MORE[int(grade.draw.integers(len(MORE)))]):
        draws = [drawn.generator(grade.seed, 61, *sizes, rank) for rank in range(int(np.prod(sizes)))]
        inputs = [{kind: draw.normal(size=3) for kind in KINDS} for draw in draws]
        result = run_to_any_end(grade, groups, inputs, grid=dict(zip(KINDS, sizes, strict=True)))
        check_calls_agree(grade, f"make_groups of a grid with {words(sizes)}: ", result)
        for rank, got in enumerate(result.values):
            where = f"make_groups of a grid with {words(sizes)}, rank {rank}: "
            for kind, lists in zip(KINDS, right_groups(sizes), strict=True):
                right = next(group for group in lists if rank in group)
                check_sums(grade, where, result, rank, kind, right)
                total = np.sum([inputs[other][kind] for other in right], axis=0)
                reason = "new_group returns no group where the rank is not a member: keep its result only on members, "
                reason += "and make groups of one rank, too"
                expected = {
                    "type": Expected("group", f"expected a process group as `{kind}`, got {{got}}; {reason}"),
                    "ranks": Expected(
                        right, f"expected the {kind} group of the ranks {{expected}}, got that of {{got}}"
                    ),
                    "sum": Expected(total, name=f"a sum over the {kind} group"),
                }
                check(grade, where, got[kind], expected)


def check_calls_agree(grade: Grade, where: str, result: Result) -> None:
    """Check that all ranks call new_group for the same groups; if they do not, a run may hang or return."""
    calls = [[event.data["ranks"] for event in rank.events if event.name == "new_group"] for rank in result.ranks]
    verdict, differ = grade.verdict(result), ""
    for rank, own in enumerate(calls):
        for place, (one, other) in enumerate(zip_longest(calls[0], own, fillvalue="nothing more")):
            if one != other and not differ and result.ranks[rank].outcome != "raised":
                same = sorted(map(str, own)) == sorted(map(str, calls[0]))
                differ = (
                    f"in call {place + 1} of new_group, rank 0 makes the group {short(str(one), 60)}, but rank {rank} "
                    f"makes {short(str(other), 60)}: all ranks must call new_group for all groups, "
                    f"{'in the same order' if same else 'members or not'}\n"
                )
    if verdict:
        raise type(verdict)(f"{where}{differ}{verdict}")
    if differ:
        grade.fail(where + differ)


def check_sums(grade: Grade, where: str, result: Result, rank: int, kind: str, right: list[int]) -> None:
    """Check with the broker's calls that a sum over a returned group went to the members of this group."""
    for event, calls in phases(result, rank):
        if event.data.get("of") == kind:
            got = [f"{call.name} of the ranks {sorted(call.members)}" for call in calls]
            message = f"a sum over the {kind} group: expected an {{expected}}, got {{got}}"
            check(grade, where, {"sum": got}, {"sum": Expected([f"all_reduce of the ranks {right}"], message)})


# --- GPT-2 on a grid ---


def check_training(grade: Grade, sizes: Sizes) -> None:
    """Check two steps of OnGrid: losses, norms, gradients, and the parameters at the end."""
    pipeline, data, tensor = sizes
    model, rows = Model(grade, 2, BATCH, LIMITS, rate=0.5, momentum=0.9), BATCH // data
    parts = [StagePart(stage, pipeline, t if tensor > 1 else None) for stage, _, t in PLACES[sizes]]
    inputs = [
        model.inputs(part, rank, slice(d * rows, (d + 1) * rows))
        for rank, (part, (_, d, _)) in enumerate(zip(parts, PLACES[sizes], strict=True))
    ]
    micro_batches = MICRO_BATCHES if pipeline > 1 else 1
    grid = dict(zip(KINDS, sizes, strict=True))
    where = f"GPT-2 on a grid with {words(sizes)}"
    result = run(grade, train, inputs, where=f"{where}: ", grid=grid, micro_batches=micro_batches, **model.arguments)
    for step, right in enumerate(model.right["steps"]):
        all_steps = [value["steps"][step] for value in result.values]
        parts_of_mean = [
            one["loss"] for one, (stage, _, t) in zip(all_steps, PLACES[sizes], strict=True) if stage == t == 0
        ]
        for rank, got in enumerate(all_steps):
            values = got["gradients"] | {"the mean loss": np.mean(parts_of_mean), "the norm": got["norm"]}
            expected = number("the mean loss", right["loss"]) | number("the norm", right["norm"])
            expected |= model.expected(parts[rank], right["gradients"])
            check(grade, f"{where}, rank {rank}, step {step}, compared with one worker: ", values, expected, result)
    for rank, value in enumerate(result.values):
        expected = model.expected(parts[rank], model.right["parameters"])
        at = f"{where}, rank {rank}, after {len(LIMITS)} steps, compared with one worker: "
        check(grade, at, value["parameters"], expected)


# --- the graded tests ---


@graded("b.14")
def test_a_group_has_the_ranks_that_differ_along_its_axis(grade: Grade) -> None:
    grade.imports_only_allowed(grade.file)
    check_members(grade)


# A table of all groups of 8 ranks is possible, so that the next two count only with `members` for any grid.
@graded("b.14", absence=True)
def test_all_ranks_make_all_groups_in_one_order_and_keep_their_own(grade: Grade) -> None:
    check_groups(grade)


@graded("b.14", needs=["b.12", "b.13"], absence=True)
def test_gpt2_on_a_grid_trains_as_on_one_worker(grade: Grade) -> None:
    for sizes in PLACES:
        check_training(grade, sizes)
