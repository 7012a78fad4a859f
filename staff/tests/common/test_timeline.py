"""--timeline from its parts to whole runs: clocks, who was blocked and for whom, and where the time of a step went."""

import functools
import itertools
import json
from pathlib import Path

import pytest
import torch

from common.paths import ROOT
from common.timeline.boxes import Box, Step, Timeline, Wait
from common.timeline.parts import NAMES, parts
from common.timeline.picture import NETWORK_ROW, PROCESS, RANK, rectangles
from common.timeline.spans import duration, spans_of, within
from common.timeline.trace import read_trace
from common.timeline.waiting import Blocked, WaitMessage, blocked, waits
from staff.tests import workers
from staff.tests.common.made_timelines import after_backward, during_backward
from staff.tests.common.timeline_ranks import LAYERS, SIZE, SLEEP, SLOW
from staff.tests.tasks import one_process
from staff.tests.warm import Script


def test_the_parts_of_a_step_add_up_to_it():
    for row in parts(after_backward(slow=2)):
        waited = 0.0 if row.rank == 2 else 0.02
        assert (row.data, row.exposed, row.waiting) == pytest.approx((0.004, 0.03, waited))
        assert row.computing == pytest.approx(0.09 if row.rank == 2 else 0.07)
        assert row.other == pytest.approx(0.001, abs=1e-9) and row.hidden == pytest.approx(0)
        assert sum(getattr(row, name) for name in NAMES) == pytest.approx(row.seconds) == 0.125
    row = parts(during_backward())[0]  # hidden is what travels while the process computes
    assert (row.exposed, row.hidden, row.waiting) == pytest.approx((0.01, 0.03, 0))
    without_collective = (Box(0, "process", "forward", 0.0, 0.2, waits=(Wait(0.2, 0.5, 1),)),)
    (row,) = parts(Timeline("threads", 1, (Step(0, 0, 0.0, 0.6),), without_collective))
    assert (row.computing, row.waiting, row.other) == pytest.approx((0.2, 0.3, 0.1))


def test_a_rank_that_goes_on_before_the_last_one_arrives_waits_no_longer():
    late, early = WaitMessage("gather", 0.5, 0.6, other=0), WaitMessage("gather", 0.0, 0.2, other=0)

    assert waits(1, early, {0: late, 1: early}, Blocked(0.0, 0.2, 0), []) == [Wait(0.0, 0.2, 0)]


@pytest.mark.parametrize(
    ("busy", "until", "spans"),
    [  # in seconds, of a phase of 1 s; the message has left at 0.2
        ([(0.0, 0.5), (0.5002, 1.0)], 0.5002, []),  # Python, between two operations
        ([(0.0, 0.5), (0.502, 1.0)], 0.502, [(0.5, 0.502)]),
        ([(0.0, 0.9998)], 1.0, [(0.9998, 1.0)]),  # at the end of the phase, nothing is computed behind it
        ([], 1.0, [(0.2, 1.0)]),
    ],
)
def test_a_process_is_blocked_where_it_does_nothing_but_wait_for_its_message(busy, until, spans):
    message = WaitMessage("all_reduce", 0.2, until)

    assert blocked((0.0, 1.0), busy, [message]) == [Blocked(start, end, 0) for start, end in spans]


def test_messages_that_travel_at_the_same_time_share_the_thin_row_of_their_rank():
    all_drawn = rectangles(during_backward(), 1)
    drawn = [one for one in all_drawn if one.box.row == "network"]

    assert len(all_drawn) == 4 + len(drawn) == 4 + 3  # each box once
    assert len({one.top for one in drawn}) == 2
    assert max(one.top + one.height for one in drawn) == pytest.approx(RANK + PROCESS + NETWORK_ROW)


# ------------------------------------------------------------------------------------ real ranks, made to fit


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    """The folder with the scenes of timeline_ranks.py, on 4 ranks."""
    folder = tmp_path_factory.mktemp("scenes")
    names = ("slow", "groups", "buckets", "clocks")
    code = Script(ROOT / "staff/tests/common/timeline_ranks.py", (folder, 4, *names), folder / "log").wait(timeout=240)
    assert code == 0, (folder / "log").read_text()
    return folder


def network(timeline: Timeline, rank: int, step: int) -> list[Box]:
    """What the network of a rank did in a step."""
    limits = next((s.start, s.end) for s in timeline.steps if (s.rank, s.number) == (rank, step))
    boxes = [box for box in timeline.boxes if (box.rank, box.row) == (rank, "network")]
    return [box for box in boxes if limits[0] <= box.start < limits[1]]


