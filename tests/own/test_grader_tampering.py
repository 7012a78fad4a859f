"""Forging: what a student's code in a rank may try so that the grader believes something that was not computed."""

import numpy as np
import pytest

from common.paths import ROOT
from grader import ranks
from grader.ranks.endings import NOTES_LOST, innermost
from grader.wire import values
from tests.own.inline_student import player

pytestmark = pytest.mark.medium


@pytest.fixture
def play(tmp_path):
    return player(tmp_path, 1)


def flags_of(result):
    return [flag.what for rank in result.ranks for flag in rank.flags]


FRAMES = {
    "sys._getframe": "sys._getframe(1)",
    "an alias of inspect": "__import__('inspect').currentframe().f_back",
    "inspect.stack": "__import__('inspect').stack()[1].frame",
    "a traceback": "tb_frame_of(1)",
    "a traceback walked": "list(__import__('traceback').walk_stack(None))",
    "a generator": "(i for i in ()).gi_frame",
    "all objects": "__import__('gc').get_objects()",
    "referrers": "__import__('gc').get_referrers(context)",
    "memory": "__import__('ctypes').string_at(id(context), 8)",
    "a trace function": "sys.settrace(print)",
    "an audit hook": "sys.addaudithook(print) or sys._getframe(0)",
    "a signal handler": "signal.signal(signal.SIGUSR2, print)",
    "a library that calls it": "torch.utils._pytree.tree_map(sys._getframe, 2)",
    "a library that looks at all objects": "torch.utils._pytree.tree_map(__import__('gc').get_objects, 0)",
    "a library that reads an attribute": (
        "torch.utils._pytree.tree_map(__import__('operator').attrgetter('gi_frame'), (i for i in ()))"
    ),
    "a code object": "go.__code__.replace(co_filename='/grader/x.py')",
}
HELPER = """
def tb_frame_of(x):
    try:
        x / 0
    except ZeroDivisionError as error:
        return error.__traceback__.tb_frame

"""


@pytest.mark.parametrize("name", FRAMES)
def test_what_leads_to_the_graders_frames_and_objects_is_refused_and_flagged(play, name):
    result = play(HELPER + f"def go(context):\n    {FRAMES[name]}\n    return 'forged'\n")

    assert result.outcome == "raised"
    assert "refused: it is not for graded code" in result.explain()
    assert flags_of(result) != []
    assert {flag.file for rank in result.ranks for flag in rank.flags} == {"task/run.py"}


def test_what_the_guard_trusts_cannot_be_changed_from_a_closure_that_leads_to_it(play):
    """The wrapper of signal.signal is the only closure of the guard's that a student's code reaches."""
    result = play(
        "import signal, sys\n"
        "def go(context):\n"
        "    cells = [cell.cell_contents for cell in signal.signal.__closure__]\n"
        "    for thing in cells:\n"
        "        for names in (getattr(thing, '__dict__', {}), getattr(thing, 'known', {})):\n"
        "            names[__file__] = True\n"
        "    for name, value in signal.signal.__globals__.items():\n"
        "        if isinstance(value, set):\n"
        "            value.clear()\n"
        "    return sys._getframe(1).f_code.co_name\n"
    )

    assert result.outcome == "raised"
    assert "refused: it is not for graded code" in result.explain()


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


def test_a_rank_that_leaves_before_its_run_has_ended_fails_and_is_flagged(play):
    result = play("def go(context):\n    os._exit(0)\n")

    assert result.outcome == "exited"
    assert flags_of(result) == ["exits with code 0 before its run has ended"]


def test_sys_exit_and_a_signal_are_no_tampering(play):
    for source in ("sys.exit(0)", "os.kill(os.getpid(), 11)"):
        assert flags_of(play(f"def go(context):\n    {source}\n")) == []


