"""What one hand-in may cost its graders: memory, time, and texts that cannot be shown."""

import sys

import pytest

from grader.ranks.broker import MAX_EVENTS
from grader.ranks.one_run import MAX_KEPT
from grader.report import LONGEST_TEXT, clip
from grader.wire import values

pytestmark = pytest.mark.medium

RANKS = 1
TOO_MUCH = {
    "values of all ranks": (
        "context.event('a', x=(x := torch.zeros(15 << 20, dtype=torch.uint8)))\n    return {'x': x}", 8,
        "more than 192 MiB, the limit of",
    ),
    "calls without data": (
        "context.join()\n    while True:\n        torch.distributed.barrier()", 2,
        "made more than 200 calls without data, such as barriers: does a loop in your code never end?",
    ),
    "calls": (
        "while True:\n        context.event('note')", 1,
        f"rank 0 made more than {MAX_EVENTS} calls that the grader records: does a loop in your code never end?",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TOO_MUCH)
def test_what_a_run_sends_has_a_limit(play, name):
    body, world_size, words = TOO_MUCH[name]

    result = play(f"def go(context):\n    {body}\n", world_size)

    assert result.outcome == "raised" and words in result.explain()
    assert sum(rank.value["x"].nbytes for rank in result.ranks if rank.value) <= MAX_KEPT
    assert result.took_too_long or "values" in name  # then the region's other tests wait for 2 s at most


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not limit data alone")
def test_a_loop_that_fills_memory_ends_before_the_machine_has_none_left(play):
    result = play("def go(context):\n    kept = []\n    while True:\n        kept += [0] * 1_000_000\n")

    assert "MemoryError: more than 1 GB was used: does a loop in your code never end?" in result.explain()


def test_names_and_messages_of_any_length_come_clipped(play):
    source = """
        Long = type("X" * 900_000, (Exception,), {})

        def go(context):
            if context.rank:
                raise Long("y" * 900_000)
            return {"z" * 900_000: Long.__name__}
    """

    raised, returned = play(source, 2), play(source, 1)

    assert len(raised.explain()) < 1000
    ((key, value),) = returned.values[0].items()
    assert len(key) < values.MAX_TEXT + 100 and len(value) < values.MAX_TEXT + 100
    assert len(clip("x" * 10**6)) <= LONGEST_TEXT + 10
    assert clip("got <generator object f at 0x7fd8597282d0>") == "got <generator object f>"  # no address of an object
