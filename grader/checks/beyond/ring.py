"""Judges both halves of the ring: what each rank holds afterwards, and every message that goes around.

Inputs are drawn for each rank alone. Messages are what the broker has carried: they are compared with the partial sums
that numpy computes, round by round.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from grader.checks import averages, diagnosis
from grader.grading import Grade
from grader.ranks.calls import Call
from grader.ranks.outcome import Result
from grader.ranks.phrases import short
from grader.verdicts import Deadlocked
from grader.wire import drawn

FILE = "beyond/ring.py"
NO_RING = "use only send and recv (or isend and irecv)"
SUM, GATHER = "reduce_scatter", "all_gather"
EVEN = ((12, "float32"),)
PLAIN = ((12, "float32"), (97, "float32"))
ODD = ((2, "float32"), (5, "float64"), (1, "float32"), (41, "bfloat16"), (10, "int64"))
LARGE = ((700_001, "float32"), (0, "float32"), (7, "float16"))  # 2.8 MB
Cases = Sequence[tuple[int, str]]  # (length, dtype)
Rounds = list[list[tuple[int, np.ndarray]]]  # [rank][round]: the number of the chunk that is sent, and its values
SLACK = {"float32": 1e-5, "float64": 1e-12, "bfloat16": 0.03, "float16": 0.004, "int64": 0.0}


def cut(length: int, parts: int) -> list[slice]:
    """`parts` slices whose lengths differ by at most one, the longer ones first."""
    ends = [i * (length // parts) + min(i, length % parts) for i in range(parts + 1)]
    return [slice(ends[i], ends[i + 1]) for i in range(parts)]


@cache
def inputs(seed: int, world_size: int, cases: Cases) -> list[list[np.ndarray]]:
    """[rank][case]"""
    return [
        [_drawn(drawn.generator(seed, 11, rank, i), *case) for i, case in enumerate(cases)]
        for rank in range(world_size)
    ]


def _drawn(draw: np.random.Generator, length: int, dtype: str) -> np.ndarray:
    """Whole numbers in bfloat16 and float16, small enough for exact sums."""
    if dtype in ("float32", "float64"):
        return draw.normal(size=length).astype(dtype)
    return draw.integers(-8, 9, length).astype("int64" if dtype == "int64" else "float32")


def _run(grade: Grade, half: str, world_size: int, cases: Cases, tensors: list[Any]) -> Result:
    each = [{"tensors": mine, "dtypes": [dtype for _, dtype in cases]} for mine in tensors]
    result = grade.run(
        f"grader.probes.beyond.ring:{half}",
        world_size,
        payloads=True,
        each=each,
        cases=list(map(list, cases)),
    )
    verdict = grade.verdict(result)
    if isinstance(verdict, Deadlocked) and (cause := _why_nobody_sends(result)):
        raise Deadlocked(f"{cause}\n{verdict}")
    grade.must_return(result)
    _must_be_messages(grade, result)
    return result


def _must_be_messages(grade: Grade, result: Result) -> None:
    """A collective of torch gives the same values without a ring; one that moves nothing is judged with the rounds."""
    for rank in result.ranks:
        others = (call for call in rank.calls if call.name not in ("init_process_group", "barrier", "send", "recv"))
        if call := next(others, None):
            grade.fail(f"rank {rank.rank} calls {call.name} ({call.where}): {NO_RING}")


def _why_nobody_sends(result: Result) -> str:
    """What is wrong with a ring in which all wait, in words; "" if it is none of the known mistakes."""
    n = len(result.ranks)
    for rank in result.ranks:
        for call in rank.calls:
            right = (rank.rank + (1 if call.name == "send" else n - 1)) % n
            if call.point_to_point and call.root != right:
                way = f"{'sends to' if call.name == 'send' else 'receives from'} rank {call.root}"
                side = "right" if call.name == "send" else "left"
                return f"rank {rank.rank} of {n} {way} ({call.where}); its {side} neighbour is rank {right}"
    waits = [rank.call for rank in result.ranks if rank.call]
    if len(waits) == n and all(call.name == "send" for call in waits):
        return "every rank waits for its send to complete, but no rank receives: start both, then wait"
    return ""


# --- b.1 ---


def check_sums(grade: Grade, world_size: int, cases: Cases) -> None:
    """chunks[rank] is the sum over all ranks, in flat itself; the chunks are flat, cut evenly."""
    given = inputs(grade.seed, world_size, tuple(cases))
    result = _run(grade, SUM, world_size, cases, given)
    for i, (length, dtype) in enumerate(cases):
        where = f"{world_size} ranks, {length} elements of {dtype}"
        for rank, value in enumerate(result.values):
            found = value[i]
            if "type" in found:
                grade.fail(f"{where}: expected a list of {world_size} chunks, got {found['type']}")
            lengths = [chunk.size for chunk in found["chunks"]]
            right = [part.stop - part.start for part in cut(length, world_size)]
            if sorted(lengths) != sorted(right):
                even = "lengths that differ by at most one"
                rounded = len(lengths) > 1 and set(lengths[:-1]) == {-(-length // world_size)}
                cause = "; torch.chunk rounds up, and may give fewer chunks" if rounded else ""
                grade.fail(f"{where}: expected chunks of {even}, such as {right}, got {short(lengths, 100)}{cause}")
            begin = sum(lengths[:rank])
            own = slice(begin, begin + lengths[rank])
            lost = diagnosis.forgotten_waits(result)
            _check_own(
                grade, f"{lost}\n{where}" if lost else where, rank, [mine[i] for mine in given], own, found, dtype
            )


def _check_own(
    grade: Grade, where: str, rank: int, given: list[np.ndarray], own: slice, found: dict, dtype: str
) -> None:
    chunk, flat = np.asarray(found["chunks"][rank], np.float64), np.asarray(found["flat"], np.float64)
    parts = [np.asarray(mine, np.float64)[own] for mine in given]
    total = np.sum(parts, axis=0)
    if not _close(chunk, total, dtype):
        words = diagnosis.parameter_words(f"chunks[{rank}]", chunk, total)
        grade.fail(f"{where}: {_name(found, parts, given, rank)}on rank {rank}, {words}")
    if not _close(flat[own], total, dtype):
        grade.fail(
            f"{where}: chunks[{rank}] holds the sum on rank {rank}, but flat does not: the chunks must be views of "
            "flat (split makes some), and the sum must be added in place (+=)"
        )


def _close(got: np.ndarray, right: np.ndarray, dtype: str) -> bool:
    return got.shape == right.shape and bool(np.all(np.abs(got - right) <= SLACK[dtype] * (1 + np.abs(right))))


def _name(found: dict, parts: list[np.ndarray], given: list[np.ndarray], rank: int) -> str:
    """The mistake that leaves this in place of the sum of `parts`."""
    n, chunk, whole, end = len(parts), found["chunks"][rank], np.sum(given, axis=0), 0
    for k, other in enumerate(found["chunks"]):
        end += other.size
        if other.size and np.allclose(other, whole[end - other.size : end], rtol=1e-4, atol=1e-6):
            return f"rank {rank} completes chunk {k} instead of its own: first send your left neighbour's own chunk; "
    known = {
        "nothing was added: it is only the rank's own part; after N-1 rounds it must contain all parts": parts[rank],
        "it is the mean; the ring gives the sum": np.sum(parts, axis=0) / n,
        "the rank's own part is missing from the sum": np.sum(parts, axis=0) - parts[rank],
        "only the left neighbour's own part was added, not its partial sum": parts[rank] + parts[rank - 1],
        **{f"rank {k}'s part has replaced what was there, instead of being added": parts[k] for k in range(n)},
    }
    for name, value in known.items():
        if chunk.shape == value.shape and np.allclose(chunk, value, rtol=1e-4, atol=1e-6) and chunk.size:
            return f"{name}; "
    return "the partial sums in the messages are wrong; "


def check_rounds_of_sums(grade: Grade) -> None:
    """A chunk sets out at its owner's right neighbour, and each rank on its way adds its part and passes it on."""
    for world_size in (3, 4):
        given = inputs(grade.seed, world_size, PLAIN)
        check_sums(grade, world_size, PLAIN)
        result = _run(grade, SUM, world_size, PLAIN, given)
        for i, (length, _) in enumerate(PLAIN):
            lengths = [chunk.size for chunk in result.values[0][i]["chunks"]]
            ends = [sum(lengths[:k]) for k in range(world_size + 1)]
            expected: Rounds = [[] for _ in range(world_size)]
            ways = [[*range(owner + 1, world_size), *range(owner + 1)] for owner in range(world_size)]
            for hop in range(world_size - 1):
                for owner, way in enumerate(ways):
                    parts = [given[rank][i][ends[owner] : ends[owner + 1]] for rank in way[: hop + 1]]
                    expected[way[hop]].append((owner, np.sum(np.asarray(parts, np.float64), axis=0)))
            _check_messages(grade, SUM, length, [sends[i] for sends in _sends(grade, result)], expected)


