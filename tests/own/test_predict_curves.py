"""Curves, filled tables, predicted timelines, and the checks' own arithmetic, from a made-up calibration."""

import csv
import json
import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from benchmark import predict as predict_command
from benchmark import tables
from benchmark.calibrate import merge, together
from benchmark.checks import prediction
from benchmark.checks.prediction import (
    NEW,
    all_cells,
    compared,
    draw,
    never_calibrated,
    state_of_the_model,
    summary,
    turns_of,
)
from benchmark.cost import calibration as stored
from benchmark.cost.calibration import EngineTimes, TransferTimes
from benchmark.cost.cell import Cell
from benchmark.cost.collective_times import Links, hops, moved, rising
from benchmark.cost.curve import curve, read_axis, rows
from benchmark.cost.predict_step import predict
from benchmark.cost.predicted_timeline import timeline
from common.errors import InputError
from common.timeline.trace import read_trace

pytestmark = pytest.mark.medium


# ------------------------------------------------------------------------------------- curves


@pytest.mark.parametrize(
    ("text", "axis"),
    [
        ("workers=1..8", ("workers", ["1", "2", "4", "8"])),
        ("workers=3..20", ("workers", ["3", "6", "12", "20"])),
        ("batch=1,5,7", ("batch", ["1", "5", "7"])),
        ("rate=100mbit,1gbit", ("rate", ["100mbit", "1gbit"])),
    ],
)
def test_an_axis_is_a_range_that_doubles_or_a_list(text, axis):
    assert read_axis(text) == axis


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nodes=1..8", "--sweep: expected workers=1..4096, .*; got 'nodes=1..8'"),
        ("workers=8..1", "--sweep workers: expected a range that rises"),
        ("workers=0,1", "--sweep workers: expected numbers from 1 on"),
        ("rate=-1gbit", "--rate: expected a rate such as 1gbit"),
    ],
)
def test_an_axis_that_is_none_is_one_clear_line(text, message):
    with pytest.raises(InputError, match=message):
        read_axis(text)


def curve_rows(calibration, cell, text):
    return rows(curve(calibration, cell, *read_axis(text)))


def test_a_curve_falls_where_communication_takes_over_and_is_a_range_beyond_four_times_what_was_calibrated(calibration):
    cell = Cell("ddp", "gpt2-tiny", 1, 4, rate="100mbit", latency=1e-3, cores=2)

    *known, far = curve_rows(calibration, cell, "workers=1,2,4,8,16,64")

    assert known[0]["speedup"] == pytest.approx(1.0)
    efficiencies = [row["efficiency"] for row in known]
    assert efficiencies == sorted(efficiencies, reverse=True)
    assert known[-1]["largest_part"] == "communication"
    assert "step_ms" not in far and far["step_ms_range"][0] < far["step_ms_range"][1]


def test_points_are_calibrated_or_not_and_have_no_figure_where_they_do_not_fit(calibration):
    of_workers = curve_rows(calibration, Cell("ddp", "gpt2-tiny", 1, 4), "workers=1..8")
    of_batch = curve_rows(calibration, Cell("ddp", "gpt2-tiny", 2, 4), "batch=4,4000")

    assert [row["range"] for row in of_workers] == ["calibrated", "calibrated", "calibrated", "extrapolated"]
    assert of_batch[0]["step_ms"] > 0
    assert of_batch[1] == {"at": "4000", "outcome": "does not fit"}


@pytest.fixture
def run_main(calibration_file, monkeypatch, capsys):
    """Run the main of a module with these words and the made-up calibration; return what it prints."""

    def run_it(module, *words):
        monkeypatch.setattr("sys.argv", ["command", "--calibration", str(calibration_file), *map(str, words)])
        module.main()
        return capsys.readouterr().out

    return run_it


def test_the_command_prints_a_table_and_one_json_line(run_main):
    printed = run_main(predict_command, "--strategy", "own_zero2", "--rate", "1gbit")

    assert "own_zero2, gpt2-tiny, 2 workers sharing this machine, 4 x 64 tokens each, link 1gbit" in printed
    result = json.loads(printed.splitlines()[-1])
    assert sum(result["parts_ms"].values()) == pytest.approx(result["step_ms"])


