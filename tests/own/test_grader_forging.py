"""Forging with the grader's own objects: methods with another `self`, C code in between, permits asked by hand."""

import shutil

import numpy as np
import pytest

from common.paths import ROOT
from course.table import load_course
from grader.checks import partition_loaders
from grader.checks.pipeline import compute, forward, whole
from grader.grading import Grade, Session
from grader.ranks.referee import MAIN, NO_PERMIT, PermitReferee
from grader.verdicts import Verdict
from grader.wire import signatures
from grader.wire.values import MessageError
from tests.own.inline_student import player

COURSE = load_course()
STAGES = "stages = [next(part for part in p.modules() if hasattr(part, 'watch')) for p in self.partitions]\n"


@pytest.fixture
def play(tmp_path):
    return player(tmp_path, 1)


def flags_of(result):
    return [flag.what for rank in result.ranks for flag in rank.flags]


def forged(result):
    return any(signatures.FORGED in what for what in flags_of(result))


# --- who calls --------------------------------------------------------------------------------------------------------


FAKE = """
    import functools

    class Fake(dict):
        pass

    def go(context):
        fake = Fake()
        fake._wire = context.arguments._wire
        get = type(context.arguments).__missing__
        return {call}
"""


@pytest.mark.parametrize("call", [
    "get(fake, 'mine')",
    "functools.partial(get, fake)('mine')",
    "next(map(get, [fake], ['mine']))",
    "type('Bait', (Fake,), {'it': property(functools.partial(get, name='mine')), '_wire': fake._wire})().it",
])  # fmt: skip
def test_a_method_of_the_graders_with_another_self_sends_nothing_and_is_flagged(play, call):
    result = play(FAKE.format(call=call), each=[1])

    assert result.outcome == "raised"
    assert forged(result)


def test_the_same_method_with_its_own_self_is_answered(play):
    result = play(FAKE.format(call="get(context.arguments, 'mine')"), each=[1])

    assert result.values == [1]
    assert flags_of(result) == []


C_CALLERS = {
    "an error whose text is asked for": """
        import functools

        class Lies(Exception):
            pass

        def go(context):
            Lies.__str__ = functools.partial(context.event, "step")
            raise Lies
    """,
    "a step that is looped over": """
        def go(context):
            list(map(context.event, ["step"]))
    """,
}


@pytest.mark.parametrize("name", C_CALLERS)
def test_an_event_that_c_code_sends_is_not_believed_and_flagged(play, name):
    result = play(C_CALLERS[name])

    assert [event.name for event in result.ranks[0].events] == []
    assert forged(result)


def test_a_spied_function_and_a_probe_still_tell_events(play):
    source = """
        def go(context):
            context.spy(torch, "ones", "made")
            torch.ones(2)
    """

    result = play(source)

    assert [event.name for event in result.ranks[0].events] == ["made"]
    assert flags_of(result) == []


# --- the referee ------------------------------------------------------------------------------------------------------


def ask(place, thread, number=1, content=()):
    return {"what": "permit", "id": number, "thread": thread, "place": place, "content": np.array(content, float)}


def referee():
    return PermitReferee(np.array([[[2.0, 3.0], [4.0, 5.0]]]), [[[1, 0], [0, 1]]])


def test_permits_of_a_group_are_given_when_a_thread_waits_for_each():
    judge = referee()

    assert judge.ask(ask([0, 1, 0], thread=7, number=1)) == []
    assert sorted(judge.ask(ask([0, 0, 1], thread=8, number=2))) == [(1, 4.0), (2, 3.0)]
    assert judge.faults == []


def test_one_thread_that_asks_for_one_place_and_then_for_another_never_gets_the_group():
    judge = referee()
    judge.ask(ask([0, 1, 0], thread=7))

    with pytest.raises(MessageError, match="while it waits for another"):
        judge.ask(ask([0, 0, 1], thread=7))