# --- b.2 ---


def chunks(seed: int, world_size: int, cases: Cases) -> tuple[list[list[list[np.ndarray]]], list[list[np.ndarray]]]:
    """([rank][case][chunk] before, [case][chunk] afterwards): on each rank only its own chunk is right."""
    given = inputs(seed, world_size, tuple(cases))
    cuts = [cut(length, world_size) for length, _ in cases]
    before = [[[mine[i][part] for part in parts] for i, parts in enumerate(cuts)] for mine in given]
    return before, [[given[owner][i][part] for owner, part in enumerate(parts)] for i, parts in enumerate(cuts)]


def check_gathered(grade: Grade, world_size: int, cases: Cases) -> None:
    """Every rank ends with every rank's own chunk, bit by bit, in the tensors that it was given."""
    before, right = chunks(grade.seed, world_size, cases)
    result = _run(grade, GATHER, world_size, cases, before)
    for i, (length, dtype) in enumerate(cases):
        for rank, value in enumerate(result.values):
            for k, (got, expected) in enumerate(zip(value[i], right[i], strict=True)):
                if np.array_equal(got, expected):
                    continue
                where = f"{world_size} ranks, {length} elements of {dtype}, rank {rank}: "
                words = diagnosis.parameter_words(f"chunks[{k}]", got, expected)
                lost = diagnosis.forgotten_waits(result)
                words += f"\n{lost}" if lost else ""
                grade.fail(where + _name_gathered(got, before, i, k, rank) + words)


