"""benchmark.compare: a table of real rounds with a strategy that is wrong."""

import csv
import json
import statistics
import sys
from dataclasses import replace

import pytest

from benchmark.arguments import parse
from benchmark.compare import add_flags
from benchmark.measure.comparison import WrongStrategy, evaluate, notes_of, over_launches, read_rounds
from benchmark.strategies import Label
from common.paths import ROOT
from staff.tests.cluster.started_processes import run
from staff.tests.workers import group

pytestmark = [
    pytest.mark.medium,
    pytest.mark.skipif(sys.platform != "linux", reason="starts workers with gloo"),
]
# A user's own model, whose file breaks the strategy own_ring: no gradient is averaged.
BROKEN_RING = """
from benchmark.engines import own
from benchmark.example_model import build, metric
own.average_gradients = lambda model: None
"""
WARM_UP = 3


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """The folder that compare has written on two workers, its exit codes, and what the first worker has printed."""
    folder = tmp_path_factory.mktemp("compare")
    (folder / "model.py").write_text(BROKEN_RING)
    words = ["--model", f"{folder / 'model.py'}:build", "--strategies", "fsdp,own_ring", "--max_steps", 10]
    words += ["--latex", "--engine", f"{ROOT}/staff/tests/benchmark/broken_engines.py:Averaging,doubled"]
    codes = group(ROOT / "benchmark" / "compare.py", 2, folder, *words)
    return folder / "run", codes, (folder / "log0.txt").read_text()


@pytest.fixture
def rounds(compared):
    return read_rounds(compared[0] / "rounds.json")


@pytest.fixture
def settings(compared):
    words = ["--model", f"{compared[0].parent / 'model.py'}:build", "--world_size", "2", "--max_steps", "10"]
    words += ["--no_cuda"]
    return parse(words, "compare", add_flags=add_flags)[0]


def rows_in(folder) -> dict:
    return {row["strategy"]: row for row in json.loads((folder / "comparison.json").read_text())["rows"]}


def test_a_wrong_strategy_is_named_and_not_timed_and_the_exit_code_is_1(compared):
    folder, codes, printed = compared

    rows = rows_in(folder)

    assert codes == [1, 0], printed
    assert "own_ring" in json.loads((folder / "comparison.json").read_text())["wrong"]
    assert rows["own_ring"]["gradient"].startswith("error") and "step_ms" not in rows["own_ring"]
    assert rows["doubled"]["gradient"] == "x 2.0000 (every parameter)" and "step_ms" not in rows["doubled"]
    assert "wrong: own_ring" in printed.splitlines()[-1]
    others = {name: row["gradient"] for name, row in rows.items() if name not in ("own_ring", "doubled")}
    assert others == dict.fromkeys(["single", "ddp", "fsdp", "Averaging", "ddp again"], "ok")


def test_figures_are_those_of_the_rounds_after_the_warm_up(compared, rounds):
    folder, _, printed = compared
    rows, steps_ms = rows_in(folder), json.loads((folder / "comparison.json").read_text())["steps_ms"]

    for column, label in enumerate(rounds.labels):
        row, taken = rows[str(label)], [1e3 * times[column] for times in rounds.seconds[WARM_UP:]]
        assert steps_ms[str(label)] == pytest.approx(taken)
        assert row["step_ms"] == pytest.approx(statistics.median(taken))
        assert row["ratio"] == pytest.approx(row["step_ms"] / rows["ddp"]["step_ms"])
        assert row["ratio_95"][0] <= row["ratio"] <= row["ratio_95"][1]
        assert row["samples_per_second"] == pytest.approx(2 * 4 / row["step_ms"] * 1e3)
        assert row["loss_difference"] < 1e-5 and row["last_loss"] == pytest.approx(rounds.losses[0][-1], abs=1e-5)
        assert row["norm"] == pytest.approx(rows["single"]["norm"], rel=1e-4)
        assert 0 < row["metric"] < 0.2  # ten steps: about as good as guessing one of 64
    assert {len(norms) for norms in rounds.norms} == {len(rounds.seconds)}  # none of the traced steps
    assert [rows[name]["sent_bytes"] for name in ("single", "ddp")] == [0, rows["ddp again"]["sent_bytes"]]
    times = [row["step_ms"] for row in rows.values() if "step_ms" in row]
    assert times == sorted(times)
    with (folder / "comparison.csv").open() as file:
        assert {row["strategy"]: float(row["step_ms"]) for row in csv.DictReader(file)} == {
            name: row["step_ms"] for name, row in rows.items() if "step_ms" in row
        }
    assert (folder / "comparison.png").stat().st_size > 5000
    assert (folder / "comparison.pdf").read_bytes().startswith(b"%PDF")
    latex = (folder / "comparison.tex").read_text()
    assert "2 workers, 4 examples each" in latex and "fp32" in latex
    assert latex.count(r" \\") == 1 + len(rows)  # a line for the headings
    assert "4 examples each, 4 blocks" in printed


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda rounds: rounds.norms[2].__setitem__(4, 0.0), "norm x 0.0000 in step 5"),
        (lambda rounds: rounds.losses[2].__setitem__(4, float("nan")), "not a number"),
        (lambda rounds: rounds.norms[2].__setitem__(4, None), ""),  # not every engine knows it
    ],
)
def test_what_is_wrong_in_the_timed_steps_is_a_fault(rounds, settings, change, says):
    change(rounds)

    rows, faults = evaluate(settings, "ddp", rounds, None)

    assert [says in fault.gradient for fault in faults if fault.label == rounds.labels[2]] == [True] * bool(says)
    assert [row.label for row in rows if row.label == rounds.labels[2]] == [rounds.labels[2]] * (not says)


