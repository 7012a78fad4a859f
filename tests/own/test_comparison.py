"""What the rows of several ranks say together, and when it is too early to say that nobody can continue."""

import socket

import pytest

from common.workers.comparison import conclude, is_deadlock
from common.workers.pulse import bytes_moved
from common.workers.rows import COMPUTES, DIED, FINISHED, IDLE, STOPPED, WAITS, Calls, Row


def row(rank, state=WAITS, calls=(), per_iteration=2, first=0, **fields):
    """A row whose calls are divided evenly over iterations 1, 2, ..."""
    of_iteration, total = {}, {}
    for number, call in enumerate(calls):
        cell = of_iteration.setdefault(1 + number // per_iteration, {})
        for counts in (cell, total):
            counts[call.split()[0]] = counts.get(call.split()[0], 0) + 1
    starts = [(1 + number // per_iteration, number) for number in range(0, len(calls), per_iteration)]
    history = Calls(total, of_iteration, first, list(calls), starts)
    return Row(rank, state, number=first + len(calls) - 1 if calls else None, calls=history, **fields)


GATHER, SCATTER, SUM, OTHER = "gather", "scatter", "all_reduce (3)", "all_reduce (5)"


def test_ranks_in_the_same_call_are_not_deadlocked_however_long_it_takes():
    assert not is_deadlock([row(rank, calls=[SUM, SUM]) for rank in range(3)])


@pytest.mark.parametrize("state", [COMPUTES, IDLE])
def test_nobody_is_deadlocked_while_one_rank_may_still_come(state):
    assert not is_deadlock([row(0, calls=[GATHER]), row(1, calls=[GATHER, SCATTER]), row(2, state)])


def test_ranks_in_different_calls_are_deadlocked():
    assert is_deadlock([row(0, calls=[SUM]), row(1, calls=[SUM, SUM])])
    assert is_deadlock([row(0, calls=[SUM]), row(1, calls=["broadcast (3)"])])


def test_a_rank_that_has_finished_leaves_the_others_deadlocked():
    assert is_deadlock([row(0, FINISHED, calls=[SUM]), row(1, calls=[SUM, SUM])])


def test_ranks_that_have_all_finished_are_not_deadlocked():
    assert not is_deadlock([row(0, FINISHED, calls=[SUM]), row(1, FINISHED, calls=[SUM])])


def test_a_call_too_many_is_named():
    rows = [row(0, calls=[SUM, OTHER, SUM, OTHER]), row(1, calls=[SUM, OTHER, OTHER, SUM])]
    rows.append(row(2, calls=[SUM, OTHER, SUM, OTHER]))

    assert conclude(rows).startswith("rank 1 left out all_reduce (3) in iteration 2")


def test_a_rank_behind_the_others_has_not_left_out_what_it_may_still_call():
    said = conclude([
        row(0, calls=[SUM, SUM, SUM]),
        row(1, calls=[SUM, SUM, SUM]),
        row(2, STOPPED, calls=[SUM, SUM], place="run_glue.py:7"),
    ])  # fmt: skip

    assert said == "ranks 0 and 1 wait for rank 2: rank 2 is stopped at run_glue.py:7"


def test_a_death_is_told_after_the_difference_that_may_have_caused_it():
    rows = [row(0, DIED, note="see its own output"), row(1, calls=[SUM, OTHER, OTHER]), row(2, calls=[SUM, OTHER, SUM])]

    said = conclude(rows)

    assert said == "rank 1 left out all_reduce (3) in iteration 2; rank 0 died (see its own output)"


def test_a_row_survives_its_way_through_the_store():
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