def _name_gathered(got: np.ndarray, before: list[list[list[np.ndarray]]], i: int, k: int, rank: int) -> str:
    if np.array_equal(got, before[rank][i][k]):
        return (
            "the chunk was not replaced: receive every chunk into its own memory, in N-1 rounds "
            "(assigning to a variable does not change a tensor); "
        )
    way = [*range(k, len(before)), *range(k)]
    passed = [before[one][i][k] for one in way[: way.index(rank) + 1]]
    if got.shape == passed[0].shape and np.allclose(got, np.sum(passed, axis=0)):
        return "the received values are added to the chunk: here they must replace it; "
    if any(np.array_equal(got, mine[i][k]) for mine in before):
        return "it is another rank's version of this chunk, not its owner's: which chunk is complete on which rank? "
    return "a chunk is received into the wrong place: count both indices down from your rank; "


def check_rounds_of_copies(grade: Grade) -> None:
    """A chunk sets out at its owner, and each rank on its way passes it on."""
    for world_size in (3, 4):
        check_gathered(grade, world_size, PLAIN)
        before, right = chunks(grade.seed, world_size, PLAIN)
        result = _run(grade, GATHER, world_size, PLAIN, before)
        for i, (length, _) in enumerate(PLAIN):
            expected: Rounds = [[] for _ in range(world_size)]
            ways = [[*range(owner, world_size), *range(owner)] for owner in range(world_size)]
            for hop in range(world_size - 1):
                for owner, way in enumerate(ways):
                    expected[way[hop]].append((owner, right[i][owner]))
            _check_messages(grade, GATHER, length, [sends[i] for sends in _sends(grade, result)], expected)


def check_whole(grade: Grade) -> None:
    """The gradients of a model, averaged by the whole ring, for 2(N-1)/N S bytes of each rank."""
    for setting, world_size in ((averages.ODD, 3), (averages.PLAIN, 4), (averages.LARGE, 2), (averages.PLAIN, 1)):
        averages.check_mean(grade, "average_gradients", setting, (world_size,))
        result = averages.averaged(grade, "average_gradients", world_size, setting)
        sent = [sum(call.price for call in rank.calls if call.name == "send") for rank in result.ranks]
        size = averages.size_of(setting)
        right = sum(size + size for _ in range(1, world_size))  # in each half, every chunk goes to all other ranks
        if sum(sent) != right or max(sent) > 1.1 * right / world_size + 100:
            grade.fail(
                f"{world_size} ranks send {[int(x) for x in sent]} bytes, expected {right} in all: 2(N-1)/N S each"
            )
    averages.check_mean(grade, "average_gradients", averages.HALF[0], (3,))


# --- both ---


def _sends(grade: Grade, result: Result) -> list[list[list[Call]]]:
    """[rank][case]: the sends, all to the right neighbour; receives are from the left one; nothing else is called."""
    n, found = len(result.ranks), []
    for rank in result.ranks:
        parts: list[list[Call]] = []
        for event in rank.events:
            if event.name == "begin":
                parts.append([])
            if not isinstance(event, Call) or event.name == "init_process_group":
                continue
            peer = (rank.rank + 1) % n if event.name == "send" else (rank.rank - 1) % n
            if not event.point_to_point:
                grade.fail(f"rank {rank.rank} calls {event.name} ({event.where}): {NO_RING}")
            if event.root != peer:
                sends = event.name == "send"
                way = "send to its right neighbour" if sends else "receive from its left neighbour"
                got = f"{event.name} {'to' if sends else 'from'} rank {event.root}"
                grade.fail(f"rank {rank.rank} of {n} must {way}, rank {peer}: got {got} ({event.where})")
            if event.name == "send":
                parts[-1].append(event)
        found.append(parts)
    return found


def _check_messages(grade: Grade, half: str, length: int, sends: list[list[Call]], expected: Rounds) -> None:
    for rank, (mine, rounds) in enumerate(zip(sends, expected, strict=True)):
        where = f"{half} of {length} elements on {len(sends)} ranks: rank {rank}"
        if len(mine) != len(rounds):
            grade.fail(f"{where} sends {len(mine)} messages, expected {len(rounds)}: one chunk in each of N-1 rounds")
        for step, (call, (index, right)) in enumerate(zip(mine, rounds, strict=True)):
            got = call.sent_arrays().ravel().astype(np.float64)
            if got.shape != right.shape or not np.allclose(got, right, rtol=1e-5, atol=1e-5):
                what = "its partial sum" if half == SUM else "its final values"
                words = f"{got.size} elements" if got.shape != right.shape else "wrong values"
                grade.fail(
                    f"{where} sends {words} in round {step} ({call.where}); expected chunk {index} "
                    f"({right.size} elements) with {what}"
                )