def test_the_command_draws_a_curve(run_main, tmp_path):
    picture = tmp_path / "curve.png"

    printed = run_main(predict_command, "--rate", "1gbit", "--sweep", "workers=1..64", "--picture", picture)

    assert picture.read_bytes().startswith(b"\x89PNG")
    result = json.loads(printed.splitlines()[-1])
    assert [point["at"] for point in result["points"]] == ["1", "2", "4", "8", "16", "32", "64"]
    assert "largest_part" in printed


def test_cells_that_cannot_be_run_are_filled_and_marked(run_main, tmp_path):
    kept = tmp_path / "t5-tiny-zero2-b1-w2"
    kept.mkdir(parents=True)
    (kept / "result.json").write_text(json.dumps({"step_ms": 33.0, "memory": {"peak": 5e6}}))
    words = ["--strategies", "zero2,zero2_offload", "--models", "t5-tiny", "--batch_sizes", "1,2,9999"]

    run_main(tables, tmp_path, "--predict", *words)

    for name, figure in (("latency", "33.00"), ("mem", "5.00")):
        head, row, _, offloaded = csv.reader((tmp_path / f"{name}_filled.csv").read_text().splitlines())
        assert head == ["optimization_level2", "1", "2", "9999"]
        assert row[:2] == ["t5-tiny", figure]
        assert row[2].endswith(" predicted") and float(row[2].split()[0]) > 0
        assert row[3] == "does not fit" and offloaded[1] == "not predicted"
    run_main(tables, tmp_path, "--predict", *words, "--workers", 64, "--memory_gb", 99)
    least, to, most, _ = next(csv.reader((tmp_path / "latency_filled.csv").read_text().splitlines()[1:]))[1].split()
    assert to == "to" and float(least) < float(most)


# ------------------------------------------------------------------------------------- links


@pytest.mark.parametrize("operation", ["all_reduce", "all_gather", "all_to_all"])
@pytest.mark.parametrize("workers", [2, 4, 8, 64])
def test_a_link_of_latency_and_bandwidth_is_predicted_by_the_algorithm(operation, workers, calibration):
    """4 workers at most were measured, at 120 MB/s and 0.1 ms a hop."""
    transfer = Links(calibration, "1gbit").transfer(operation, 2**20, workers)

    exact = hops(operation, workers) * 1e-4 + moved(operation, 2**20, workers) / 120e6
    assert transfer.latency + transfer.flow == pytest.approx(exact, rel=1e-3)


def test_a_burst_is_spent_once(calibration):
    """A link that lets 64 KiB through at once takes longer for what follows."""
    tables = [
        replace(table, bytes=[4, 65536, 2**20], seconds=[1e-4, 1e-4, 1e-4 + (2**20 - 65536) / 12e6], cpu=[0, 0, 0])
        for table in calibration.transfers
        if table.link == "100mbit" and table.operation == "hop"
    ]
    links = Links(replace(calibration, transfers=tables), "100mbit")

    assert links.transfer("hop", 65536, 2, spent=0).flow == pytest.approx(0)
    spent = links.burst - 1e-4 * 12.5e6  # the rest comes back in the latency
    assert links.transfer("hop", 65536, 2, spent=links.burst).flow == pytest.approx(spent / 12e6)


def test_an_idle_link_gets_its_burst_back_however_much_it_carried(calibration):
    links = Links(calibration, "100mbit")

    assert links.spent_after(0.0, 1e9) == links.burst
    assert links.spent_after(0.001, 1e9) == links.burst - 12500
    assert links.spent_after(1.0, 1e9) == 0.0


def test_a_link_that_was_not_calibrated_lets_its_burst_through(calibration):
    links = Links(calibration, "300mbit")

    fresh, spent = (links.transfer("hop", 2**20, 2, spent).flow for spent in (0.0, 1e9))

    back = links.transfer("hop", 2**20, 2).latency * 300e6 / 8  # bytes of the burst that come back meanwhile
    assert spent - fresh == pytest.approx((links.burst - back) / (300e6 / 8) * 1514 / 1448, rel=1e-6)