def waited(timeline: Timeline, rank: int) -> dict[int, float]:
    """{rank: for how many seconds `rank` waited for it in all}."""
    seconds: dict[int, float] = {}
    for one in (one for box in timeline.boxes if box.rank == rank for one in box.waits):
        seconds[one.rank] = seconds.get(one.rank, 0.0) + one.end - one.start
    return seconds


@pytest.mark.medium
def test_clocks_of_different_machines_are_aligned_within_the_error_that_is_stated(scenes):
    clocks = torch.load(scenes / "clocks.pt", weights_only=False)

    for rank, clock in enumerate(clocks):
        assert (clock.error > 0) == (rank > 0)
        assert clock.ahead == pytest.approx(rank, abs=clock.error + 1e-9)  # rank r's clock is r seconds ahead
    assert len(clocks) == 4


@pytest.mark.medium
def test_the_others_wait_for_a_slow_rank(scenes):
    timeline = read_trace(scenes / "slow" / "timeline.json")

    for rank in range(4):
        of_rank = waited(timeline, rank)
        if rank == SLOW:
            assert sum(of_rank.values()) < SLEEP
        else:
            assert of_rank[SLOW] > SLEEP and max(of_rank, key=lambda other: of_rank[other]) == SLOW
    first = [network(timeline, rank, 2)[0] for rank in range(4)]
    assert {box.waits[0].rank for box in first if box.rank != SLOW} == {SLOW} and not first[SLOW].waits


@pytest.mark.medium
@pytest.mark.parametrize("scene", ["slow", "groups", "buckets"])
def test_the_parts_add_up_to_the_step_and_every_collective_is_there_with_its_bytes(scenes, scene):
    timeline = check_parts(scenes / scene, 4)

    assert {step.number for step in timeline.steps} == {2, 3} and min(step.start for step in timeline.steps) == 0
    for rank in range(4):
        record = json.loads((scenes / scene / f"rank{rank}.json").read_text())
        check_bytes(record, timeline)
        boxes = network(timeline, rank, 3)
        assert sum(box.bytes for box in boxes) == 4 * LAYERS * (SIZE * SIZE + SIZE)
        if scene == "buckets":
            assert len(boxes) > 3
        else:
            assert [box.name for box in boxes] == ["all_reduce"] * 2 * LAYERS
            assert all(a.end <= b.start for a, b in itertools.pairwise(boxes))
            check_communication(record, timeline)
        assert scene != "groups" or set(waited(timeline, rank)) <= {(rank + 2) % 4}
        own = [box for box in timeline.boxes if (box.rank, box.row) == (rank, "process")]
        own.sort(key=lambda box: box.start)
        assert all(a.end <= b.start + 1e-8 for a, b in itertools.pairwise(own))


def check_parts(folder: Path, count: int) -> Timeline:
    """The files of a run with --timeline 2: the parts of each step add up to what the record has measured."""
    timeline = read_trace(folder / "timeline.json")
    assert timeline.run and (folder / "timeline.png").stat().st_size > 5000 and (folder / "timeline.html").exists()
    for rank in range(count):
        record = json.loads((folder / f"rank{rank}.json").read_text())
        recorded = record["timeline"]
        assert recorded["run"] == timeline.run
        rows = range(timeline.world_size) if timeline.labels else [rank]
        assert {(row["rank"], row["step"]) for row in recorded["steps"]} == {(r, step) for r in rows for step in (2, 3)}
        for row in recorded["steps"]:
            measured = record["iterations"][row["step"]]["seconds"]
            assert sum(row[part] for part in NAMES) == pytest.approx(measured, rel=0.01)
            assert all(row[part] >= -1e-6 for part in (*NAMES, "hidden")), row  # boxes that overlap count twice
            assert row["computing"] > 0
    return timeline


def check_bytes(record: dict, timeline: Timeline) -> None:
    """A step hands over what the record counts."""
    counted = sum(entry["bytes"] for entry in record["collectives"]) / len(record["iterations"])
    for step in (2, 3):
        assert sum(box.bytes for box in network(timeline, record["rank"], step)) == pytest.approx(counted, rel=1e-3)