def test_of_several_launches_a_row_has_the_means_and_their_intervals(rounds, settings):
    def launch(factor: float):
        figures = [[replace(one, peak_bytes=factor, exposed_ms=10 * factor) for one in own] for own in rounds.figures]
        seconds = [[factor * second for second in taken] for taken in rounds.seconds]
        return replace(rounds, seconds=seconds, figures=figures)

    launches = [evaluate(settings, "ddp", launch(factor), None) for factor in (1, 2, 4)]
    one = {row.label: row for row in launches[0][0]}

    rows, faults = over_launches(launches)

    assert {row.label for row in rows} == set(one) and Label("own_ring") in [fault.label for fault in faults]
    for row in rows:  # of 1, 2, 4: mean 7 / 3, its error 0.8819, t of 2 degrees of freedom 4.303
        first = one[row.label]
        assert row.step_ms == pytest.approx(7 / 3 * first.step_ms)
        assert row.step_ms_95 == pytest.approx((-1.461 * first.step_ms, 6.128 * first.step_ms), rel=0.001)
        assert row.samples_per_second == pytest.approx(first.samples_per_second * (1 + 1 / 2 + 1 / 4) / 3)
        assert (row.measured.peak_bytes, *row.peak_bytes_95) == pytest.approx((7 / 3, -1.461, 6.128), abs=0.001)
        assert (row.measured.exposed_ms, *row.exposed_ms_95) == pytest.approx((70 / 3, -14.61, 61.28), abs=0.01)
        assert (row.ratio, *row.ratio_95) == pytest.approx([first.ratio] * 3)
    wrong = launches[0][0], [*launches[0][1], WrongStrategy(Label("fsdp"), "norm x 2", "fsdp: norm x 2")]
    assert Label("fsdp") not in [row.label for row in over_launches([wrong, *launches[1:]])[0]]


def test_few_rounds_and_a_busy_machine_are_noted(rounds, settings):
    again = rounds.labels.index(Label("ddp", "again"))
    many = [times for _ in range(8) for times in rounds.seconds[-1:]]
    slower = [[2 * t if column == again else t for column, t in enumerate(times)] for times in many]

    def notes(seconds, max_steps):
        longer = replace(settings, max_steps=max_steps)
        rows, _ = evaluate(longer, "ddp", replace(rounds, seconds=rounds.seconds[:WARM_UP] + seconds), None)
        return notes_of(longer, rows, "ddp")

    assert "8 rounds are few" in notes(many, 11)[0]
    many, slower = 3 * many, 3 * slower
    assert "busy" in "".join(notes(slower, 27))


@pytest.mark.proof
def test_each_launch_starts_its_workers_anew_and_the_table_has_all_of_them(tmp_path):
    words = ["--workers", "2", "--strategies", "ddp", "--launches", "3", "--max_steps", "5", "--length", "16"]

    done = run("-m", "benchmark.compare", *words, "--output_dir", tmp_path / "c", timeout=900)

    result = json.loads(done.stdout.splitlines()[-1])
    files = [tmp_path / "c" / f"rounds{name}.json" for name in ("", "_1", "_2")]
    times = [read_rounds(file).steps_ms(Label("ddp")) for file in files]
    assert result["launches"] == 3 and result["steps_ms"]["ddp"] == [ms for launch in times for ms in launch]
    (row,) = (row for row in result["rows"] if row["strategy"] == "ddp")
    assert row["step_ms"] == pytest.approx(statistics.fmean(map(statistics.median, times)))
    assert row["step_ms_95"][0] < row["step_ms"] < row["step_ms_95"][1] and row["gradient"] == "ok"
    assert "means of 3 launches" in done.stdout