def test_an_operation_occupies_a_link_for_its_bytes_only(calibration):
    """A lone all_reduce that needs twice the time of its bytes waits for the rest; others can send meanwhile."""
    table = TransferTimes("100mbit", "all_reduce", 2, [4, 2**20], [1e-4, 1e-4 + 2 * 0.0877], [0.0, 0.0])
    network = Links(replace(calibration, transfers=[table]), "100mbit")

    transfer = network.transfer("all_reduce", 2**20, 2)

    assert transfer.latency + transfer.flow == pytest.approx(1e-4 + 2 * 0.0877, rel=1e-3)
    assert transfer.flow == pytest.approx(8 * 2**20 / 100e6 * 1514 / 1448, rel=1e-3)
    assert transfer.lag == 0


@pytest.mark.parametrize(
    ("operation", "workers", "share"),
    [("all_to_all", 2, 1), ("exchange", 2, 1), ("all_gather", 2, 0.5), ("all_reduce", 2, 0), ("hop", 2, 0),
     ("all_to_all", 3, 0.5), ("exchange", 3, 0), ("all_gather", 3, 0)],
)  # fmt: skip
@pytest.mark.parametrize("rate", ["100mbit", "300mbit", None])
def test_one_direction_of_a_connection_waits_for_the_other(operation, workers, share, rate, calibration):
    transfer = Links(calibration, rate).transfer(operation, 2**20, workers)

    assert transfer.lag == pytest.approx(share * transfer.flow if rate else 0)


@pytest.mark.parametrize(("workers", "groups"), [(1, [["ddp"], ["fsdp"]]), (10**6, [["ddp", "fsdp"]])])
def test_engines_share_a_process_only_where_a_worker_has_one_thread(workers, groups, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})

    assert together(["ddp", "fsdp"], workers) == groups
    assert together([], workers) == []


def test_a_slow_measurement_of_a_small_message_is_taken_for_noise():
    assert rising([0.3, 36.0, 0.9, 20.0, 80.0]) == [0.3, 0.9, 0.9, 20.0, 80.0]


# ------------------------------------------------------------------------------------- timelines


@pytest.mark.parametrize("strategy", ["ddp", "pipeline", "own_zero3"])
def test_a_predicted_timeline_is_consistent(strategy, calibration):
    predicted = predict(calibration, Cell(strategy, "gpt2-tiny", 2, 4, rate="100mbit"))

    drawn = timeline(predicted)

    assert drawn.world_size == 2
    for rank in range(2):
        process = sorted((box.start, box.end) for box in drawn.boxes if (box.rank, box.row) == (rank, "process"))
        assert all(left[1] <= right[0] + 1e-9 for left, right in pairwise(process))
        assert process[-1][1] <= predicted.simulated.seconds + 1e-9
        sent = sum(box.bytes for box in drawn.boxes if (box.rank, box.row) == (rank, "network"))
        assert sent > 0
    if strategy == "pipeline":
        assert {"forward 0", "backward 7"} <= {box.name for box in drawn.boxes}
        assert any(wait.rank == 1 for box in drawn.boxes if box.rank == 0 for wait in box.waits)


def test_of_many_ranks_one_of_each_kind_is_drawn(calibration):
    predicted = predict(calibration, Cell("ddp", "gpt2-tiny", 4096, 4, rate="1gbit", cores=2))

    assert timeline(predicted).label(0) == "each of 4,096 ranks"


def test_the_command_writes_a_timeline_that_can_be_read(run_main, tmp_path):
    run_main(predict_command, "--strategy", "own_overlap", "--rate", "100mbit", "--timeline", tmp_path / "t")

    assert read_trace(tmp_path / "t" / "trace.json").predicted
    assert (tmp_path / "t" / "timeline.png").exists() and (tmp_path / "t" / "timeline.html").exists()


# ------------------------------------------------------------------------------------- the checks


def test_sixty_cells_are_drawn_by_the_state_of_the_model_over_all_links_and_workers():
    cells = draw(60, "one state")

    assert cells == draw(60, "one state") and cells != draw(60, "another state")
    assert len(set(cells)) == 60
    assert {(cell.rate, cell.workers) for cell in cells} == {(cell.rate, cell.workers) for cell in all_cells()}
    assert {name for cell in cells for name in never_calibrated(cell)} == {"strategy", "model", "workers", "link"}