def check_communication(record: dict, timeline: Timeline) -> None:
    """What the phase communication took is exposed, or waited for, or the rank's own code."""
    for row in record["timeline"]["steps"]:
        phase = record["iterations"][row["step"]]["phases"]["communication"]
        (step,) = [one for one in timeline.steps if (one.rank, one.number) == (row["rank"], row["step"])]
        of_rank = [box for box in timeline.boxes if (box.rank, box.name) == (row["rank"], "averaging")]
        averaging = duration(within(spans_of(of_rank), (step.start, step.end)))
        assert row["exposed"] + row["waiting"] + averaging == pytest.approx(phase, rel=0.01, abs=1e-4)


# ---------------------------------------------------------------------------------------- the task scripts

SCRIPTS = {
    "1": ("task1_single/run_glue.py", 1, ("--do_train",)),
    "2a": ("task2a_gather_scatter/run_glue.py", 3, ("--do_train",)),
    "2b": ("task2b_allreduce/run_glue.py", 3, ("--do_train",)),
    "3": ("task3_ddp/run_glue.py", 3, ("--do_train",)),
    "4": ("task4_traffic/run_glue.py", 2, ("--do_train",)),
    "gpipe": ("pipeline/run_gpt2.py", 2, ("--schedule", "gpipe", "--batch_size", 8)),
    "threads": ("pipeline/run_gpt2.py", 1, ("--model_parallel_mode", "pipeline_parallel", "--batch_size", 8)),
    "zero3": ("beyond/run_gpt2.py", 2, ("--strategy", "zero3", "--batch_size", 8)),
}
FEW = ("1", "gpipe", "threads")  # in make test; make bank runs the others as well
EACH = [name if name in FEW else pytest.param(name, marks=pytest.mark.proof) for name in SCRIPTS]


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """ran(name) -> the records of all ranks, and the timeline; each script runs once, when it is first asked for."""

    @functools.cache
    def run(name):
        script, count, flags = SCRIPTS[name]
        folder = tmp_path_factory.mktemp(name)
        words = ("--timeline", 2, "--max_steps", 6, "--dropout", 0, *flags)
        if count == 1:
            records = [one_process.run(script, folder / "run", *words)]
        else:
            records = workers.run(ROOT / script, count, folder, *words)
        return records, check_parts(folder / "run", count), folder / "run"

    return run


@pytest.mark.medium
@pytest.mark.parametrize("name", EACH)
def test_the_timeline_of_each_script_has_all_that_it_communicates_and_nothing_of_itself(ran, name):
    records, timeline, folder = ran(name)

    for record in records:
        if name in ("2a", "2b", "3"):
            check_bytes(record, timeline)
        if name in ("2a", "2b"):
            check_communication(record, timeline)
        if name == "4":
            assert "gather" not in {entry["name"] for entry in record["collectives"]}
            traffic = json.loads((folder / f"traffic_{record['rank']}.json").read_text())
            assert sum(group["iterations"] for group in traffic["sent"]) == len(record["iterations"])
        if name == "zero3":
            assert {"all_gather", "all_to_all"} <= {box.name for box in network(timeline, record["rank"], 2)}


@pytest.mark.medium
def test_a_pipeline_over_processes_shows_every_micro_batch(ran):
    _, timeline, _ = ran("gpipe")

    for rank in range(2):
        names = {box.name for box in timeline.boxes if (box.rank, box.row) == (rank, "process")}
        assert names >= {f"{phase} {i}" for phase in ("forward", "backward") for i in range(4)}
        sent = [box.name for box in network(timeline, rank, 2) if box.name in ("send", "recv")]
        assert sent.count("send") == sent.count("recv") == 5  # 4 micro-batches, and the shared matrix's gradient
    assert set(waited(timeline, 0)) == {1} and set(waited(timeline, 1)) == {0}


@pytest.mark.medium
def test_a_pipeline_with_threads_has_a_row_for_the_caller_and_one_for_each_partition(ran):
    _, timeline, folder = ran("threads")

    assert timeline.labels == ("caller", "part. 0", "part. 1")
    for row in (1, 2):
        boxes = [box.name for box in timeline.boxes if box.rank == row]
        assert sorted(boxes) == sorted(2 * [f"{phase} {i}" for phase in ("forward", "backward") for i in range(4)])
    assert waited(timeline, 0).keys() <= {1, 2} and waited(timeline, 2).keys() == {0, 1}
    assert (folder / "trace.json").exists()  # the step that the script itself traces
