"""The broker: what it says when the calls of the ranks do not fit together, or cannot be right."""

import pytest

from grader.verdicts import verdict_of
from staff.tests.grader.inline_student import joined

pytestmark = pytest.mark.medium

RANKS = 3


# --- wrong calls ------------------------------------------------------------------------------------------------------


MISMATCHES = {
    "shape": ("dist.all_reduce(torch.ones(2 + (rank == 1)))", ["shapes", "ranks 0, 2 call", "(2,)", "rank 1 calls"]),
    "dtype": ("dist.all_reduce(g.double() if rank else g)", ["dtypes", "rank 0 calls", "float32", "float64"]),
    "root": ("dist.reduce(g, min(rank, 1))", ["roots", "to rank 0", "ranks 1-2 call", "to rank 1"]),
    "reduction": ("dist.all_reduce(g, dist.ReduceOp.AVG if rank == 2 else dist.ReduceOp.SUM)", ["SUM", "AVG"]),
    "recv": ("dist.send(g, 1) if rank == 0 else dist.recv(torch.ones(3), 0) if rank == 1 else 0", ["shapes", "recv"]),
}


@pytest.mark.parametrize("name", MISMATCHES)
def test_a_mismatch_is_said_to_be_one(play, name):
    body, words = MISMATCHES[name]

    result = play(joined(body))

    assert result.outcome == "mismatch"
    assert "task/run.py:7" in result.explain()
    assert [word for word in words if word not in result.explain()] == []


@pytest.mark.parametrize(("call", "words"), [
    ("rank=0, world_size=3, init_method='tcp://h:1'", ["3 processes were started, but ranks 1-2 join as rank 0 of 3"]),
    ("rank=context.rank, world_size=4, init_method='tcp://h:1'", ["joins as rank 0 of 4", "joins as rank 2 of 4"]),
    ("rank=context.rank, world_size=3, init_method=f'tcp://h:{context.rank}'", ["different addresses", "h:0", "h:2"]),
])  # fmt: skip
def test_ranks_that_would_not_meet_are_told_so(play, call, words):
    result = play(f"def go(context):\n    dist.init_process_group('gloo', {call})\n")

    assert result.outcome == "mismatch"
    assert [word for word in words if word not in result.explain()] == []


RAISED = {
    "coalesced": ("dist.all_reduce_coalesced([g])", "all_reduce_coalesced is not supported by the graders"),
    "one tensor n times": ("dist.gather(g, [torch.zeros(2)] * n if rank == 0 else None)", "more than once"),
    "list on every rank": ("dist.gather(g, [torch.zeros(2) for _ in range(n)])", "ranks 1-2 raised ValueError"),
    "list too short": ("dist.gather(g, [g + 1, g + 2] if rank == 0 else None)", "3 in all, got 2"),
    "other shape in the list": ("dist.scatter(g, [torch.zeros(1, 2)] * n if rank == 0 else None)", "(1, 2)"),
    "holes": ("dist.all_reduce(torch.arange(6.0)[::2])", "holes"),
    "twice": ("context.join()", "twice"),
}


@pytest.mark.parametrize("name", RAISED)
def test_a_call_that_one_rank_can_see_to_be_wrong_raises_in_its_line(play, name):
    body, words = RAISED[name]

    result = play(joined(body))

    assert result.outcome == "raised"
    assert words in result.explain()
    assert "(task/run.py:7)" in result.explain()
    assert verdict_of(result, "2a.3").status == ("wrong" if "gloo" in result.explain() else "crashed")


def test_what_an_asynchronous_call_receives_is_nan_until_its_wait(play):
    call = "parts = [0 * g for _ in range(n)]\nwork = dist.all_gather(parts, g, async_op=True)"

    result = play(joined(f"{call}\nearly = 1 * parts[2]\nwork.wait()\nreturn torch.cat([early, parts[2]])"))

    assert [str(number) for number in result.values[1]] == ["nan", "nan", "1.0", "1.0"]


# --- deadlocks --------------------------------------------------------------------------------------------------------