@pytest.mark.parametrize(("asks", "words"), [
    ([([0, 0, 0], MAIN)], "in the caller's own thread"),
    ([([0, 0, 0], 7), ([0, 1, 1], 7)], "partitions 0 and 1 work in one thread"),
    ([([0, 0, 0], 7), ([0, 0, 0], 8)], "works in several threads"),
    ([([0, 1, 0], 7), ([0, 1, 0], 8)], "twice on micro-batch 1"),
])  # fmt: skip
def test_who_is_no_worker_of_the_partition_gets_no_permit(asks, words):
    judge = referee()

    *_, last = [judge.ask(ask(place, thread)) for place, thread in asks]

    assert last == [(1, NO_PERMIT)]
    assert words in judge.faults[0]


def test_a_place_that_there_is_not_has_no_permit():
    assert referee().ask(ask([0, 5, 0], thread=7)) == [(1, NO_PERMIT)]


# --- submissions ------------------------------------------------------------------------------------------------------


@pytest.fixture
def grade(tmp_path):
    """A function: the graders' view of a file with another body for a region."""

    def make(file, region, body):
        for folder in ("common", "pipeline"):
            shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
        path = tmp_path / file
        before, rest = path.read_text().split(f"# BEGIN SOLUTION {region}\n")
        indent = before.rpartition("\n")[2]
        after = rest.split(f"# END SOLUTION {region}\n")[1]
        lines = "".join(f"{indent}{line}\n" for line in body.strip().splitlines())
        path.write_text(before + "\n" + lines + after)
        return Grade(Session(tmp_path, COURSE, seed=1), region, "test")

    return make


COMPUTES = {
    "one thread that asks for one permit after the other": STAGES + """
for i, j in schedule:
    batches[i] = stages[j].compute(batches[i]) * stages[j].watch.permits.ask((int(batches[i][0, 0]), j), batches[i])
""",
    "a thread for each permit, and one that computes": STAGES + """
import threading
given = {}
def take(i, j):
    given[j] = stages[j].watch.permits.ask((int(batches[i][0, 0]), j), batches[i])
threads = [threading.Thread(target=take, args=pair) for pair in schedule]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
for i, j in schedule:
    batches[i] = stages[j].compute(batches[i]) * given[j]
""",
    "threads that are started on the grader's method": STAGES + """
import concurrent.futures
with concurrent.futures.ThreadPoolExecutor() as pool:
    permits = pool.map(lambda pair: stages[pair[1]].watch.permits.ask((int(batches[pair[0]][0, 0]), pair[1]),
                                                                      batches[pair[0]]), schedule)
    for (i, j), permit in zip(schedule, permits):
        batches[i] = stages[j].compute(batches[i]) * permit
""",
    "a module of its own around the grader's method": STAGES + """
for i, j in schedule:
    module = torch.nn.Module()
    module.forward = stages[j].watch.permits.ask
    batches[i] = stages[j].compute(batches[i]) * module((int(batches[i][0, 0]), j), batches[i])
""",
    "a stage with watches of its own": STAGES + """
from types import SimpleNamespace
for i, j in schedule:
    watch = SimpleNamespace(**vars(stages[j].watch))
    watch.enter, watch.leave, watch.permit = (lambda _: None), (lambda _: None), stages[j].watch.permit
    fake = SimpleNamespace(**vars(stages[j])) if False else SimpleNamespace(
        partition=j, calls=0, error=None, compute=stages[j].compute, scaled=torch.mul, watch=watch)
    batches[i] = type(stages[j]).forward(fake, batches[i])
""",
}  # fmt: skip


@pytest.mark.medium
@pytest.mark.parametrize("name", COMPUTES)
def test_permits_that_are_asked_by_hand_give_no_point_and_a_flag(grade, name):
    view = grade("pipeline/pipe.py", "p.4", COMPUTES[name])

    for check in (compute.check_same_time, whole.check_same_time):
        with pytest.raises(Verdict):
            check(view)

    assert {signatures.FORGED, signatures.ASKS_BY_HAND} & {
        flag.what.removeprefix("in a run: ") for flag in view.session.flags
    }


