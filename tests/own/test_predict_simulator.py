"""The simulator on cases whose answer is known: overlap, schedules, shared cores and links."""

from itertools import accumulate

import pytest

from benchmark.cost.programs.pipelined import one_forward_one_backward
from benchmark.cost.programs.program import Compute, Kind, Start, Wait
from benchmark.cost.simulate import QUEUE, Machine, Transfer, fair_level, simulate
from tests.beyond.test_cost_model import RING, STEPS

ONE_AT_A_TIME = Machine(cores=8, is_shared=False, slots=1)


class Line:
    """A network of latency and bandwidth; a transfer wants `cores`. lag: a share of the flow."""

    def __init__(self, latency, byte, cores=0.0, is_shaped=True, lag=0.0):
        self.latency, self.byte, self.cores, self.is_shaped, self.lag = latency, byte, cores, is_shaped, lag

    def transfer(self, operation, size, workers, spent):
        return Transfer(self.latency, self.byte * size, self.cores, self.lag * self.byte * size)

    def spent_after(self, seconds, spent):
        return spent


def in_buckets(backward, network, count, ranks=2):
    """Backward in equal pieces, each of which is sent when it is computed; the network takes a second for a byte."""
    program = []
    for i in range(count):
        program += [Compute("backward", backward / count), Start(f"{i}", "all_reduce", network / count, ranks, (0,))]
    return Kind(range(ranks), (*program, *(Wait(f"{i}") for i in range(count))))


@pytest.mark.parametrize("count", [1, 2, 5])
def test_every_message_adds_its_latency_where_the_network_is_the_longer_stage(count):
    simulated = simulate([in_buckets(4.0, 8.0, count)], Line(0.3, 1.0), ONE_AT_A_TIME)

    assert simulated.seconds == pytest.approx(4.0 / count + 8.0 + count * 0.3)


@pytest.mark.parametrize(("stages", "count"), [(2, 4), (3, 6), (4, 4), (4, 16)])
def test_the_bubble_of_a_pipeline_is_stages_less_one_over_all_slots(stages, count):
    kinds = []
    for stage in range(stages):
        program = []
        for direction, i in one_forward_one_backward(stage, stages, count):
            before, after = (stage - 1, stage + 1) if direction == "forward" else (stage + 1, stage - 1)
            if 0 <= before < stages:
                key = f"{direction} {i} from {before}"
                program += [Start(key, "hop", 0.0, 2, (before, stage)), Wait(key)]
            program.append(Compute("pipeline", 1.0))
            if 0 <= after < stages:
                program.append(Start(f"{direction} {i} from {stage}", "hop", 0.0, 2, (stage, after)))
        kinds.append(Kind([stage], tuple(program)))

    simulated = simulate(kinds, Line(0.0, 0.0), Machine(cores=stages, is_shared=True))

    busy = 2 * count
    assert simulated.seconds == pytest.approx(2 * (count + stages - 1))
    assert 1 - busy / simulated.seconds == pytest.approx((stages - 1) / (count + stages - 1))


def test_a_worker_that_computes_alone_has_the_cores_of_the_others():
    early = Kind([0], (Compute("forward", 4.0),))
    late = Kind([1], (Compute("forward", 10.0),))

    simulated = simulate([early, late], Line(0.0, 1.0), Machine(cores=1, is_shared=True))

    assert simulated.seconds == pytest.approx(4.0 + (10.0 - 4.0) / 2)  # both took half a core, then one takes all of it


def test_a_transfer_that_wants_a_core_takes_time_from_backward():
    free = simulate([in_buckets(8.0, 8.0, 8)], Line(0.0, 1.0), Machine(2, is_shared=True))
    busy = simulate([in_buckets(8.0, 8.0, 8)], Line(0.0, 1.0, cores=1.0, is_shaped=False), Machine(2, is_shared=True))

    assert free.seconds == pytest.approx(9.0)  # nothing but the last bucket is exposed
    assert busy.seconds == pytest.approx(16.0)  # two cores have 32 core seconds to work


def test_two_transfers_share_a_shaped_link():
    program = (Start("a", "all_reduce", 3.0, 2, (0,)), Start("b", "all_reduce", 3.0, 2, (0,)), Wait("a"), Wait("b"))

    shared = simulate([Kind(range(2), program)], Line(0.5, 1.0), Machine(2, is_shared=True))
    apart = simulate([Kind(range(2), program)], Line(0.5, 1.0, is_shaped=False), Machine(2, is_shared=True))

    assert shared.seconds == pytest.approx(6.5)
    assert apart.seconds == pytest.approx(3.5)


