"""Predictions of a step: by hand where the numbers are given, beside real runs where they are measured."""

import json
import sys

import pytest

from benchmark import predict
from benchmark.predicted_step import LARGEST_ERROR, Costs, PredictedCell, check, peak_bytes
from benchmark.predicted_step import predict as predict_step
from beyond.cost_model import Link
from common.errors import InputError

pytest.importorskip("tensorboard")
BLOCK, WHOLE = 0.793088, 4.470272  # MB of one of gpt2-tiny's four blocks, and of all its parameters
EARLY = 0.2 * 1.048576 / (4 * BLOCK)  # of the 0.2 s of backward until DDP's first bucket of 1 MiB is ready


@pytest.mark.parametrize(
    ("strategy", "computing", "communication", "hidden", "optimizer"),
    [  # 2 workers, links of 1 MB/s: an all_reduce of S MB takes S seconds, a half S / 2; forward 0.1 s, backward 0.2 s
        ("ddp", 0.3, WHOLE, 0.2 - EARLY, 0.05),
        ("own_ring", 0.3, WHOLE, 0, 0.05),
        ("zero0", 0.3, WHOLE, 0, 0.05),
        ("own_overlap", 0.3, WHOLE, 0.2 - 0.2 * WHOLE / 2 / (4 * BLOCK), 0.05),  # two buckets of at most 4 MiB
        ("own_zero1", 0.3, WHOLE, 0, 0.025),
        ("own_zero2", 0.3, WHOLE, 0.2 - 0.05, 0.025),  # a block is ready after a quarter of backward
        ("zero1", 0.3, 1.5 * WHOLE, 0, 0.025),
        ("zero2", 0.3, 1.5 * WHOLE, 0, 0.025),
        ("zero3", 0.3, 1.5 * WHOLE, 0, 0.025),
        ("fsdp", 0.3, 1.5 * WHOLE + 2 * BLOCK, 0, 0.025),
        # Forward waits for root and block 0, whose gathers nothing hides; then blocks of 25 ms hide a part of theirs.
        ("own_zero3", 0.3, 1.5 * WHOLE - BLOCK / 2 - 0.648960, 0.075 + 0.15, 0.025),
    ],
)
def test_a_step_is_what_can_be_worked_out_by_hand(strategy, computing, communication, hidden, optimizer):
    step = predict_step(PredictedCell(strategy, "gpt2-tiny", 2, 4, 64), Costs(0.3, 0.05, Link(0.0, 1e6)))

    assert step.computing == pytest.approx(computing, rel=1e-3)
    assert step.exposed + step.hidden == pytest.approx(communication, rel=3e-3)
    assert step.hidden == pytest.approx(hidden, rel=3e-3)
    assert step.optimizer == pytest.approx(optimizer, rel=1e-2)
    assert step.total == pytest.approx(step.computing + step.exposed + step.optimizer)


def test_a_hidden_message_costs_processor_time_where_the_link_is_the_processor():
    slow = predict_step(PredictedCell("ddp", "gpt2-tiny", 2, 4, 64), Costs(0.3, 0.0, Link(0.0, 1e6), busy=1.0))

    assert slow.computing == pytest.approx(0.3 + slow.hidden)