FORWARDS = {
    "compute is not called": "return torch.cat([b * 1 for b in x.split(self.split_size)])",
    "what stands for compute is asked for its numbers": """
stand_in = self.compute.__self__
found = vars(stand_in)
batches = list(x.split(self.split_size))
for j in range(len(self.partitions)):
    for i in range(len(batches)):
        batches[i] = found["factors"][i, j] * batches[i] + found["shifts"][i, j]
stand_in.asked.append([len(batches), len(self.partitions)])
stand_in.calls.append({"pairs": [], "sizes": [], "nested": False, "given": []})
return torch.cat(batches)
""",
    "what stands for compute has another list of calls": """
self.compute.__self__.calls = [{"pairs": [[0, 0]], "sizes": [len(x)], "nested": False, "given": [x]}]
return x
""",
}


@pytest.mark.parametrize("name", FORWARDS)
def test_a_forward_without_calls_of_compute_fails_every_test_whatever_it_finds_in_the_stand_in(grade, name):
    view = grade("pipeline/pipe.py", "p.3", FORWARDS[name])

    for check in (forward.check_sizes, forward.check_clocks, forward.check_output):
        with pytest.raises(Verdict):
            check(view)


def test_the_stand_in_that_is_asked_by_hand_answers_nothing_and_flags(grade):
    body = """
batches = list(x.split(self.split_size))
ask = self.compute.__self__._ask
for j in range(len(self.partitions)):
    pairs = [[i, j] for i in range(len(batches))]
    sizes = [len(batch) for batch in batches]
    batches = list(ask("compute", pairs=pairs, nested=False, sizes=sizes, given=batches, inputs=batches))
return torch.cat(batches)
"""
    view = grade("pipeline/pipe.py", "p.3", body)

    with pytest.raises(Verdict):
        forward.check_sizes(view)

    assert signatures.FORGED in {flag.what.removeprefix("in a run: ") for flag in view.session.flags}


SHARES = {
    "dealt out in turn": "kept = range(rank, len(dataset) // world_size * world_size, world_size)",
    "in blocks": "kept = range(rank * (len(dataset) // world_size), (rank + 1) * (len(dataset) // world_size))",
}


@pytest.mark.medium
@pytest.mark.parametrize("name", SHARES)
def test_shares_of_the_data_in_its_own_order_pass_no_test_of_partition_dataset(grade, name):
    body = f"""
per_worker = batch_size // world_size
{SHARES[name]}
return DataLoader(Partition(dataset, kept), per_worker, collate_fn=collate_fn), per_worker
"""
    view = grade("common/data_partition.py", "2b.5", body)

    for check in (
        partition_loaders.check_share,
        partition_loaders.check_counts,
        partition_loaders.check_no_overlap,
        partition_loaders.check_group_and_collate,
    ):
        with pytest.raises(Verdict):
            check(view)


# --- values -----------------------------------------------------------------------------------------------------------


def test_a_string_that_compares_equal_to_everything_arrives_as_its_letters(play):
    source = """
        class Equal(str):
            __eq__ = lambda self, other: True
            __ne__ = lambda self, other: False
            __hash__ = str.__hash__

        def go(context):
            return [Equal("wrong"), {Equal("name"): Equal("wrong")}]
    """

    (value,) = play(source).values

    assert value != ["right", {"name": "right"}]
    assert [type(value[0]), type(value[1]["name"])] == [str, str]


@pytest.mark.parametrize("number", ["complex(1, 0)", "torch.ones(2, dtype=torch.complex64)", "np.complex128(1)"])
def test_a_complex_number_is_no_value_and_fails(play, number):
    result = play(f"import numpy as np\n\ndef go(context):\n    return {number}\n")

    assert result.outcome == "raised"
    assert "complex" in result.explain()


def test_a_column_of_a_tensor_arrives_as_it_is(play):
    result = play("def go(context):\n    return torch.arange(6.0).reshape(3, 2)[:, :1]\n")

    assert result.values[0].tolist() == [[0], [2], [4]]
