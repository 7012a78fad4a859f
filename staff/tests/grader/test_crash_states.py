"""Storages that the grader keeps, and every content that a crash can leave in one."""

import pytest

from grader.crash_states import crash_states
from staff.tests.grader.inline_student import joined, player

pytestmark = pytest.mark.medium

TWO_PUTS = """
    storage = context.storage()
    if rank == 0:
        storage.put("a", 1)
    {between}
    if rank == 1:
        storage.put("b", 2)
"""
ORDERS = [  # what stands between a put of rank 0 and one of rank 1; whether b without a is possible
    ("pass", True),
    ("dist.barrier()", False),
    ("dist.all_reduce(g)", False),
    ("dist.broadcast(g, 0)", False),
    ("dist.broadcast(g, 1)", True),  # the root does not wait for the others
    ("dist.scatter(g, [g, g] if rank == 1 else None, src=1)", True),
    ("dist.gather(g, [g.clone(), g.clone()] if rank == 1 else None, dst=1)", False),
    ("dist.gather(g, [g.clone(), g.clone()] if rank == 0 else None, dst=0)", True),
    ("dist.send(g, 1) if rank == 0 else dist.recv(g, 0)", False),
    ("dist.recv(g, 1) if rank == 0 else dist.send(g, 0)", True),
    ("handle = dist.all_reduce(g, async_op=True)", True),  # it is never waited for
    ("dist.all_reduce(g, async_op=True).wait()", False),
    ("while rank == 1 and not storage.list('a'): pass", False),  # who has read it comes after it
    ("while rank == 1 and not storage.list(): pass", False),
]


@pytest.mark.parametrize(("between", "possible"), ORDERS, ids=[between for between, _ in ORDERS])
def test_a_collective_orders_changes_exactly_as_far_as_it_waits(between, possible, tmp_path):
    result = player(tmp_path, 2)(joined(TWO_PUTS.format(between=between)))
    contents = {tuple(sorted(state.content)) for state in crash_states(result, "saved")}

    assert result.explain() == ""
    assert contents - {("b",)} == {(), ("a",), ("a", "b")}
    assert (("b",) in contents) is possible


def test_a_state_counts_the_events_that_all_ranks_can_have_passed(tmp_path):
    play = player(tmp_path, 2)
    result = play(
        joined(
            """
            for step in range(2):
                context.storage().put(f"{step}/{rank}", step)
                dist.barrier()
                context.event("saved")
            """
        )
    )
    passed = {tuple(sorted(state.content)): state.passed for state in crash_states(result, "saved")}

    assert passed[()] == passed["0/0",] == passed["0/1",] == 0
    assert passed["0/0", "0/1"] == passed["0/0", "0/1", "1/1"] == 1
    assert passed["0/0", "0/1", "1/0", "1/1"] == 2
    assert len(passed) == 7


def test_a_storage_keeps_values_starts_with_what_it_is_given_and_can_be_full(tmp_path):
    play = player(tmp_path, 2)
    source = joined(
        """
        storage, other = context.storage(), context.storage(1)
        if rank == 0:
            storage.put("x/a", {"values": g})
            other.put("kept elsewhere", 1)
            storage.put("b", 1)
            storage.delete("b")
            storage.delete("was never there")
        dist.barrier()
        seen = [storage.list(), storage.list("x/"), other.list(), storage.get("x/a")["values"].tolist()]
        for name in ("b", "a name\\nof two lines"):
            try:
                storage.get(name)
            except (FileNotFoundError, ValueError) as error:
                seen.append(type(error).__name__)
        return seen
        """
    )
    result = play(source, storages=[{"old": b"bytes"}, {}])
    seen = [["old", "x/a"], ["x/a"], ["kept elsewhere"], [1, 1], "FileNotFoundError", "ValueError"]

    assert result.values == [seen, seen]
    assert result.storages[0].keys() == {"old", "x/a"} and result.storages[0]["old"] == b"bytes"

    none = play(joined("context.storage().put('a', 1)"), storages=())
    assert "MessageError" in none.explain()

    full = play(joined("for i in range(3): context.storage().put(str(i), g)"), full=(1, 2))
    assert "rank 1 raised OSError: [Errno 28] No space left on device: '1'" in full.explain()
    assert full.storages[0].keys() == {"0", "1", "2"}  # those of rank 0