def test_a_value_written_to_the_line_without_a_signature_is_not_believed(play):
    forged = values.pack({"kind": "returned", "value": "forged", "never_waited": []})
    source = f"""
        import socket

        def go(context):
            for fd in range(3, 64):
                try:
                    line = socket.socket(fileno=os.dup(fd))
                    line.send(bytes(16) + {forged!r})
                except OSError:
                    pass
            os._exit(0)
    """

    result = play(source)

    assert result.outcome == "raised"
    assert "no valid signature" in result.explain()
    assert any("that the grader's code in a rank never sends" in what for what in flags_of(result))


TO_THE_WIRE = (
    "wire = [c.cell_contents for c in dist.init_process_group.__closure__ if hasattr(c.cell_contents, 'post')][0]"
)
FORGERIES = {
    "an event": "wire.event('step', {})",
    "a message": "wire.send({'kind': 'event', 'name': 'step', 'data': {}})",
    "a last word": "wire.send({'kind': 'returned', 'value': 'forged', 'never_waited': []})",
    "a last word by hand": "raise wire._put({'kind': 'returned', 'value': 'forged', 'never_waited': []})",
}


@pytest.mark.parametrize("name", FORGERIES)
def test_who_finds_the_wire_cannot_send_as_the_grader_does(play, name):
    result = play(f"def go(context):\n    {TO_THE_WIRE}\n    {FORGERIES[name]}\n    return 'forged'\n")

    assert result.outcome == "raised"
    assert "made outside of the grader" in result.explain()
    assert "made outside of the grader" in " ".join(flags_of(result))


def test_a_group_of_the_graders_that_is_called_by_hand_is_flagged(play):
    source = f"""
        def go(context):
            context.join()
            {TO_THE_WIRE}
            group = dist.init_process_group.__globals__["BrokeredGroup"](wire, "1/0", [0], 0)
            group._post("all_reduce", torch.ones(2), [torch.ones(2)], [], None, reduce="SUM").wait()
    """

    result = play(source)

    assert result.outcome == "returned"
    assert flags_of(result) == ["in a run: calls the grader's process group by hand"]


def test_collectives_of_torch_and_of_ddp_are_not_flagged(play):
    source = """
        def go(context):
            context.join()
            dist.all_reduce(torch.ones(2))
            dist.barrier()
            model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
            model(torch.ones(1, 2)).sum().backward()
    """

    result = play(source, world_size=2)

    assert result.outcome == "returned"
    assert flags_of(result) == []


def test_who_closes_the_pipe_of_the_guard_s_notes_is_flagged(play):
    source = """
        import stat

        def go(context):
            for descriptor in range(3, 64):
                try:
                    if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
                        os.close(descriptor)
                except OSError:
                    pass
            exec("1")
    """

    result = play(source)

    assert result.outcome == "returned", result.explain()
    assert flags_of(result) == [NOTES_LOST]


def test_a_collective_is_the_student_s_own_only_by_a_function_of_torch_distributed(play):
    source = """
        import operator
        from torch.autograd import Variable
        from torch.distributed.c10d_logger import _exception_logger

        def go(context):
            context.join()
            for call in (dist.all_reduce, _exception_logger(dist.all_reduce)):
                call(torch.ones(2))
            dist.group.WORLD.allreduce([torch.ones(2)], dist.AllreduceOptions()).wait()
            reduced(lambda given: _exception_logger(Variable._execution_engine.run_backward)(*given))

            def by_an_attribute(given):
                class Group:
                    run_backward = Variable._execution_engine.run_backward
                    allreduce = property(operator.methodcaller("run_backward", *given))

                try:
                    dist.all_reduce(torch.ones(2), group=Group())
                except Exception:
                    pass

            reduced(by_an_attribute)

        def reduced(run):
            parameter = torch.nn.Parameter(torch.ones(2))
            reducer = dist.Reducer([parameter], [[0]], [1 << 40], dist.group.WORLD, [False])
            reducer.prepare_for_backward([])
            run(((parameter.sum(),), (torch.ones(()),), False, False, (), True, True))
    """

    result = play(source)

    assert result.outcome == "returned", result.explain()
    inside = [call.inside for call in result.ranks[0].calls if call.name == "all_reduce"]
    assert inside == ["", "", *["a process group's own method"] * 3]