DEADLOCKS = {
    "other order": (
        """
        dist.gather(g, [g.clone() for _ in range(n)] if rank == 0 else None)
        if rank == 0:
            dist.scatter(g, [g] * n)
        else:
            dist.gather(g)
        """,
        "deadlock: rank 0 waits in scatter #2 (task/run.py:9); ranks 1-2 wait in gather #2 (:11)",
    ),
    "one call too many": (
        "dist.all_reduce(g)\nif rank == 1:\n    dist.barrier()",
        "deadlock: rank 1 waits in barrier #2 (task/run.py:9); ranks 0, 2 have already returned",
    ),
    "raise": (
        "if rank == 1:\n    raise KeyError('p')\ndist.barrier()",
        "rank 1 raised KeyError: 'p' (task/run.py:8); ranks 0, 2 wait in barrier #1 (:9)",
    ),
    "collective in DDP": (
        """
        ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
        loss = ddp(g.view(1, 2)).sum()
        if rank != 1:
            loss.backward()
        """,
        "deadlock: ranks 0, 2 wait in all_reduce #4 (task/run.py:10); rank 1 has already returned",
    ),
}


@pytest.mark.parametrize("name", DEADLOCKS)
def test_a_deadlock_is_told_with_rank_call_number_and_line(play, name):
    body, expected = DEADLOCKS[name]

    result = play(joined(body))

    assert result.explain() == expected
    assert "deadlock" not in str(verdict_of(result, "2a.3"))  # which its status says already


def test_a_call_that_needs_a_rank_that_is_gone_is_hopeless_even_while_another_computes(play):
    body = """
        if rank == 2:
            return
        while rank == 1:
            pass
        dist.barrier()
    """

    text = play(joined(body)).explain()

    assert text.startswith("deadlock: rank 0 waits in barrier #1 (task/run.py:11); rank 1 was still running (:")
    assert text.endswith("; rank 2 has already returned")


def test_a_released_rank_that_swallows_the_error_does_not_pass(play):
    body = """
        if rank == 2:
            return 1
        try:
            dist.all_reduce(g)
        except RuntimeError:
            pass
        return 1
    """

    result = play(joined(body))

    assert [rank.outcome for rank in result.ranks] == ["stuck", "stuck", "returned"]
    with pytest.raises(RuntimeError, match="ranks 0-1 wait in all_reduce"):
        _ = result.values


# --- the first sentence: what to change, where torch's words or the facts alone do not say it -------------------------


FIRST_SENTENCES = {
    "dist.all_reduce(None)": "leave out parameters that have no gradient",
    "g = dist.all_reduce(g) / 3": "dist.all_reduce returns None: it works in place",
    "dist.all_reduce(g).wait()": "a call returns a handle only with async_op=True",
    "g.requires_grad_(); g.mul_(2)": "write to it inside torch.no_grad()",
    "torch.ones(4).split(2)[0:1][0] = g; batches = g.split(1); batches[0] = g": "make a list of it",
    "dist.all_reduce(g, n)": "the second positional argument of all_reduce is op",
    "dist.destroy_process_group(); dist.init_process_group('gloo', rank, n)": "pass rank= and world_size= by name",
    "raise ValueError('a word of its own')": "ranks 0-2 raised ValueError: a word",  # nobody knows it
    "dist.gather(g, [torch.ones(2) for _ in range(3)] if rank == 0 else None)\n"
    "dist.scatter(g, [g] * 3) if rank == 0 else dist.gather(g)": "rank 0 calls scatter where ranks 1-2 call gather: "
    "all ranks must make the same calls in the same order",
    "dist.barrier()\nif rank == 1:\n    dist.all_reduce(g)": "rank 1 calls all_reduce, but ranks 0, 2 never call it: "
    "all ranks must make the same calls",
}


@pytest.mark.parametrize("body", FIRST_SENTENCES)
def test_a_crash_or_a_deadlock_says_first_what_to_change(play, body):
    assert FIRST_SENTENCES[body] in str(verdict_of(play(joined(body)), "2a.3")).partition("\n")[0]
