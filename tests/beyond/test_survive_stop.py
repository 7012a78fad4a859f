"""Stopping together, b.21: a signal, an exception or a full storage on one rank ends all ranks, in one step.

Whatever ends a run, a killed rank too, other ranks continue it. Their examples and parameters must be those of a run
without interruption.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
import pytest

from grader.grading import Grade
from grader.in_rank import in_rank, run, run_to_any_end
from grader.ranks.outcome import Result
from grader.wire.values import Fields

if TYPE_CHECKING:  # what a function finds in a rank
    from grader.inside.tools import Context
    from tests.beyond.survive_in_rank import load_one, make_job

graded = pytest.mark.graded
IN_RANK = "tests/beyond/survive_in_rank.py"
STEPS, EVERY, SAVES = 12, 5, (5, 10, 12)
STOPPED, FAILED = 75, 76  # as in the lesson
CODES = {0: "0", STOPPED: "STOPPED", FAILED: "FAILED"}
SIZES = (2, 3, 4)
TOLERANCE = 1e-9  # of float64 sums in another order
FAULT = "an example that cannot be used"
HINTS = {
    "killed by SIGTERM": "SIGTERM has ended the process: Stop.__init__ must install a handler for it (signal.signal)",
    "SystemExit": "the handler only notes the signal: a rank that leaves alone makes the others wait for it",
    FAULT: "the exception has left train on one rank, and the others wait for it: catch it, and agree with them",
}
Storage = dict[str, bytes]


# --- what a rank does ---


@in_rank(uses=[IN_RANK])
def train(context: Context, lesson: ModuleType, inputs: Fields | None) -> object:
    """Train with a fault, or with none; return the exit code."""
    a = context.arguments
    code = lesson.train(context.storage(), make_job(context, inputs), a["steps"], a["every"])
    return code if type(code) is int else f"a {type(code).__name__}"


@in_rank(uses=[IN_RANK])
def load_all(context: Context, lesson: ModuleType, inputs: None) -> object:
    return load_one(context, lesson, 0)


# --- runs ---


def start(
    grade: Grade, where: str, ranks: int, storage: Storage, code: int, faults: Sequence[Fields | None] = (),
    full: tuple[int, int] | None = None,
) -> Result:  # fmt: skip
    """Train on some ranks, of which some have a fault; all must return this code."""
    inputs = list(faults) or [None] * ranks
    result = run(grade, train, inputs, HINTS, where=where, storages=[storage], full=full, **arguments(grade))
    codes = [CODES.get(value, str(value)) for value in result.values]
    if set(codes) != {CODES[code]}:
        grade.fail(f"{where}expected {CODES[code]} on every rank, got {', '.join(codes)}", kind="other exit codes")
    return result


def arguments(grade: Grade) -> Fields:
    return {"steps": STEPS, "every": EVERY, "seed": grade.number("job", 1000)}


def examples(result: Result) -> list[list[int]]:
    """Return the examples of each step, of all ranks together."""
    shares = [[event.data["examples"] for event in rank.events if event.name == "gradient"] for rank in result.ranks]
    return [sorted(example for share in step for example in share) for step in zip(*shares, strict=False)]


def loaded(grade: Grade, where: str, storage: Storage) -> Fields:
    """Return the state that one rank loads."""
    (state,) = run(grade, load_all, [None], storages=[storage], where=where).values
    if state["step"] < 0:
        grade.fail(f"{where}load raises {state['kind']}")
    return state


def must_continue(grade: Grade, where: str, storage: Storage, ranks: int) -> None:
    """Continue with other ranks, and compare with a run without interruption."""
    alone = "1 rank without interruption: "
    whole = start(grade, alone, 1, {}, 0)
    right = loaded(grade, alone, whole.storages[0])
    first = loaded(grade, where, storage)["step"]
    where += f"{'1 rank continues' if ranks == 1 else f'{ranks} ranks continue'} from step {first}: "
    result = start(grade, where, ranks, storage, 0)
    if examples(result) != examples(whole)[first:]:
        grade.fail(f"{where}the examples differ from those of a run without interruption")
    end = loaded(grade, where, result.storages[0])
    if end["step"] != STEPS:
        grade.fail(
            f"{where}expected a checkpoint of step {STEPS} at the end, got step {end['step']}: save the last steps"
        )
    for name, tensor in right["shards"].items():
        if not np.allclose(end["shards"][name], tensor, rtol=TOLERANCE, atol=TOLERANCE):
            grade.fail(f"{where}after {STEPS} steps, {name} differs from that of a run without interruption")


def puts_in_a_save(grade: Grade, ranks: int, rank: int) -> int:
    """Return how often a rank puts in one save, from a run without a fault."""
    calls = start(grade, f"{ranks} ranks without a fault: ", ranks, {}, 0).ranks[rank].calls
    return -(-[call.name for call in calls].count("put") // len(SAVES))


def check_stop(grade: Grade, kind: str, code: int) -> None:
    """Check that a fault on one rank ends all of them with this code and one save."""
    for ranks in SIZES:
        offset = int(grade.draw.integers(ranks))
        for i, step in enumerate((EVERY + 1, int(grade.draw.integers(EVERY + 2, STEPS)))):
            rank, fault = (offset + i) % ranks, {"kind": kind, "in_step": step}  # not rank 0 both times
            where = f"{ranks} ranks, {kind} on rank {rank} in step {step}: "
            result = start(grade, where, ranks, {}, code, [fault if other == rank else None for other in range(ranks)])
            check_saved(grade, where, result, (step - 1, step) if kind == "signal" else (step - 1,))


def check_saved(grade: Grade, where: str, result: Result, updates: Sequence[int], once: bool = True) -> None:
    """Check that the state after so many updates is saved, `once`."""
    step, expected = loaded(grade, where, result.storages[0])["step"], " or ".join(map(str, updates))
    if step not in updates:
        kind = "what is saved at the end is not the state of the last step"
        grade.fail(f"{where}expected a checkpoint after {expected} updates, got one after {step}", kind=kind)
    saves, ranks = -(-step // EVERY), len(result.ranks)
    puts = [call.name for call in result.ranks[0].calls].count("put")
    if once and puts > saves * puts_in_a_save(grade, ranks, 0):
        again = "what is saved already is not saved again"
        grade.fail(f"{where}after {step} updates, saved after every {EVERY}, rank 0 has put {puts} times: {again}")


# --- the graded tests ---


@graded("b.21")
def test_a_signal_on_one_rank_ends_all_ranks_after_one_save(grade: Grade) -> None:
    grade.imports_only_allowed(grade.file)
    check_stop(grade, "signal", STOPPED)
    where = "3 ranks, a signal on all of them: "  # as torchrun and SLURM send it
    result = start(grade, where, 3, {}, STOPPED, [{"kind": "signal", "in_step": 3}] * 3)
    check_saved(grade, where, result, (2, 3))
    must_continue(grade, where, result.storages[0], 4)


@graded("b.21")
def test_an_exception_or_a_full_storage_on_one_rank_ends_all_ranks(grade: Grade) -> None:
    check_stop(grade, "exception", FAILED)
    for ranks, number in ((2, 1), (3, 2), (4, 1)):
        rank, step = int(grade.draw.integers(ranks)), SAVES[number]
        where = f"{ranks} ranks, the storage is full for rank {rank} when step {step} is saved: "
        result = start(grade, where, ranks, {}, FAILED, full=(rank, number * puts_in_a_save(grade, ranks, rank) + 1))
        check_saved(grade, where, result, [SAVES[number - 1]], once=False)


@graded("b.21")
def test_the_other_ranks_continue_without_a_killed_one(grade: Grade) -> None:
    for ranks in SIZES:
        rank, step = int(grade.draw.integers(ranks)), int(grade.draw.integers(EVERY + 1, STEPS))
        where = f"{ranks} ranks, rank {rank} is killed in step {step}: "
        fault = {"kind": "kill", "in_step": step}
        inputs = [fault if other == rank else None for other in range(ranks)]
        result = run_to_any_end(grade, train, inputs, storages=[{}], **arguments(grade))
        if result.outcome != "killed":
            raise grade.lacking(result, f"{where}a rank whose collective fails must end, got {result.outcome}")
        must_continue(grade, where, result.storages[0], ranks - 1)