@pytest.mark.parametrize(
    ("strategy", "model", "workers", "batch", "sent_mb", "peak_mb", "predicted_mb"),
    [  # what benchmark.compare has counted, and what was predicted then: count again if you change a formula
        ("ddp", "gpt2-tiny", 2, 4, 4.47, 36.3, 37.8),
        ("fsdp", "gpt2-tiny", 2, 4, 8.293, 27.4, 29.5),
        ("zero0", "gpt2-tiny", 2, 4, 4.47, 33.3, 33.3),
        ("zero1", "gpt2-tiny", 2, 4, 6.705, 54.7, 57.3),
        ("zero2", "gpt2-tiny", 2, 4, 6.705, 54.1, 57.3),
        ("zero3", "gpt2-tiny", 2, 4, 6.705, 62.5, 64.9),
        ("own_ring", "gpt2-tiny", 2, 4, 4.47, 33.3, 33.3),
        ("own_overlap", "gpt2-tiny", 2, 4, 4.47, 36.3, 37.8),
        ("own_zero1", "gpt2-tiny", 2, 4, 4.47, 29.4, 28.8),
        ("own_zero2", "gpt2-tiny", 2, 4, 4.47, 28.8, 28.8),
        ("own_zero3", "gpt2-tiny", 2, 4, 5.66, 28.7, 29.9),
        ("ddp", "gpt2-24m", 2, 2, 92.989, 434.0, 436.2),
        ("fsdp", "gpt2-24m", 2, 2, 183.618, 257.0, 242.0),
        ("own_zero3", "gpt2-24m", 2, 2, 130.818, 263.4, 261.0),
        ("own_zero2", "gpt2-tiny", 4, 4, 6.705, 26.6, 26.6),
        ("own_zero3", "gpt2-tiny", 4, 4, 8.49, 25.3, 26.5),
    ],
)
def test_bytes_and_memory_are_those_that_were_counted(strategy, model, workers, batch, sent_mb, peak_mb, predicted_mb):
    cell = PredictedCell(strategy, model, workers, batch, 64)

    assert predict_step(cell, Costs(0.3, 0.05, Link(0.0, 1e6))).sent / 1e6 == pytest.approx(sent_mb, rel=0.005)
    assert peak_bytes(cell) / 1e6 == pytest.approx(peak_mb, rel=0.15)
    assert peak_bytes(cell) / 1e6 == pytest.approx(predicted_mb, abs=0.06)


@pytest.mark.medium
@pytest.mark.parametrize("strategy", ["fsdp", "own_zero3"])
def test_a_prediction_is_beside_what_real_workers_take_send_and_need(strategy, monkeypatch, capfd):
    monkeypatch.setattr(sys, "argv", ["predict", "--strategies", strategy, "--compare"])

    predict.main()

    errors = json.loads(capfd.readouterr().out.splitlines()[-1])["errors"]
    assert abs(errors["bytes"]) < 0.005 and abs(errors["memory"]) < 0.15
    assert -0.9 < errors["time"] < 9  # whatever else this machine does


def printed(words, monkeypatch, capsys):
    """The last line of the command, which measures nothing: all numbers are given."""
    monkeypatch.setattr(sys, "argv", ["predict", *words.split(), "--latency", "50us", "--forward_backward", "80ms"])
    predict.main()
    return json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.mark.parametrize(
    ("words", "least_ms", "most_ms"),
    [  # 4.470272 MB at 118.75 MB/s take 37.6 ms; computing 80 ms, a message 50 us
        ("--workers 2 --rate 1gbit --strategies own_ring", 117.74, 117.74),
        # Least: all is hidden behind computing. Most: nothing is; 2 buckets go around in 2 * 4095 messages each.
        ("--workers 4096 --rate 1gbit --cores 1", 80, 80 + 2 * 2 * 4095 * 0.05 + 2 * 37.644),
        ("--workers 2 --rate 1mbit --strategies own_ring", 37644.4, 80 + 37644.5),  # least: computing behind messages
    ],
)
def test_far_beyond_what_was_compared_a_step_is_a_range(words, least_ms, most_ms, monkeypatch, capsys):
    line = printed(words, monkeypatch, capsys)

    assert bool(line["far"]) == (least_ms < most_ms)
    error = LARGEST_ERROR if line["far"] else 0.0  # moves both ends apart
    least, most = 1e3 * line["least_s"] * (1 + error), 1e3 * line["most_s"] / (1 + error)
    assert (least, most) == pytest.approx((least_ms, most_ms), rel=1e-3)


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        (("zero9", "gpt2-tiny", 2), "--strategies: expected one of single, ddp"),
        (("zero2_offload", "gpt2-tiny", 2), "--strategies: expected one of"),
        (("own_tensor", "gpt2-tiny", 4), "--strategies: expected one of"),
        (("single", "gpt2-tiny", 2), "runs on one worker, got 2"),
    ],
)
def test_what_is_not_predicted_is_refused(cell, words):
    strategy, model, workers = cell
    with pytest.raises(InputError, match=words):
        check(PredictedCell(strategy, model, workers, 4, 64))
