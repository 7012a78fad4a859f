"""How much memory and how many processes a rank has, as the process that starts the ranks sees it."""

import signal
import sys
from types import SimpleNamespace

import pytest

from grader import memory_limits
from tests.own.inline_student import run_entry

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")

MB = 1_000_000
LARGE = 655_360  # elements, 2.6 MB


def measured(tmp_path, lines, world_size=2, **arguments):
    """The memory of every rank at each point, in MB, and the run."""
    body = "".join(f"    {line}\n" for line in lines.strip().splitlines())
    (tmp_path / "run.py").write_text(f"import torch\ndef go(context):\n    measure = context.measure\n{body}")
    result = run_entry(tmp_path, "run.py", world_size, measures=True, **arguments)
    return {point: [size / MB for size in taken] for point, taken in result.memory.items()}, result


def test_of_each_rank_a_tensor_counts_when_it_is_written_and_no_more_when_it_is_freed(tmp_path):
    memory, result = measured(
        tmp_path,
        f"""
measure("before")
kept = [torch.ones({LARGE} * (1 + context.rank)) for _ in range(8)]
measure("whole")
del kept[2:]
measure("two")
kept[0].untyped_storage().resize_(0)
measure("one")
""",
    )

    assert result.explain() == ""
    for rank in range(2):
        before, whole, two, one = (memory[point][rank] for point in ("before", "whole", "two", "one"))
        assert before < 1
        expected = [size * (1 + rank) for size in (20.97, 5.24, 2.62)]
        assert [whole - before, two - before, one - before] == pytest.approx(expected, abs=0.3)


def test_an_answer_that_is_on_its_way_is_read_before_the_look(tmp_path):
    gather = f"""
import torch.distributed as dist
context.join()
own, whole = torch.ones({LARGE}), torch.empty(3 * {LARGE})
measure("before")
work = dist.all_gather_single(whole, own, async_op=True)
measure("in transit")
"""

    memory, _ = measured(tmp_path, gather, 3)

    taken = [after - before for before, after in zip(memory["before"], memory["in transit"], strict=True)]
    assert taken == pytest.approx([3 * 2.62] * 3, abs=0.3)  # of the answer, once; nobody has written to `whole`


def test_the_memory_of_a_process_that_a_rank_starts_counts(tmp_path):
    child = f"""
import os, time
ready, done = os.pipe()
if os.fork() == 0:
    if {{orphan}} and os.fork():
        os._exit(0)
    kept = torch.ones({LARGE})
    os.write(done, b".")
    time.sleep(60)
os.read(ready, 1)
measure("child")
"""
    for orphan in (False, True):
        memory, _ = measured(tmp_path, child.format(orphan=orphan), 1)
        assert memory["child"][0] > 2.6, orphan


def test_shared_memory_counts(tmp_path):
    lines = 'import mmap\nkept = mmap.mmap(-1, 1 << 22)\nkept.write(b"x" * (1 << 22))\nmeasure("kept")'

    memory, _ = measured(tmp_path, lines)

    assert min(memory["kept"]) > 4


@pytest.mark.parametrize(
    "hides",
    [
        f'torch.save(torch.ones({LARGE}), "hidden")',
        f'torch.ones({LARGE}).numpy().tofile("hidden")',
        f"torch.ones({LARGE}).share_memory_()",
        'open("hidden", "wb", buffering=0).write(b"x" * 10)',
        'import os; os.write(os.memfd_create("hidden"), b"x" * 10)',
    ],
)
def test_a_rank_that_is_measured_can_write_no_file(tmp_path, hides):
    _, result = measured(tmp_path, f'{hides}\nmeasure("hidden")', 1)

    assert result.outcome == "raised" and "measurement" not in {call.name for call in result.ranks[0].calls}


@pytest.mark.parametrize(("lines", "world_size", "outcome", "words"), [
    ('if context.rank:\n        measure("there")', 2, "deadlock", "rank 1 waits in measurement #1"),
    ('measure(f"there {context.rank}")', 2, "mismatch", "different points of a probe"),
    ('measure("start")\nmeasure("start")', 1, "raised", "a measurement that no probe asks for"),
    ('context.event("given", key="0 0")', 1, "raised", "a message of the kind event"),  # the grader puts it down itself
])  # fmt: skip
def test_a_measurement_that_no_probe_asks_for_ends_the_run(tmp_path, lines, world_size, outcome, words):
    _, result = measured(tmp_path, lines, world_size)

    assert result.outcome == outcome and words in result.explain()


class FirstFailure:
    """Stands in for a Grade, and remembers the message of its failure."""

    message = ""

    def must_return(self, result):
        pass

    def fail(self, words):
        self.message = words


@pytest.mark.parametrize(("taken", "words"), [((9, 1), ""), ((9, 9), "after a step, rank 0 has 9.0 MB"), ((1, 9), "")])
def test_a_rank_has_too_much_only_if_it_has_it_in_a_second_run_as_well(taken, words):
    grade, limit = FirstFailure(), memory_limits.Limit("ended", "after a step", {"parameters": MB}, "free them")

    def run(attempt):
        return SimpleNamespace(memory={"start": [0], "ended": [taken[attempt] * MB]})

    memory_limits.check(grade, run, [limit], spare=0)

    assert grade.message.startswith(words) and bool(grade.message) == bool(words)


# --- processes --------------------------------------------------------------------------------------------------------

STARTS = """
import os, signal, time
def go(context):
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
    counted = []
    for together in context.arguments["groups"]:
        children = []
        for _ in range(together):
            pid = os.fork()
            if pid == 0:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR2})  # which ends it
                time.sleep(context.arguments["patience"])
                os._exit(1)
            children.append(pid)
        counted += [os.waitpid(pid, 0)[1] for pid in children]
    return counted
"""


def counted(tmp_path, groups, children, patience):
    (tmp_path / "run.py").write_text(STARTS)
    return run_entry(tmp_path, "run.py", 1, groups=groups, patience=patience, children=children)


def test_processes_that_run_at_once_are_counted_and_told(tmp_path):
    result = counted(tmp_path, [3], 3, 60)

    assert result.children == 3
    assert result.values == [[signal.SIGUSR2] * 3]
    assert len(result.numbers) == 3


def test_processes_one_after_the_other_are_not_many(tmp_path):
    result = counted(tmp_path, [1, 1], 2, 0.2)

    assert result.children <= 1
    assert signal.SIGUSR2 not in result.values[0]
    assert not result.numbers


@pytest.mark.parametrize(("asked", "children"), [(2, 0), (0, -1)])
def test_a_rank_without_processes_has_none_and_nobody_counts_unless_a_run_asks(tmp_path, asked, children):
    assert counted(tmp_path, [], asked, 0).children == children
