"""Calibration with real workers, and predictions from what it measured; no verdict here depends on how long it took."""

import json

import pytest

from benchmark import calibrate as calibrate_command
from benchmark.cost.architecture import describe
from benchmark.cost.calibration import load
from benchmark.cost.cell import Cell
from benchmark.cost.collective_times import moved
from benchmark.cost.predict_step import predict
from benchmark.cost.programs.unsharded import ddp_buckets
from cluster.emulate import why_not
from common.paths import ROOT
from tests.own.started_processes import run
from tests.own.workers import group

pytest.importorskip("tensorboard")
QUICK = ["--seconds", "0.3", "--batches", "1,2", "--engine_batch", "2"]
TOO_LONG = 900  # seconds


def calibrate(path, *words):
    process = run("-m", "benchmark.calibrate", *QUICK, *words, "--output", path, timeout=TOO_LONG)
    assert process.returncode == 0, process.stderr[-2000:]
    return process


@pytest.mark.parametrize(
    ("workers", "strategies"),
    [
        pytest.param((2,), ("ddp",), marks=pytest.mark.medium),
        pytest.param((1, 2), ("ddp", "own_zero2"), marks=pytest.mark.proof),
    ],
)
def test_what_was_calibrated_on_loopback_can_be_predicted(tmp_path, workers, strategies, monkeypatch, capsys):
    def start(module, count, words, quiet):
        return max(group(ROOT / f"{module.replace('.', '/')}.py", count, tmp_path, *words))

    path = tmp_path / "calibration.json"
    words = ["--workers", ",".join(map(str, workers)), "--strategies", ",".join(strategies), "--output", str(path)]
    monkeypatch.setattr(calibrate_command, "start_workers", start)
    monkeypatch.setattr("sys.argv", ["calibrate", *QUICK, *words])

    calibrate_command.main()

    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert json.loads(lines[-1])["file"] == str(path)
    calibration = load(path)  # of this machine and these versions
    architecture = describe("gpt2-tiny", 64)
    assert {(p.batch, p.workers) for p in calibration.profiles} == {
        (batch, count) for batch in (1, 2) for count in workers
    }
    for profile in calibration.profiles:
        assert list(profile.forward) == list(architecture.flops)
        assert set(profile.backward) == {weight.name for weight in architecture.weights}
        assert list(profile.backward)[-1] in ("transformer.wte.weight", "transformer.wpe.weight")
        assert profile.seconds > 0
    operations = {(table.operation, table.workers) for table in calibration.transfers}
    assert operations == {(name, 2) for name in ("all_reduce", "all_gather", "all_to_all", "exchange", "hop")}
    assert all(len(t.seconds) == len(t.bytes) and min(t.seconds) > 0 for t in calibration.transfers)
    engines = {(entry.strategy, entry.workers) for entry in calibration.engines}
    assert engines == {(strategy, 2) for strategy in strategies}  # one worker alone has nothing that an engine adds
    assert all(len(line.split()) == 7 for line in lines if line.startswith("loopback")), lines  # none are glued
    assert "loopback, 2 workers: " in printed.err and "of about" in printed.err
    for strategy in (*strategies, "fsdp"):
        prediction = predict(calibration, Cell(strategy, "gpt2-tiny", 2, 2))
        assert sum(prediction.parts.values()) == pytest.approx(prediction.seconds)
    weights = {weight.name: weight for weight in architecture.weights}
    buckets = ddp_buckets([weights[name] for name in calibration.profiles[-1].backward])
    assert [sum(weight.bytes for weight in bucket) for bucket in buckets] == [1_056_768, 3_413_504]  # recorded


@pytest.mark.proof
@pytest.mark.skipif(bool(why_not()), reason="no emulated nodes on this machine")
def test_a_calibrated_link_knows_its_frames(tmp_path):
    path = tmp_path / "calibration.json"
    calibrate(path, "--workers", "2", "--strategies", "none")

    calibrate(path, "--workers", "2", "--strategies", "none", "--links", "100mbit")

    calibration = load(path)
    assert calibration.links == ["loopback", "100mbit"] and calibration.profiles  # loopback's are still there
    for table in calibration.transfers:
        if table.link == "loopback":
            continue
        assert table.bytes[-1] == 2**20  # more would take too long
        payload = moved(table.operation, table.bytes[-1], 2)
        # A frame of 1,514 bytes carries 1,448, and every second one is answered: 7 % at most.
        assert 1.0 <= table.wire[-1] / payload < 1.08, table.operation
    prediction = predict(calibration, Cell("ddp", "gpt2-tiny", 2, 2, rate="100mbit"))
    assert prediction.seconds > 4_470_272 * 8 / 100e6 * 0.95  # bytes that no link of 100 Mbit/s lets through faster
    assert not any("link" in note for note in prediction.notes)


@pytest.mark.proof
def test_the_check_of_predictions_prints_its_cells_and_figures():
    process = run("-m", "benchmark.checks.prediction", "--quick", timeout=TOO_LONG)

    assert process.returncode == 0, process.stderr[-2000:]
    result = json.loads(process.stdout.splitlines()[-1])
    cells = result["cells"][:3]
    assert [row["strategy"] for row in cells] == ["ddp", "own_overlap", "own_zero2"]
    assert all(row["measured ms"] > 0 and row["predicted ms"] > 0 for row in cells)
    assert result["holds"]