@pytest.mark.parametrize(("lag", "one_by_one", "overlapping"), [(0.0, 8.0, 8.0), (0.5, 12.0, 9.0), (1.0, 16.0, 10.0)])
def test_directions_of_transfers_that_follow_one_another_overlap(lag, one_by_one, overlapping):
    """Four transfers of two seconds in each direction, the second of which is later by the lag."""
    starts = [Start(str(i), "all_to_all", 2.0, 2, (0,)) for i in range(4)]
    waits = [Wait(str(i)) for i in range(4)]
    turns = [step for pair in zip(starts, waits, strict=True) for step in pair]
    rounds = [Start("ring", "exchange", 2.0, 2, (0,), repeats=4), Wait("ring")]
    network, machine = Line(0.0, 1.0, lag=lag), Machine(2, is_shared=True)

    alone, in_a_row, together = (
        simulate([Kind(range(2), tuple(program))], network, machine).seconds
        for program in (turns, rounds, [*starts, *waits])
    )

    assert alone == in_a_row == pytest.approx(one_by_one)
    assert together == pytest.approx(overlapping)


def test_the_other_direction_too_carries_one_transfer_after_the_other():
    """Three seconds there and then back, and one second there, which can come back only after the three."""
    starts = [Start(str(size), "all_to_all", size, 2, (0,)) for size in (3.0, 1.0)]

    simulated = simulate(
        [Kind(range(2), (*starts, Wait("3.0"), Wait("1.0")))], Line(0.0, 1.0, lag=1.0), Machine(2, is_shared=True)
    )

    assert simulated.seconds == pytest.approx(3 + 3 + 1)


def test_a_message_waits_for_a_receiver_that_is_not_ready():
    send = Start("a", "hop", 2.0, 2, (0, 1))
    sender = Kind([0], (send, Compute("forward", 1.0)))
    receiver = Kind([1], (Compute("forward", 5.0), send, Wait("a")))

    simulated = simulate([sender, receiver], Line(0.0, 1.0), Machine(2, is_shared=True))

    assert simulated.seconds == pytest.approx(5.0 + 2.0)
    assert max(span.end for span in simulated.spans if span.kind == 0 and span.row == "thread") == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("connections", "is_shaped", "seconds"),
    [(("one", "one"), True, 6.0), (("there", "back"), True, 3.0 + QUEUE), (("one", "one"), False, 3.0)],
)
def test_when_a_sender_learns_that_its_receiver_is_ready(connections, is_shaped, seconds):
    """Two stages exchange messages of three seconds. On a connection of its own, the word waits in the link's queue."""
    there, back = (
        Start(key, "hop", 3.0, 2, members, connection=connection)
        for key, members, connection in zip(("there", "back"), ((0, 1), (1, 0)), connections, strict=True)
    )
    kinds = [Kind([i], (*order, Wait("there"), Wait("back"))) for i, order in enumerate([(there, back), (back, there)])]

    simulated = simulate(kinds, Line(0.0, 1.0, is_shaped=is_shaped), Machine(2, is_shared=True))

    assert simulated.seconds == pytest.approx(seconds)
    assert {span.name for span in simulated.spans if span.blocked} == {"communication"}  # nobody waits for a late rank


@pytest.mark.parametrize("asked", [0.0, 2.0])
def test_a_message_that_began_first_leaves_first_whoever_asked_for_it_when(asked):
    """Rank 1 sends 10 seconds to rank 2 at 1, and to rank 0 at 6."""
    first, second = (Start(key, "hop", 10.0, 2, members) for key, members in (("first", (1, 2)), ("second", (1, 0))))
    programs = [
        (Compute("forward", asked), second, Wait("second")),
        (Compute("forward", 1.0), first, Compute("forward", 5.0), second),
        (first, Wait("first")),
    ]

    simulated = simulate([Kind([i], p) for i, p in enumerate(programs)], Line(0.0, 1.0), Machine(3, is_shared=True))

    ends = {span.key: span.end for span in simulated.spans if span.row == "network"}
    assert ends == pytest.approx({"first": 11.0, "second": 21.0})


