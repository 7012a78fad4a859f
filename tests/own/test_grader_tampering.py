"""What a student's code in a rank may do that looks like tampering and is none, and what is refused to it."""

import numpy as np
import pytest

from grader.ranks.endings import innermost

pytestmark = pytest.mark.medium

RANKS = 1


def flags_of(result):
    return [flag.what for rank in result.ranks for flag in rank.flags]


ORDINARY = """
import collections, dataclasses, enum, logging, traceback, typing, warnings

Point = collections.namedtuple("Point", "x y")

@dataclasses.dataclass
class Config:
    size: int = 1

class Kind(enum.Enum):
    A = 1

T = typing.TypeVar("T")

def go(context):
    logging.warning("one %s", Point(1, 2))
    warnings.warn("two")
    try:
        [][0]
    except IndexError as error:
        traceback.print_exc()
        kept = sys.exc_info()
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    thread = threading.Thread(target=print)
    thread.start()
    thread.join()
    return Config().size
"""


def test_ordinary_code_is_neither_refused_nor_flagged(play):
    result = play(ORDINARY)

    assert result.values == [1]
    assert flags_of(result) == []


@pytest.mark.parametrize(("leaves", "flags"), [
    ("os._exit(0)", ["exits with code 0 before its run has ended"]),
    ("sys.exit(0)", []),
    ("os.kill(os.getpid(), 11)", []),
])  # fmt: skip
def test_a_rank_that_leaves_its_run_early_fails_and_only_a_silent_exit_is_flagged(play, leaves, flags):
    result = play(f"def go(context):\n    {leaves}\n")

    assert result.outcome in ("exited", "killed")
    assert flags_of(result) == flags


def test_a_collective_is_the_student_s_own_only_by_a_function_of_torch_distributed(play):
    source = """
        from torch.autograd import Variable
        from torch.distributed.c10d_logger import _exception_logger

        def go(context):
            context.join()
            for call in (dist.all_reduce, _exception_logger(dist.all_reduce)):
                call(torch.ones(2))
            dist.group.WORLD.allreduce([torch.ones(2)], dist.AllreduceOptions()).wait()
            reduced(lambda given: _exception_logger(Variable._execution_engine.run_backward)(*given))

        def reduced(run):
            parameter = torch.nn.Parameter(torch.ones(2))
            reducer = dist.Reducer([parameter], [[0]], [1 << 40], dist.group.WORLD, [False])
            reducer.prepare_for_backward([])
            run(((parameter.sum(),), (torch.ones(()),), False, False, (), True, True))
    """

    result = play(source)

    assert result.outcome == "returned", result.explain()
    inside = [call.inside for call in result.ranks[0].calls if call.name == "all_reduce"]
    assert inside == ["", "", *["a process group's own method"] * 2]


def test_ddp_under_another_name_is_still_ddp(play):
    source = """
        import torch.nn.parallel.distributed as ddp
        ddp.__name__ = "torch.distributed.distributed_c10d"

        def go(context):
            context.join()
            torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
    """

    (rank,) = play(source).ranks

    assert {call.inside for call in rank.calls if call.name != "init_process_group"} == {"DistributedDataParallel"}


def test_a_call_by_a_name_that_torch_has_replaced_is_the_students_own(play):
    source = """
        def go(context):
            context.join()
            dist.reduce_scatter_tensor(torch.empty(2), torch.ones(2))
            dist.all_gather_into_tensor(torch.empty(2), torch.ones(2))
    """

    (rank,) = play(source).ranks

    calls = [call for call in rank.calls if call.name != "init_process_group"]
    assert [(call.name, call.inside) for call in calls] == [("reduce_scatter", ""), ("all_gather", "")]


# --- what a rank can know ---------------------------------------------------------------------------------------------


def test_a_rank_gets_its_own_inputs_and_no_others(play):
    source = """
        def go(context):
            return dict(context.arguments)
    """

    result = play(source, 2, each=[np.arange(2.0), np.arange(3.0)])

    assert [rank["own_inputs"].tolist() for rank in result.values] == [[0, 1], [0, 1, 2]]
    assert all("each" not in rank for rank in result.values)


def test_a_loader_that_asks_for_processes_loads_in_the_rank_itself_and_says_so(play):
    source = """
        from torch.utils.data import DataLoader

        def go(context):
            loader = DataLoader(list(range(4)), 2, num_workers=2, persistent_workers=True, prefetch_factor=4)
            return loader.num_workers, [batch.tolist() for batch in loader]
    """

    result = play(source)

    assert result.values == [[0, [[0, 1], [2, 3]]]]
    assert "num_workers=0" in result.ranks[0].stderr


@pytest.mark.parametrize("statement", ["import grader.compare", "from grader import wire", "import grader"])
def test_the_grader_cannot_be_imported_in_a_rank(play, statement):
    result = play(f"def go(context):\n    {statement}\n")

    assert "ImportError" in result.explain() or "ModuleNotFoundError" in result.explain()


def test_frames_of_a_stack_end_at_the_quote_of_their_name():
    """A stack of `File "` over and over, and without an end, takes as long as its text is."""
    text = 'File "/tree/a"b", line 3 File "' * 4000 + 'File "/tree/task/run.py", line 7'

    assert innermost(text, "/tree") == "task/run.py:7"
