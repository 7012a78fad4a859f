"""ZeRO-3, b.8: one block. A rank keeps only its shard of it, gathers the whole block, and frees it again."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest

from grader.arithmetic import EXACT, Tolerance, norm
from grader.call_checks import ExpectedCall, Phase, check_calls, phases, waits_for_held_back
from grader.compare import Expected, check
from grader.grading import Grade
from grader.in_rank import in_rank, run
from grader.ranks.outcome import Result
from grader.wire import drawn
from grader.wire.values import Fields
from tests.beyond import sharded_optimizer_shared as shared
from tests.beyond.sharded_model_shared import BLOCKS
from tests.beyond.sharded_optimizer_shared import TOY, ShardSetting
from tests.beyond.toy_shared import BYTES, is_message, once_in_bfloat16, rounded

if TYPE_CHECKING:  # what a function finds in a rank
    from grader.inside.tools import Context, Tensor, dtype_of, held_back, nn, torch
    from tests.beyond.sharded_model_in_rank import bytes_of, copy_in_memory

graded = pytest.mark.graded
HINTS = shared.HINTS | {
    "all_gather needs an output": "flat.values has no elements any more: in free, resize only its storage",
    "setStorage": "the storage of flat.values has no memory: resize it to nbytes before the gather",
}
STALE = (
    "a gather sends what the shard was in __init__, but the optimizer has changed it since: read shard.values each time"
)
MOVES = 2  # how often the shard changes, each time before a gather


def block_of(shapes: list[list[int]], dtype: str = "float32") -> ShardSetting:
    """Return a setting whose only bucket is this block."""
    return ShardSetting(shapes=shapes, dtypes=[dtype] * len(shapes), blocks=[], uses=[])


SMALL = (
    block_of([[3, 4], [5], [2, 2]]),  # matrices do not come first, as they do in flat.values
    block_of([[7], [1]]),
    block_of([[4, 6]]),  # divides evenly
    block_of([[2]]),  # fewer elements than ranks: a shard is zero
    block_of([[50, 30], [20]], "bfloat16"),
)
LARGE = block_of([[640, 1024]])


class BlockStep(NamedTuple):
    """What a rank does with a block: how many gathers it must start, and the advice if it does not.

    is_whole, gathering: the block's attributes afterwards; None: they are not checked after this step.
    """

    name: str
    gathers: int
    advice: str
    is_whole: bool | None = None
    gathering: bool = False


STEPS = (
    BlockStep("__init__", 0, "__init__ keeps a shard of local values: do not communicate", False),
    BlockStep("start_gather", 1, "start_gather must start one all_gather", False, True),
    BlockStep("start_gather again", 0, "a gather is in transit already: start_gather must do nothing"),
    BlockStep("wait", 0, "the gather has been started: wait() must only wait for it", True),
    BlockStep("start_gather and wait of a whole block", 0, "the block is whole: start_gather and wait must do nothing"),
    BlockStep("free", 0, "free must send nothing", False),
    BlockStep("wait without start_gather", 1, "wait must start the gather if it has not been started", True),
    BlockStep("free again", 0, "free must send nothing", False),
)


# --- what a rank does ---


def state(step: str, block: Any, parameters: Sequence[nn.Parameter]) -> Fields:
    """Return the attributes of a block after a step, and the bytes of memory of its parameters."""
    return {
        f"bytes after {step}": bytes_of(parameters),
        f"is_whole after {step}": bool(block.is_whole),
        f"gathering after {step}": block.gathering is not None,
    }


def gather_block(context: Context, lesson: ModuleType, dtype: str, values: list[Tensor], moves: list[Tensor]) -> Fields:
    """Gather a block twice, with and without start_gather, each time after one of `moves` is added to its shard."""
    parameters = [nn.Parameter(value.to(getattr(torch, dtype))) for value in values]
    context.event("__init__")
    block = lesson.ShardedBlock(parameters)
    report = state("__init__", block, parameters) | {"dtype": dtype_of(block.shard.values)}
    report["shard"] = copy_in_memory(block.shard.values)
    if report["shard"] is None or report["shard"].shape != moves[0].shape:
        return report
    for move, gather, free in zip(moves, ("wait", "wait without start_gather"), ("free", "free again"), strict=True):
        block.shard.values.add_(move)
        if gather == "wait":
            with held_back(context, context.arguments["late"]):
                context.event("start_gather")
                block.start_gather()
                report |= state("start_gather", block, parameters)
                context.event("start_gather again")
                block.start_gather()
        context.event(gather)
        block.wait()
        report |= state(gather, block, parameters)
        context.event("start_gather and wait of a whole block")
        block.start_gather()
        block.wait()
        report |= {f"parameter {k} after {gather}": copy_in_memory(value) for k, value in enumerate(parameters)}
        context.event(free)
        block.free()
        report |= state(free, block, parameters)
    return report


@in_rank(uses=[TOY, BLOCKS, state, gather_block])
def gather_blocks(context: Context, lesson: ModuleType, inputs: list[Fields]) -> object:
    """Return what each block has after each step. Argument: late, the rank that starts a gather after all others."""
    return [gather_block(context, lesson, **one) for one in inputs]


# --- what is right ---


class ShardedBlockRun:
    """What is right for one block on each rank, and what the ranks did with it."""

    result: Result
    values: list[Fields]  # what each rank returned
    phases: list[list[Phase]]

    def __init__(self, grade: Grade, ranks: int, setting: ShardSetting) -> None:
        self.grade, self.ranks, self.setting, self.dtype = grade, ranks, setting, setting.dtypes[0]
        self.order, self.initial = setting.buckets()[0], setting.initial(grade.seed)
        # At the start and after each move: a row for each rank.
        self.shards = [setting.flat(self.order, self.initial, ranks)]
        size = (MOVES, self.shards[0].shape[1])
        generators = [drawn.generator(grade.seed, 31, ranks, rank) for rank in range(ranks)]
        ones = setting.flat(self.order, [np.ones(shape) for shape in setting.shapes], ranks)  # what fills up stays 0
        moves = [
            np.asarray(own * generator.normal(size=size), np.float32)
            for own, generator in zip(ones, generators, strict=True)
        ]
        for move in range(MOVES):
            self.shards.append(self.shards[-1] + [own[move] for own in moves])
        self.inputs = [{"dtype": self.dtype, "values": self.initial, "moves": list(own)} for own in moves]

    def where(self, rank: int) -> str:
        shapes = " ".join(str(tuple(shape)) for shape in self.setting.shapes)
        return f"a block of {self.dtype} {shapes} on rank {rank} of {self.ranks}: "


def run_blocks(
    grade: Grade, ranks: int, settings: Sequence[ShardSetting], late: int | None = None
) -> list[ShardedBlockRun]:
    """Run all blocks one after the other on the same ranks; divide the phases of the run among them."""
    blocks = [ShardedBlockRun(grade, ranks, setting) for setting in settings]
    inputs = [[block.inputs[rank] for block in blocks] for rank in range(ranks)]
    result = run(grade, gather_blocks, inputs, HINTS, why_gather_is_stuck, late=late)
    by_rank = [phases(result, rank) for rank in range(ranks)]
    for number, block in enumerate(blocks):
        block.result, block.values, block.phases = result, [value[number] for value in result.values], []
        for all_phases in by_rank:
            begins = [i for i, phase in enumerate(all_phases) if phase.event.name == STEPS[0].name]
            ends = [*begins[1:], len(all_phases)]
            block.phases.append(all_phases[begins[number] : ends[number]])
    return blocks


def why_gather_is_stuck(result: Result) -> str:
    """Say why no rank can continue; "" if it is no known mistake."""
    waits = waits_for_held_back(result)
    return f"{waits} in start_gather: it must return at once; only wait() waits" if "all_gather" in waits else ""


def check_shard(run: ShardedBlockRun) -> None:
    """Check that after __init__ a rank has only a copy of its part, in float32."""
    for rank, got in enumerate(run.values):
        right = run.shards[0]
        mistakes: Fields = {
            f"`own` is the shard of rank {r}: rank r owns the elements r L to (r+1) L": right[r]
            for r in range(run.ranks)
        }
        every_nth = np.reshape(run.shards[0], -1)[rank :: run.ranks]
        mistakes["the shard has every N-th element: rank r owns the elements r L to (r+1) L, in a row"] = every_nth
        mistakes["the memory of the shard is freed: `own` must be a copy; a view is freed with flat.values"] = None
        expected = {
            "shard": Expected(right[rank], name="the shard", mistakes=mistakes, tolerance=EXACT),
            "dtype": Expected("float32", "the shard is of {got}, expected float32, whatever the block's dtype"),
        }
        check(run.grade, run.where(rank), got, expected)
        check_state(run, rank, STEPS[0])


def check_state(run: ShardedBlockRun, rank: int, step: BlockStep) -> None:
    """Check the size of the memory and the attributes after a step."""
    if step.is_whole is None:
        return
    size = run.shards[0].size * BYTES[run.dtype] if step.is_whole or step.gathering else 0
    words = (
        f"after {step.name} the memory of flat.values has {{got}} bytes, expected {{expected}}: resize its storage to "
    )
    words += "nbytes" if size else "0 bytes (another tensor in its place frees nothing: the parameters are views of it)"
    handle = "keep the handle of the all_gather in `gathering`" if step.gathering else "set `gathering` to None"
    expected = {
        f"bytes after {step.name}": Expected(size, words),
        f"is_whole after {step.name}": Expected(step.is_whole),
        f"gathering after {step.name}": Expected(step.gathering, f"after {step.name}: {handle}"),
    }
    check(run.grade, run.where(rank), run.values[rank], expected)


def check_gathers(run: ShardedBlockRun) -> None:
    """Check that a gather sends the shard once, in the block's dtype, and brings the parameters of all ranks."""
    for rank, got in enumerate(run.values):
        steps, moved = {step.name: step for step in STEPS}, 0
        for event, calls in run.phases[rank]:
            step, calls = steps[event.name], [call for call in calls if is_message(call)]
            moved += step.gathers
            payloads = [rounded(shard[rank], run.dtype) for shard in run.shards]
            stale = {STALE: payloads[0]} if moved else {}
            right = ExpectedCall("all_gather", payload=payloads[moved], payload_is="its shard", mistakes=stale)
            check_calls(run.grade, run.where(rank)[:-2], rank, calls, [right] * step.gathers, step.advice)
            for call in calls:
                if call.dtype != run.dtype:
                    words = f"the shard is sent in {call.dtype} ({call.where}), expected the dtype of flat.values"
                    run.grade.fail(f"{run.where(rank)}{words}, {run.dtype}")
            check_state(run, rank, step)
        for moved, name in enumerate(("wait", "wait without start_gather"), 1):
            message = f"after {name}, the parameters are not the shards of all ranks"
            total = norm(run.shards)  # of one element, a move may leave a difference that is nearly zero
            for k, whole in run.setting.parameters_of(run.order, run.shards[moved]).items():
                tolerance = once_in_bfloat16(whole, total) if run.dtype == "bfloat16" else Tolerance(total)
                expected = Expected(whole, message, f"parameter {k}", tolerance=tolerance)
                check(run.grade, run.where(rank), got, {f"parameter {k} after {name}": expected}, run.result)


# --- the graded tests ---


@graded("b.8")
def test_a_rank_keeps_its_shard_alone_and_frees_the_rest(grade: Grade) -> None:
    for ranks in (3, 2, 4, 1):
        for block in run_blocks(grade, ranks, SMALL):
            check_shard(block)


@graded("b.8")
def test_a_gather_brings_the_shards_of_all_ranks_without_waiting(grade: Grade) -> None:
    for ranks, late, settings in ((3, 0, (*SMALL, LARGE)), (2, None, SMALL), (4, None, SMALL), (1, None, SMALL)):
        for block in run_blocks(grade, ranks, settings, late):
            check_shard(block)
            check_gathers(block)


@graded("b.8", absence=True)
def test_the_sharded_model_imports_only_what_the_course_allows(grade: Grade) -> None:
    grade.imports_only_allowed(grade.file, "beyond/flat_parameters.py")