def test_a_word_waits_for_what_leaves_before_the_last_message_of_its_connection():
    """Rank 1 sends 10 seconds to rank 2, then 3 to rank 0, and then asks rank 0 for 1."""
    away, back, word = (
        Start(key, "hop", seconds, 2, members, connection=connection)
        for key, seconds, members, connection in (
            ("away", 10.0, (1, 2), "12"), ("back", 3.0, (1, 0), "01"), ("word", 1.0, (0, 1), "01"),
        )
    )  # fmt: skip
    late = Compute("forward", 1.0)  # the others are there
    programs = [(back, word, Wait("back")), (late, away, back, word, Wait("word")), (away, Wait("away"))]

    simulated = simulate([Kind([i], p) for i, p in enumerate(programs)], Line(0.0, 1.0), Machine(3, is_shared=True))

    assert simulated.seconds == pytest.approx(1.0 + 10.0 + 3.0 + 1.0)


def test_a_collective_begins_when_its_last_member_arrives():
    programs = [(Compute("forward", s), Start("a", "all_reduce", 2.0, 2, (0, 1)), Wait("a")) for s in (1.0, 5.0)]

    simulated = simulate([Kind([i], p) for i, p in enumerate(programs)], Line(0.0, 1.0), Machine(2, is_shared=True))

    assert simulated.seconds == pytest.approx(7.0)
    blocked = {(s.kind, s.name): s.end - s.start for s in simulated.spans if s.blocked}
    assert blocked == pytest.approx({(0, "waiting"): 4.0, (0, "communication"): 2.0, (1, "communication"): 2.0})


def test_a_receiver_is_idle_in_a_bubble_until_the_message_is_sent():
    sender = Kind([0], (Compute("pipeline", 3.0), Start("m", "hop", 2.0, 2, (0,))))
    receiver = Kind([1], (Wait("m"), Compute("pipeline", 1.0)))

    simulated = simulate([sender, receiver], Line(0.0, 1.0), Machine(2, is_shared=True))

    blocked = {(s.kind, s.name): s.end - s.start for s in simulated.spans if s.blocked}
    assert blocked == pytest.approx({(1, "bubble"): 3.0, (1, "communication"): 2.0})
    assert simulated.seconds == pytest.approx(6.0)


def test_a_program_that_waits_for_nobody_is_refused():
    with pytest.raises(AssertionError, match="never begin: \\['a'\\]"):
        simulate([Kind([0], (Wait("a"),))], Line(0.0, 1.0), ONE_AT_A_TIME)


@pytest.mark.parametrize(
    ("cores", "wanted", "level"),
    [(2, [(2, 1.0)], float("inf")), (2, [(4, 1.0)], 0.5), (2, [(2, 1.0), (2, 0.25)], 0.75), (2, [(2, 1), (2, 1)], 0.5)],
)
def test_cores_are_shared_fairly(cores, wanted, level):
    assert fair_level(cores, wanted) == pytest.approx(level)


def ring_all_reduce(size, workers, latency, bandwidth):
    """The seconds of 2(N-1) rounds in which every worker sends an N-th of the bytes and receives another."""
    rounds = Start("ring", "exchange", size / workers, workers, (0,), repeats=2 * (workers - 1))
    program = (rounds, Wait("ring")) if workers > 1 else ()
    return simulate([Kind(range(workers), program)], Line(latency, 1 / bandwidth), ONE_AT_A_TIME).seconds


def overlapped_step(forward, backward, optimizer, buckets):
    """The seconds of a step; buckets: (ready, since the beginning of backward; communication), in order."""
    program, before = [Compute("forward", forward)], 0.0
    for i, (ready, communication) in enumerate(buckets):
        program += [Compute("backward", ready - before), Start(str(i), "all_reduce", communication, 2, (0,))]
        before = ready
    program += [Compute("backward", backward - before), *(Wait(str(i)) for i in range(len(buckets)))]
    program.append(Compute("optimizer", optimizer))
    return simulate([Kind(range(2), tuple(program))], Line(0.0, 1.0), ONE_AT_A_TIME).seconds


@pytest.mark.parametrize("case", RING)
def test_the_graders_seconds_of_a_ring_are_those_of_the_simulation(case):
    seconds, _ = RING[case]

    assert ring_all_reduce(*case) == pytest.approx(seconds, rel=1e-6)


@pytest.mark.parametrize(("what", "case", "right"), STEPS)
def test_the_graders_seconds_of_a_step_are_those_of_the_simulation(what, case, right):
    forward, backward, optimizer, buckets = case
    turns = accumulate((ready for ready, _ in buckets), max)  # a bucket leaves no earlier than those before it
    in_turn = [(ready, communication) for ready, (_, communication) in zip(turns, buckets, strict=True)]

    assert overlapped_step(forward, backward, optimizer, in_turn) == pytest.approx(right[0])
