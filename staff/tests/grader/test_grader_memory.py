"""How much memory a rank has, as the process that started it sees it, and when that is too much."""

import sys

import pytest

from common.paths import ROOT
from grader import memory_limits
from grader.in_rank import in_rank, run_to_any_end
from grader.verdicts import Wrong
from staff.tests.grader.inline_student import view_of

pytestmark = [
    pytest.mark.medium, pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
]  # fmt: skip

RANKS = 2
MB = 1_000_000
LARGE = 655_360  # elements, 2.6 MB


def measured(play, lines, world_size=2):
    """The memory of every rank at each point, in MB, and the run."""
    body = "".join(f"    {line}\n" for line in lines.strip().splitlines())
    result = play(f"def go(context):\n    measure = context.measure\n{body}", world_size, measures=True)
    return {point: [size / MB for size in taken] for point, taken in result.memory.items()}, result


def test_of_each_rank_a_tensor_counts_when_it_is_written_and_no_more_when_it_is_freed(play):
    memory, result = measured(
        play,
        f"""
measure("before")
kept = [torch.ones({LARGE} * (1 + context.rank)) for _ in range(8)]
measure("whole")
del kept[2:]
measure("two")
kept[0].untyped_storage().resize_(0)
measure("one")
import mmap
shared = mmap.mmap(-1, 1 << 22)
shared.write(b"x" * (1 << 22))
measure("shared")
""",
    )

    assert result.explain() == ""
    for rank in range(2):
        before, whole, two, one, shared = (memory[point][rank] for point in memory)
        expected = [size * (1 + rank) for size in (20.97, 5.24, 2.62)]
        assert [whole - before, two - before, one - before] == pytest.approx(expected, abs=0.3)
        assert shared - one == pytest.approx(4.19, abs=0.3)


@pytest.mark.parametrize(
    "hides", [f'torch.save(torch.ones({LARGE}), "hidden")', f"torch.ones({LARGE}).share_memory_()"]
)
def test_a_rank_that_is_measured_can_write_no_file(play, hides):
    _, result = measured(play, f'{hides}\nmeasure("hidden")', 1)

    assert result.outcome == "raised" and not result.memory


@in_rank(join=False)
def keep(context, _lesson, inputs):
    """Keep so many bytes, and be measured."""
    context.measure("start")
    kept = torch.ones(inputs, dtype=torch.uint8)  # type: ignore[name-defined]  # noqa: F821 (a rank has torch)
    context.measure("ended")
    del kept


@pytest.mark.parametrize(("bytes_of", "words"), [
    ((4 * MB, 4 * MB), ""), ((9 * MB, 1 * MB), ""),  # a rank that looks larger once is no failure
    ((9 * MB, 9 * MB), "after a step, rank 1 has 9."),
])  # fmt: skip
def test_a_rank_has_too_much_only_if_it_has_it_in_a_second_run_as_well(bytes_of, words):
    view, limit = (
        view_of(ROOT, "b.9"),
        memory_limits.Limit("ended", "after a step", {"parameters": 4 * MB}, "free them"),
    )

    def run(attempt):
        return run_to_any_end(view, keep, [1, bytes_of[attempt]], measures=True, attempt=attempt)

    def message():
        try:
            memory_limits.check(view, run, [limit], spare=0)
        except Wrong as failure:
            return str(failure)
        return ""

    found = message()
    assert words in found and bool(found) == bool(words)