def test_whoever_changes_the_cost_model_draws_other_cells(tmp_path, monkeypatch):
    before = state_of_the_model()
    copy = shutil.copytree(Path(stored.__file__).parent, tmp_path / "cost")
    monkeypatch.setattr(stored, "__file__", str(copy / "calibration.py"))

    same = state_of_the_model()
    (copy / "programs" / "sharded.py").write_text("WHOLE = 1")

    assert same == before != state_of_the_model()


def test_nothing_that_is_new_is_calibrated(monkeypatch, calibration):
    asked = []
    monkeypatch.setattr(prediction, "compile_operators", lambda *names, **flags: None)
    monkeypatch.setattr(prediction, "extended", lambda known, flags: asked.append(flags) or calibration)

    prediction.calibrate(draw(60, "any"), 2.0)

    words = {str(value) for flags in asked for name, values in flags.items() if name != "batches" for value in values}
    assert len(asked) == 3 and len(NEW["strategy"]) >= 6
    assert not words & {str(value) for values in NEW.values() for value in values}


def test_a_prediction_does_not_depend_on_its_cell_s_measurement_and_the_naive_one_adds_everything_up(calibration):
    """Naive: 4 examples of 128 ms, a batch of 8: twice as long; then 4.47 MB over 12.5 MB/s."""
    cell = Cell("ddp", "gpt2-tiny", 2, 8, rate="100mbit")
    launches = [
        [EngineTimes(name, "gpt2-tiny", 64, 8, 2, seconds, 10) for name in ("ddp", "ddp again")]
        for seconds in (0.1, 0.9)
    ]

    fast, slow = (compared(calibration, cell, launch) for launch in launches)

    assert fast["predicted ms"] == slow["predicted ms"]
    assert fast["measured ms"] == pytest.approx(100) and slow["measured ms"] == pytest.approx(900)
    naive = [row["measured ms"] * (1 + row["naive"] / 100) for row in (fast, slow)]
    assert naive == pytest.approx([1e3 * (2 * 0.128 + 4.47 / 12.5)] * 2, rel=0.01)


def test_cells_of_a_model_are_resident_together_each_of_them_twice():
    cells = [Cell("ddp", "gpt2-tiny", 2, 2), Cell("own_ring", "gpt2-tiny", 2, 3)]
    twice = [("ddp", 2), ("ddp again", 2), ("own_ring", 3), ("own_ring again", 3)]

    assert turns_of(cells, ["ddp", "own_ring"]) == [("gpt2-tiny", twice)]


def checked(errors, naive):
    return [
        {"error": error, "naive": naive, "A/A": 1.0, "never calibrated": new}
        for error, new in zip(errors, ("", "strategy, link", ""), strict=True)
    ]


def test_errors_are_those_of_the_predictions():
    judged, *parts = summary(checked((0.0, -10.0, 2.0), 100.0))

    assert (judged["of"], judged["mean"], judged["largest"], judged["holds"]) == ("all", 4.0, 10.0, True)
    assert [(part["of"], part["cells"], part["mean"]) for part in parts] == [
        ("another strategy", 1, 10.0), ("another link", 1, 10.0), ("all of it calibrated", 2, 1.0),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("errors", "naive"),
    [((0, 0, 21), 100), ((10, 10, 10), 100), ((5, 5, 5), -5)],
    ids=["one is too wrong", "the mean is too wrong", "a table says as much"],
)
def test_predictions_that_are_too_wrong_do_not_hold(errors, naive):
    assert not summary(checked(errors, naive))[0]["holds"]


def test_an_entry_that_is_measured_again_replaces_the_older_one(calibration):
    one, other = (EngineTimes(name, "gpt2-tiny", 64, 4, 2, 1.0, 5) for name in ("ddp", "fsdp"))
    again = replace(stored.empty(), engines=[replace(one, seconds=2.0)])

    merged = merge(replace(calibration, engines=[one, other]), again)

    assert [entry.seconds for entry in merged.engines] == [1.0, 2.0] and merged.profiles == calibration.profiles


def test_further_hops_cost_what_a_whole_ring_takes_and_not_what_gloo_takes_for_one_number():
    bytes_, ring = [4, 4096, 65536], 4 * 1e-3  # three workers, four hops
    table = TransferTimes("loopback", "all_reduce", 3, bytes_, [2e-3, ring + 4096e-9, ring + 65536e-9], [0.0] * 3)

    assert table.latency_of_all_hops == pytest.approx(ring)
