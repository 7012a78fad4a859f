"""What one hand-in may cost its graders: memory, time, and texts that cannot be shown."""

import sys

import pytest

from course.table import load_course
from grader import ranks, session
from grader.grading import Grade
from grader.plugin import LONGEST_MESSAGE, clip
from grader.ranks.outcome import RankResult, Result
from grader.session import Session
from grader.wire import values

pytestmark = pytest.mark.medium

RANKS = 1

COURSE = load_course()


@pytest.fixture
def small_limit(monkeypatch):
    """8 MiB for a run: the real limit takes a busy machine long to reach."""
    monkeypatch.setattr("grader.ranks.one_run.MAX_KEPT", 8 << 20)


VALUE = "def go(context):\n    return torch.zeros(1 << 20)\n"
EVENTS = """
    def go(context):
        context.spy(torch, "numel", "note", note=lambda _: {"pairs": [[]] * 50_000})
        for _ in range(6):
            torch.numel(torch.ones(1))
"""


@pytest.mark.parametrize(("source", "world_size"), [(VALUE, 3), (EVENTS, 1)], ids=["values", "events"])
def test_values_and_events_of_all_ranks_together_have_a_limit(play, small_limit, source, world_size):
    result = play(source, world_size)

    assert result.outcome == "raised"
    assert "more than 8 MiB, the limit of a run" in result.explain()
    assert sum(rank.value.nbytes for rank in result.ranks if rank.value is not None) <= 8 << 20
    assert len(result.ranks[0].events) < 6


def test_what_a_collective_has_carried_is_free_again(play, small_limit):
    source = """
        def go(context):
            context.join()
            for _ in range(6):
                dist.all_reduce(torch.ones(1 << 20))
            return "done"
    """

    assert play(source).values == ["done"]


def test_a_session_lets_the_oldest_runs_go(tmp_path, monkeypatch):
    graded = Session(tmp_path, COURSE, 1)
    large = Result([RankResult(0, "returned")], None, [], 1.0, size=session.MAX_KEPT // 2)
    monkeypatch.setattr(ranks, "run", lambda *_, **__: large)

    for number in range(5):
        graded.run(1, {"number": number})

    assert sum(run.size for run in graded.runs.values()) <= session.MAX_KEPT


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
    assert len(clip("x" * 10**6)) <= LONGEST_MESSAGE + 10
    assert clip("got <generator object f at 0x7fd8597282d0>") == "got <generator object f>"  # no address of an object


@pytest.mark.parametrize("text", ["return '\\\\udc80'", "return {'\\\\udc80': 1}", "raise ValueError('\\\\udc80')"])
def test_a_lone_surrogate_in_any_text_of_a_rank_can_be_written(play, text):
    result = play(f"def go(context):\n    {text}\n")

    texts = [str(result.ranks[0].value), result.explain(), values.clip("\ud800" * 20_000)]
    assert [each.encode() for each in texts]


def test_a_region_that_timed_out_once_is_not_waited_for_again(tmp_path, monkeypatch):
    (tmp_path / "task1_single").mkdir()
    (tmp_path / "task1_single/run_glue.py").write_text("# TODO(cos598d) 1.3: step\nloop()\n# END TODO 1.3\n")
    limits = []

    def run(world_size, arguments, deadline, **_):
        limits.append(deadline)
        return Result([RankResult(0, "deadline", where="task1_single/run_glue.py:2")], None, [], deadline)

    monkeypatch.setattr(ranks, "run", run)
    monkeypatch.setenv("COS598D_SLOWNESS", "3")
    graded = Session(tmp_path, COURSE, 1)
    for region in ("1.2", "1.2", "1.3", "1.4", "2a.1"):
        Grade(graded, region, "test").session.run(1, {"number": len(limits)})

    assert limits == [45.0, 6.0, 3.0, 3.0, 45.0], "1.4 needs 1.2 and 1.3, 2a.1 needs neither"
    assert set(graded.timeouts) >= {"1.2", "1.3"}, "the region of the test, and that of the line which never ended"


def test_a_loop_that_never_ends_is_named_with_its_line_and_is_no_tampering(play, monkeypatch):
    monkeypatch.setattr("grader.ranks.broker.MAX_EVENTS", 100)
    source = """
        def go(context):
            context.spy(torch, "numel", "note")
            while True:
                torch.numel(torch.ones(1))
    """

    result = play(source)

    assert result.took_too_long  # the region's other tests wait for 2 s at most
    assert "rank 0 made more than 100 calls that the grader records: does a loop in your code never end?" in (
        result.explain()
    )
    assert result.ranks[0].flags == []


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not limit data alone")
def test_a_loop_that_fills_memory_ends_before_the_machine_has_none_left(play):
    result = play("def go(context):\n    kept = []\n    while True:\n        kept += [0] * 1_000_000\n")

    assert "MemoryError: more than 1 GB was used: does a loop in your code never end?" in result.explain()
