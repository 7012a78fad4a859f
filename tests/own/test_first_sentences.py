"""The first sentence of a crash or a deadlock: what to change, where torch's words or the facts alone do not say it."""

import pytest

from grader import crashes
from grader.verdicts import verdict_of
from tests.own.inline_student import player

pytestmark = pytest.mark.medium


@pytest.fixture
def play(tmp_path):
    return player(tmp_path, 3)


def first_sentence(play, body):
    head = "def go(context):\n    context.join()\n    rank, g = context.rank, torch.ones(2)\n    "

    return str(verdict_of(play(head + body), "2a.3")).partition("\n")[0]


CRASHES = {
    "dist.all_reduce(None)": "leave out parameters that have no gradient",
    "g = dist.all_reduce(g) / 3": "dist.all_reduce returns None: it works in place",
    "dist.all_reduce(g).wait()": "a call returns a handle only with async_op=True",
    "g.requires_grad_(); g.mul_(2)": "write to it inside torch.no_grad()",
    "torch.ones(4).split(2)[0:1][0] = g; batches = g.split(1); batches[0] = g": "make a list of it",
}


@pytest.mark.parametrize("body", CRASHES)
def test_a_crash_says_first_what_to_change(play, body):
    assert CRASHES[body] in first_sentence(play, body)


def test_a_crash_that_nobody_knows_keeps_its_own_words(play):
    assert first_sentence(play, "raise ValueError('a word of its own')").startswith(
        "ranks 0-2 raised ValueError: a word"
    )


def test_the_reason_of_a_lesson_takes_the_place_of_the_general_one():
    text = crashes.explained("rank 0 raised AttributeError: 'NoneType' object has no attribute 'wait'", {})

    own = crashes.explained(text, {"attribute 'wait'": "receive() finds no handle"})

    assert own.splitlines() == ["receive() finds no handle", text.splitlines()[1]]


DEADLOCKS = {
    "dist.gather(g, [torch.ones(2) for _ in range(3)] if rank == 0 else None)\n    if rank == 0:\n"
    "        dist.scatter(g, [g] * 3)\n    else:\n        dist.gather(g)": "rank 0 calls scatter where ranks 1-2 call "
    "gather: all ranks must make the same calls in the same order",
    "dist.barrier()\n    if rank == 1:\n        dist.all_reduce(g)": "rank 1 calls all_reduce, but ranks 0, 2 never "
    "call it: all ranks must make the same calls",
}


@pytest.mark.parametrize("body", DEADLOCKS)
def test_a_deadlock_says_first_what_it_means(play, body):
    assert first_sentence(play, body) == DEADLOCKS[body]


def test_a_line_of_a_probe_is_not_taken_for_one_of_the_student(tmp_path):
    play = player(tmp_path, 1)

    result = play("def go(context):\n    context.event = 1\n    return {1: object()}\n")

    assert "task/run.py" not in result.explain()
    assert "(grader/wire/values.py:" in result.explain()
