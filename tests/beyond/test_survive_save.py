"""A checkpoint of all ranks, b.19: complete or not there at all, whenever a rank is killed, for any number of ranks.

No rank is killed here. One run is enough: the grader keeps the storage, and computes from the ranks' operations every
content that a crash could have left (grader/crash_states.py). Each of them is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from grader.arithmetic import EXACT
from grader.compare import Expected, check
from grader.crash_states import Content, CrashState, crash_states
from grader.grading import Grade
from grader.in_rank import in_rank, run
from grader.ranks.outcome import Result
from grader.ranks.phrases import short
from grader.wire import drawn
from grader.wire.values import Fields

if TYPE_CHECKING:  # what a function finds in a rank
    from grader.inside.tools import Context
    from tests.beyond.survive_in_rank import load_one, save_one

graded = pytest.mark.graded
IN_RANK = "tests/beyond/survive_in_rank.py"
SIZES = (2, 3, 4)  # of the jobs that save and that load
LENGTHS = {"values": 11, "exp_avg": 11, "exp_avg_sq": 11, "bias": 3}  # with 2, 3 and 4 ranks, some shards are padded
LARGE = dict.fromkeys(("values", "exp_avg", "exp_avg_sq"), 40_001)
OVERHEAD = 20_000  # bytes for manifests, and for torch.save's own
INCOMPLETE = "the newest checkpoint looks complete and is not"
TOO_OLD = "delete an older checkpoint only when the new one has its manifest"
VIEW = "torch.save writes all of the memory behind a view: put a copy (clone)"
DRAWN_STATES = 3  # of each number of ranks: what a crash has left where the next job saves


# --- what a rank does ---


@in_rank(uses=[IN_RANK])
def save_all(context: Context, lesson: ModuleType, inputs: Any) -> object:
    """Save this rank's states, one after the other, in one storage after the other; before that, load if asked to."""
    for storage, states in enumerate(inputs):
        if context.arguments["loads"]:
            load_one(context, lesson, storage)
        for saved in states:
            yield save_one(context, lesson, storage, saved)


@in_rank(uses=[IN_RANK])
def load_all(context: Context, lesson: ModuleType, inputs: int) -> object:
    """Yield what load returns for each storage."""
    for storage in range(inputs):
        yield load_one(context, lesson, storage)


# --- what is saved ---


def whole(grade: Grade, step: int, lengths: dict[str, int]) -> dict[str, np.ndarray]:
    """Return the whole tensors of a step."""
    return {
        name: drawn.generator(grade.seed, 71, step, i).normal(size=length).astype(np.float32)
        for i, (name, length) in enumerate(lengths.items())
    }


