"""What the rows of several ranks say together, and when it is too early to say that nobody can continue."""

import socket
from collections import Counter

import pytest

from common.workers.collectives import element_bytes
from common.workers.comparison import conclude, is_deadlock
from common.workers.pulse import bytes_moved
from common.workers.rows import COMPUTES, DIED, FINISHED, IDLE, SILENT, STOPPED, WAITS, Calls, Row


def row(rank, state=WAITS, calls=(), per_iteration=2, **fields):
    """A row whose calls are divided evenly over iterations 1, 2, ..."""
    starts = range(0, len(calls), per_iteration)
    of_iteration = {1 + n: list(calls[start : start + per_iteration]) for n, start in enumerate(starts)}
    history = Calls(dict(Counter(call.split()[0] for call in calls)), 1, len(starts), of_iteration)
    return Row(rank, state, collective=f"{len(calls)} {calls[-1]}" if calls else "", calls=history, **fields)


GATHER, SCATTER, SUM, OTHER = "gather", "scatter", "all_reduce (3)", "all_reduce (5)"


@pytest.mark.parametrize(("rows", "deadlocked"), [
    ([row(rank, calls=[SUM, SUM]) for rank in range(3)], False),  # in the same call, however long it takes
    ([row(0, calls=[GATHER]), row(1, calls=[GATHER, SCATTER]), row(2, COMPUTES)], False),  # one may still come
    ([row(0, calls=[GATHER]), row(1, calls=[GATHER, SCATTER]), row(2, IDLE)], False),
    ([row(0, calls=[SUM]), row(1, calls=[SUM, SUM])], True),
    ([row(0, calls=[SUM]), row(1, calls=["broadcast (3)"])], True),
    ([row(0, FINISHED, calls=[SUM]), row(1, calls=[SUM, SUM])], True),
    ([row(0, FINISHED, calls=[SUM]), row(1, FINISHED, calls=[SUM])], False),
])  # fmt: skip
def test_ranks_are_deadlocked_when_none_of_them_can_come_to_the_others(rows, deadlocked):
    assert is_deadlock(rows) is deadlocked


ABAB = [SUM, OTHER, SUM, OTHER]


@pytest.mark.parametrize(("rows", "conclusion"), [
    (
        [row(0, calls=ABAB), row(1, calls=[SUM, OTHER, OTHER, SUM]), row(2, calls=ABAB)],
        "rank 1 left out all_reduce (3) in iteration 2",
    ),
    (  # a rank behind the others has not left out what it may still call
        [row(0, calls=[SUM] * 3), row(1, calls=[SUM] * 3), row(2, STOPPED, calls=[SUM] * 2, place="run_glue.py:7")],
        "ranks 0 and 1 wait for rank 2: rank 2 is stopped at run_glue.py:7",
    ),
    (  # the difference that may have caused a death comes first
        [row(0, DIED, note="see its own output"), row(1, calls=[SUM, OTHER, OTHER]), row(2, calls=[SUM, OTHER, SUM])],
        "rank 1 left out all_reduce (3) in iteration 2; rank 0 died (see its own output)",
    ),
    (
        [row(0, calls=ABAB), row(1, calls=[SUM, OTHER, GATHER, SUM]), row(2, calls=ABAB)],
        "rank 1 called one more: gather in iteration 2",
    ),
    (
        [row(rank, calls=[SUM] * (4 if rank == 1 else 2), per_iteration=3 if rank == 1 else 1) for rank in range(3)],
        "rank 1 has made 4 all_reduces, the others 2: it made 2 too many in iteration 1",
    ),
    (  # neither is in the majority
        [row(0, calls=[SUM]), row(1, calls=[OTHER])],
        "rank 0 called all_reduce (3), rank 1 called all_reduce (5) in iteration 1, call 1: all ranks must",
    ),
    ([row(0, calls=[SUM]), row(1, FINISHED, calls=[SUM])], "rank 1 has finished"),
    ([row(0, calls=[SUM]), row(1, SILENT), row(2, calls=[SUM])], "ranks 0 and 2 wait for rank 1: rank 1 is silent"),
], ids=[
    "a call left out", "a rank behind", "a death", "one more", "too many", "two calls", "the end", "no answer",
])  # fmt: skip
def test_the_conclusion_names_the_rank_and_the_call(rows, conclusion):
    assert conclude(rows).startswith(conclusion)


@pytest.mark.parametrize(("names", "size"), [
    (["Long", "long int", "Double", "double"], 8),
    (["Float", "float", "Int", "int"], 4),
    (["Half", "c10::Half", "BFloat16", "c10::BFloat16", "Short", "short int"], 2),
    (["Byte", "unsigned char", "Char", "signed char", "Bool", "bool"], 1),
    (["", "TensorList", "Scalar", "nothing of the kind"], 0),
])  # fmt: skip
def test_the_recorder_and_the_profiler_name_dtypes_in_two_ways(names, size):
    assert [element_bytes(name) for name in names] == [size] * len(names)


def test_a_row_survives_its_way_to_another_rank():
    sent = row(3, calls=[SUM, OTHER, SUM], place="run_glue.py:7", iteration=2, takes_part=True)

    assert Row.from_json(sent.to_json()) == sent


def test_bytes_move_only_when_something_is_sent_and_the_store_does_not_count():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as left, server.accept()[0] as right:
            before, elsewhere = bytes_moved(), bytes_moved([port])
            assert bytes_moved() == before

            left.sendall(b"x" * 1000)
            right.recv(1000)

            assert bytes_moved() >= before + 1000
            assert bytes_moved([port]) == elsewhere