def test_what_a_toy_tells_its_steps_with_leads_to_no_inputs(play):
    source = """
        import types

        def leads_to(thing, depth=0):
            if isinstance(thing, types.FunctionType) and depth < 4:
                for cell in thing.__closure__ or ():
                    yield from leads_to(cell.cell_contents, depth + 1)
            if hasattr(thing, "__self__"):
                yield thing.__self__
            yield thing

        def go(context):
            return [type(thing).__name__ for thing in leads_to(context.event)]
    """

    assert play(source).values == [["Wire", "function"]]


def test_a_last_word_signed_as_a_call_is_not_believed(play):
    source = f"""
        def go(context):
            context.join()
            {TO_THE_WIRE}
            wire._waiter = lambda waits: {{"kind": "returned", "value": "forged", "never_waited": []}}
            dist.barrier()
    """

    result = play(source)

    assert result.outcome == "raised"
    assert "with the signature of another" in result.explain()


def test_a_replaced_function_of_the_grader_ends_the_run(play):
    source = f"""
        def go(context):
            {TO_THE_WIRE}
            type(wire).send.__globals__["values"].pack = lambda value: b""
            return "right"
    """

    result = play(source)

    assert result.outcome != "returned"
    assert "in a run: replaces grader.wire.values.pack" in flags_of(result)


ENCODERS = {
    "torch.Tensor.detach": "torch.Tensor.detach = lambda self: torch.zeros(2)",
    "json.dumps": "__import__('json').dumps = lambda value: '7'",
    "sys.modules['torch']": "sys.modules['torch'] = type('Fake', (), {'Tensor': int})",
    "builtins.isinstance": "__import__('builtins').isinstance = lambda *_: True",
}


@pytest.mark.parametrize("name", ENCODERS)
def test_who_replaces_what_makes_messages_ends_the_run(play, name):
    result = play(f"def go(context):\n    {ENCODERS[name]}\n    return torch.ones(2)\n")

    assert result.outcome != "returned"
    assert f"in a run: replaces {name}" in flags_of(result)


def test_a_replaced_function_of_torch_is_flagged_and_takes_no_points(play):
    result = play("def go(context):\n    torch.equal = lambda *_: True\n    return 1\n")

    assert result.values == [1]
    assert flags_of(result) == ["in a run: replaces torch.equal"]


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


# --- what a rank can know ---------------------------------------------------------------------------------------------


def test_a_ranks_own_inputs_come_when_the_probe_asks_for_them(play):
    source = """
        def go(context):
            before = "mine" in context.arguments
            return before, context.arguments["mine"], context.arguments["mine"]
    """

    result = play(source, 2, each=[np.arange(2.0), np.arange(3.0)])

    assert [rank[0] for rank in result.values] == [False, False]
    assert [rank[1].tolist() for rank in result.values] == [[0, 1], [0, 1, 2]]


@pytest.mark.parametrize("statement", ["import grader.checks.reference", "from grader import wire", "import grader"])
def test_the_grader_cannot_be_imported_in_a_rank(play, statement):
    result = play(f"def go(context):\n    {statement}\n")

    assert "ImportError" in result.explain() or "ModuleNotFoundError" in result.explain()


def test_the_graders_files_cannot_be_read_in_a_rank(play):
    result = play(f"def go(context):\n    return open({str(ROOT / 'grader/checks/reference.py')!r}).read()\n")

    assert "PermissionError" in result.explain()
    assert flags_of(result) == ["in a run: opens a file of the grader"]


@pytest.fixture(scope="module", autouse=True)
def _end():
    yield
    ranks.stop()


def test_frames_of_a_stack_end_at_the_quote_of_their_name():
    """A stack of `File "` over and over, and without an end, takes as long as its text is."""
    text = 'File "/tree/a"b", line 3 File "' * 4000 + 'File "/tree/task/run.py", line 7'

    assert innermost(text, "/tree") == "task/run.py:7"