def cut(tensor: np.ndarray, rank: int, ranks: int) -> np.ndarray:
    """Return a rank's shard, padded with zeros."""
    length = -(-len(tensor) // ranks)
    own = tensor[rank * length :][:length]
    return np.pad(own, (0, length - len(own)))


def data_of(step: int) -> dict[str, int]:
    return {"seed": 7, "epoch": step // 3, "position": step * 12 % 52}


def saved(grade: Grade, step: int, rank: int, ranks: int, lengths: dict[str, int]) -> Fields:
    shards = {name: cut(tensor, rank, ranks) for name, tensor in whole(grade, step, lengths).items()}
    return {"step": step, "shards": shards, "lengths": lengths, "data": data_of(step)}


def save_steps(
    grade: Grade, ranks: int, steps: Sequence[Sequence[int]], lengths: dict[str, int] = LENGTHS, *,
    storages: Sequence[Content] = (), full: tuple[int, int] | None = None,
) -> Result:  # fmt: skip
    """Save these steps in each storage; where something is in the storages, the ranks load it first."""
    inputs = [[[saved(grade, step, rank, ranks, lengths) for step in own] for own in steps] for rank in range(ranks)]
    where, contents = f"{ranks} ranks save: ", storages or [{} for _ in steps]
    return run(grade, save_all, inputs, where=where, storages=contents, full=full, loads=bool(storages))


# --- what is loaded ---


def check_loaded(grade: Grade, where: str, values: Sequence[Fields], least: int, newest: int) -> None:
    """Check what the ranks have loaded: one step from `least` to `newest`, and the whole tensors of this step."""
    for rank, value in enumerate(values):
        if value["kind"] not in ("a State", "None"):
            cause = INCOMPLETE if value["step"] < 0 else "expected a State or None"
            grade.fail(f"{where}load on rank {rank}: {value['kind']}: {cause}", kind=cause)
    steps = [value["step"] for value in values]
    if len(set(steps)) > 1 or not least <= steps[0] <= newest:
        cause = TOO_OLD if least < newest else "find the newest manifest, and keep its step"
        saved = f"step {least}{f' or {newest}' if least < newest else ''}"
        grade.fail(
            f"{where}expected {saved}, load returns {' '.join(str(step or None) for step in steps)}: {cause}",
            kind=cause,
        )
    for rank, value in enumerate(values):
        if step := value["step"]:
            check_tensors(grade, f"{where}step {step}, rank {rank} of {len(values)}: ", value, rank, len(values))


def check_tensors(grade: Grade, where: str, value: Fields, rank: int, ranks: int) -> None:
    """Check the shards of a rank, their lengths, and the place in the data."""
    step, shards = value["step"], {}
    others = [whole(grade, other, LENGTHS) for other in range(1, step + 3) if other != step]
    for name, tensor in whole(grade, step, LENGTHS).items():
        own, got = cut(tensor, rank, ranks), value["shards"].get(name)
        strays = got[got != own] if isinstance(got, np.ndarray) and got.shape == own.shape else np.empty(0)
        is_mixed = len(strays) and all(any(stray in one[name] for one in others) for stray in strays)
        mistakes = {
            "{name} is zero: save and load all tensors of the state": np.zeros_like(own),
            "{name} has parts of another step: no name may be used in two steps": got if is_mixed else own + np.nan,
        }
        shards[name] = Expected(own, mistakes=mistakes, tolerance=EXACT)
    check(grade, where, value, {"lengths": Expected(LENGTHS), "data": Expected(data_of(step))})
    check(grade, where, value["shards"], shards)


def check_states(grade: Grade, states: Sequence[CrashState], steps: Sequence[int], ranks: int, before: str) -> None:
    """Load each crash state with `ranks` ranks: it must be the last step that was saved, or a later one."""
    where, contents = f"{before}and {ranks} ranks load what a crash left: ", [state.content for state in states]
    result = run(grade, load_all, [len(states)] * ranks, where=where, storages=contents)
    for i, state in enumerate(states):
        names = short(", ".join(sorted(state.content)) or "nothing", 200)
        where = f"{before}a crash leaves {names}; {ranks} ranks: "
        check_loaded(grade, where, [value[i] for value in result.values], steps[state.passed], steps[-1])


# --- the graded tests ---


@graded("b.19")
def test_any_number_of_ranks_loads_the_newest_checkpoint(grade: Grade) -> None:
    grade.imports_only_allowed(grade.file)
    storages = [{}, *(save_steps(grade, ranks, [[9, 10]]).storages[0] for ranks in (1, *SIZES))]
    for ranks in (1, *SIZES):
        result = run(grade, load_all, [len(storages)] * ranks, storages=storages, where=f"loaded by {ranks}: ")
        for i, writers in enumerate(("nobody", 1, *SIZES)):
            step = 10 if i else 0
            values = [value[i] for value in result.values]
            check_loaded(grade, f"saved by {writers} and loaded by {ranks}: ", values, step, step)


@graded("b.19")
def test_whenever_a_rank_is_killed_a_complete_checkpoint_remains(grade: Grade) -> None:
    steps = [0, 1, 2, 3]
    for ranks, readers in zip(SIZES, grade.draw.permutation(SIZES).tolist(), strict=True):
        result = save_steps(grade, ranks, [steps[1:]])
        check_states(grade, crash_states(result, "saved 0"), steps, readers, f"{ranks} ranks save steps 1 to 3, ")


@graded("b.19")
def test_a_save_on_top_of_what_a_crash_left_is_as_safe(grade: Grade) -> None:
    for ranks, writers, readers in zip(SIZES, (3, 4, 2), (4, 2, 3), strict=True):
        all_states = crash_states(save_steps(grade, ranks, [[1, 2]]), "saved 0")
        starts = [all_states[i].content for i in grade.draw.permutation(len(all_states))[:DRAWN_STATES]]
        loaded = run(grade, load_all, [len(starts)] * writers, storages=starts)
        for values in zip(*loaded.values, strict=True):
            check_loaded(grade, f"a crash of {ranks} ranks, loaded by {writers}: ", values, 0, 2)
        steps = [value["step"] for value in loaded.values[0]]
        result = save_steps(grade, writers, [[step + 1] for step in steps], storages=starts)
        for i, (start, step) in enumerate(zip(starts, steps, strict=True)):
            before = f"after a crash of {ranks} ranks, {writers} load step {step} and save step {step + 1}, "
            check_states(grade, crash_states(result, f"saved {i}", i, start), [step, step + 1], readers, before)


@graded("b.19")
def test_each_rank_writes_only_its_shards_and_old_checkpoints_are_deleted(grade: Grade) -> None:
    ranks = 4
    result = save_steps(grade, ranks, [[1, 2, 3]], LARGE)
    share = 4 * sum(-(-length // ranks) for length in LARGE.values())
    for rank in result.ranks:
        others = [(call.price, call.name, call.where) for call in rank.calls if call.name != "put"]
        price, name, where = max(others, default=(0, "", ""))
        if price > OVERHEAD:
            cause = "a save needs no tensors of other ranks, each rank puts its own"
            grade.fail(f"rank {rank.rank} sends {price:.0f} bytes in {name} ({where}): {cause}", kind=cause)
        puts = [call.sent for call in rank.calls if call.name == "put"]
        if sum(puts) > 3 * (share + OVERHEAD):
            cause = VIEW if max(puts) > 3 * share else "each rank puts only its own shards"
            grade.fail(f"rank {rank.rank} puts {max(puts)} bytes at once, its shards have {share}: {cause}", kind=cause)
    left = sum(map(len, result.storages[0].values()))
    if left > 2 * ranks * (share + OVERHEAD):
        names = short(", ".join(sorted(result.storages[0])), 200)
        cause = f"delete older ones when the new one is complete; left are {names}"
        grade.fail(f"after three saves the storage holds {left} bytes, one checkpoint has {ranks * share}: {cause}")


@graded("b.19")
def test_if_the_storage_is_full_for_one_rank_save_raises_on_every_rank(grade: Grade) -> None:
    ranks = 3
    puts = [call for rank in save_steps(grade, ranks, [[1]]).ranks for call in rank.calls if call.name == "put"]
    commit = max(puts, key=lambda call: call.arrived, default=None)  # if it fails, other ranks may return
    for call in puts:
        own = [other for other in puts if other.rank == call.rank]
        place = own.index(call) + 1
        result = save_steps(grade, ranks, [[1, 2]], full=(call.rank, len(own) + place))
        where = f"{ranks} ranks save step 1; in step 2, the storage is full for put {place} of rank {call.rank}: "
        for rank, (_, second) in enumerate(result.values):
            if not second and (call is not commit or rank == call.rank):
                grade.fail(f"{where}save returns on rank {rank}, expected an OSError: its checkpoint is not complete")
        loaded = run(grade, load_all, [1] * 2, storages=result.storages, where=where)
        check_loaded(grade, where, [value[0] for value in loaded.values], 1, 1)
