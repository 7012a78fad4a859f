"""Predicted bytes and memory beside those that a real run counts; neither depends on how busy the machine is."""

import importlib.util
import json

import pytest

from benchmark.cost.cell import Cell
from benchmark.cost.predict_step import predict
from benchmark.strategies import STRATEGIES
from cluster.emulate import why_not
from common.paths import ROOT
from tests.own.made_up_calibration import made_up_calibration
from tests.own.started_processes import run
from tests.own.workers import group

pytest.importorskip("tensorboard")
LENGTH, BATCH = 32, 2
HAS_MEGATRON = importlib.util.find_spec("megatron") is not None
SENT, KEPT, FRAMED = 0.003, 0.02, 0.003  # allowed, as parts of what was counted
UNCOUNTED = (
    "own_ring",
    "horovod",
    *(name for name, row in STRATEGIES.items() if row.cuts),
)  # the flight recorder sees no send, and counts calls in a group of one
TOO_LONG = 900  # seconds


def counted(tmp_path, model, workers, strategies, *more):
    """The rows of benchmark.accounting for real runs of the strategies."""
    words = ["--workers", ",".join(map(str, workers)), "--model", model, "--batch_size", BATCH, "--length", LENGTH]
    words += ["--only", ",".join(strategies), "--output_dir", tmp_path / "accounting", "--overwrite_output_dir", *more]
    done = run("-m", "benchmark.accounting", *words, timeout=TOO_LONG)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])["rows"]


def predicted(row, model, calibration):
    return predict(calibration, Cell(row["strategy"], model, row["workers"], BATCH, LENGTH, memory=1e12))


def check(rows, model):
    calibration = made_up_calibration(model, LENGTH)
    for row in rows:
        if row["strategy"].endswith("_offload"):  # not predicted
            continue
        prediction = predicted(row, model, calibration)
        about = f"{model}, {row['strategy']}, {row['workers']} workers"
        assert prediction.sent_bytes == pytest.approx(row["payload"], rel=SENT), about
        assert prediction.memory.kept == pytest.approx(row["counted"], rel=KEPT), about
        assert prediction.memory.textbook == pytest.approx(row["ideal"]), about
        if row["strategy"] not in UNCOUNTED and row["workers"] > 1:
            assert sum(calls for calls, _ in prediction.sent.values()) == row["calls"], about


@pytest.mark.medium
def test_bytes_and_memory_of_real_runs_are_those_predicted(tmp_path):
    strategies = ["ddp", "pipeline", *["megatron"] * HAS_MEGATRON, "own_zero3"]  # make bank has all
    words = ["--model", "gpt2-tiny", "--batch_size", BATCH, "--length", LENGTH, "--only", ",".join(strategies)]

    codes = group(ROOT / "benchmark" / "accounting.py", 2, tmp_path, *words, "--output_dir", tmp_path / "a")

    assert codes == [0, 0], (tmp_path / "log0.txt").read_text()[-2000:]
    rows = json.loads((tmp_path / "a" / "accounting.json").read_text())["rows"]
    assert [row["strategy"] for row in rows] == strategies
    check(rows, "gpt2-tiny")


@pytest.mark.proof
@pytest.mark.parametrize(
    ("model", "workers"),
    [
        ("gpt2-tiny", 2),
        pytest.param("gpt2-tiny", 3, marks=pytest.mark.slow),
        pytest.param("t5-tiny", 3, marks=pytest.mark.slow),
    ],
)
def test_bytes_and_memory_of_every_strategy_are_those_predicted(model, workers, tmp_path):
    pytest.importorskip("deepspeed")

    rows = counted(tmp_path, model, [workers], list(STRATEGIES))

    assert {row["strategy"] for row in rows} >= {"ddp", "fsdp", "zero0", "zero3_offload", "own_zero3"}
    check(rows, model)


@pytest.mark.slow
@pytest.mark.skipif(bool(why_not()), reason="no emulated nodes on this machine")
def test_bytes_at_the_interface_are_those_predicted_frames_included(tmp_path):
    strategies = ["ddp", "fsdp", "own_overlap", "own_zero2", "own_zero3"]

    rows = counted(tmp_path, "gpt2-24m", [2, 4], strategies, "--emulated")

    calibration = made_up_calibration("gpt2-24m", LENGTH)
    for row in rows:
        about = f"{row['strategy']}, {row['workers']} workers"
        assert predicted(row, "gpt2-24m", calibration).on_wire == pytest.approx(row["interface"], rel=FRAMED), about
