"""task4_traffic beside its lesson: counters, files of dstat and dool, the record's windows, the comparison."""

import argparse
import json
import shutil
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from common.errors import InputError
from common.flags import link_rate
from common.paths import ROOT
from task4_traffic import compare, expected
from task4_traffic.compare import (
    check_comparable,
    extrapolations,
    predictions,
    ratios,
    read_run,
    volume,
)
from task4_traffic.counters import HEAD, Counter, Sample, rates, read_counters, read_kernel
from task4_traffic.traffic import PACKET_HEADER, TRIALS, TrafficRecord, plain
from tests.own.started_processes import wait_for
from tests.own.workers import run

KERNEL_TEXT = """Inter-|   Receive             |  Transmit
 face |bytes packets errs drop fifo frame compressed multicast|bytes packets errs drop fifo colls carrier compressed
    lo:  100  2  0  0  0  0  0  0  100  2  0  0  0  0  0  0
  eth0:{received}  7  0  0  0  0  0  0  {sent}  8  0  0  0  0  0  0
"""


def kernel_file(path: Path, received: int, sent: int) -> Path:
    path.write_text(KERNEL_TEXT.format(received=received, sent=sent))
    return path


# --------------------------------------------------------------------------------------- the kernel's counters


def test_interfaces_are_read_also_without_a_blank_after_the_colon():
    counted = read_kernel(KERNEL_TEXT.format(received=5_000_000_000, sent=6))

    assert counted == {"lo": (100, 100, 2, 2), "eth0": (5_000_000_000, 6, 7, 8)}


def test_a_mark_is_in_the_file_at_once_and_a_file_cut_off_in_a_line_is_read(tmp_path):
    kernel = kernel_file(tmp_path / "dev", 10, 20)
    counter = Counter("eth0", tmp_path / "c.csv", kernel=kernel, per_second=0.001)
    kernel_file(kernel, 40, 70)

    counter.mark("window 1 begins")

    whole = read_counters(tmp_path / "c.csv")
    counter.stop()
    assert [(row.received, row.sent, row.event) for row in whole] == [(10, 20, "start"), (40, 70, "window 1 begins")]
    text = (tmp_path / "c.csv").read_text()
    (tmp_path / "cut.csv").write_text(text[: text.rindex(",") - 4])
    assert len(read_counters(tmp_path / "cut.csv")) == 2


def test_an_interface_that_is_not_there_is_named_with_those_that_are(tmp_path):
    with pytest.raises(InputError, match="expected one of eth0, lo; got 'eth7'"):
        Counter("eth7", tmp_path / "c.csv", kernel=kernel_file(tmp_path / "dev", 1, 1))


@pytest.mark.medium
def test_readings_come_ten_times_a_second_and_cost_under_a_hundredth_of_a_core(tmp_path):
    begin = time.monotonic()
    counter = Counter("eth0", tmp_path / "c.csv", kernel=kernel_file(tmp_path / "dev", 1, 1))
    wait_for(lambda: len(counter.samples) > 10, "ten readings")
    # The counter's own thread: other threads of this process, of tests before this one, are not its cost.
    times = {thread.id: thread.user_time + thread.system_time for thread in psutil.Process().threads()}
    cores = times[counter._thread.native_id] / (time.monotonic() - begin)
    counter.stop()

    gaps = [b.time - a.time for a, b in zip(counter.samples, counter.samples[1:], strict=False)]
    assert sorted(gaps)[len(gaps) // 2] >= 0.09  # not more often; under load it may be later
    assert cores < 0.05


def test_a_volume_between_readings_is_interpolated():
    samples = [Sample(10.0, 0, 0), Sample(11.0, 100, 200), Sample(12.0, 100, 600)]

    assert volume(samples, 10.5, 11.5) == (50.0, 300.0)


def test_a_mark_beside_a_regular_reading_makes_no_peak():
    samples = [Sample(0.0, 0, 0), Sample(0.1, 0, 100), Sample(0.1001, 0, 200), Sample(0.2, 0, 300)]

    assert [round(sent) for _, _, sent in rates(samples)] == [1000, 2000]


# ------------------------------------------------------------------------------------- record and comparison


def test_an_entry_may_hold_a_shape_and_a_dtype_as_a_tensor_gives_them():
    tensor = torch.zeros(2, 3)
    entry = {"shape": tensor.shape, "dtype": tensor.dtype, "elements": tensor.numel(), "bytes": torch.tensor(24)}

    kept = json.loads(json.dumps(plain(entry)))

    assert kept == {"shape": [2, 3], "dtype": "torch.float32", "elements": 6, "bytes": 24}


@pytest.fixture
def record():
    """A record that has no workers and no interface: what it keeps and computes, without the calls of a run."""
    made = object.__new__(TrafficRecord)
    made._groups, made._iterations, made.losses, made._phases, made._profiler = [], [], [], {}, None
    made._counter = SimpleNamespace(mark=lambda event: None)
    made.collectives = SimpleNamespace(drain_before_it_overflows=lambda: None)
    made.worker = SimpleNamespace(device=torch.device("cpu"))
    return made


def sent(*sizes: int) -> list[dict]:
    return [{"shape": [n], "dtype": "torch.float32", "elements": n, "bytes": 4 * n} for n in sizes]


def test_iterations_in_a_row_are_one_group_only_if_they_sent_the_same_tensors(record):
    for tensors in (sent(3, 5), sent(3, 5), sent(8), sent(3, 5)):
        record.sent = tensors
        record._finish_iteration(0.1)

    assert [(group["iterations"], group["tensors"]) for group in record._groups] == [
        (2, sent(3, 5)), (1, sent(8)), (1, sent(3, 5))
    ]  # fmt: skip


def test_framing_is_what_many_messages_cost_more_than_one_and_the_packet_headers_of_the_one(record, monkeypatch):
    record._groups = [{"iterations": 1, "tensors": sent(3, 5)}]
    # 32 bytes of payload: with 3 packets for two messages, and 2 packets for one
    many = {"sent": 300.0, "received": 330.0, "sent_packets": 3, "received_packets": 30}
    one = {"sent": 200.0, "received": 210.0, "sent_packets": 2, "received_packets": 20}
    monkeypatch.setattr("torch.distributed.broadcast_object_list", lambda *_, **__: None)
    monkeypatch.setattr("task4_traffic.traffic.CALIBRATION_BYTES", 32 * TRIALS)  # one repetition in each trial
    record._measure = lambda tensors, times: many if len(tensors) == 2 else one

    assert record._calibrate() == {
        "sent": 100 + 2 * PACKET_HEADER, "received": 120 + 20 * PACKET_HEADER, "messages": 2
    }  # fmt: skip


def test_a_calibration_sends_every_tensor_as_often_as_it_is_repeated(record, monkeypatch):
    sent_sizes = []
    record._counter = SimpleNamespace(mark=lambda event: Sample(0.0, 0, 0, 0, 0))
    record.worker.pulse = SimpleNamespace(beat=lambda: None)
    monkeypatch.setattr("torch.distributed.barrier", lambda: None)
    monkeypatch.setattr("task4_traffic.traffic.all_reduce", lambda tensor: sent_sizes.append(len(tensor)))

    record._measure([torch.zeros(3), torch.zeros(5)], times=2)

    assert sent_sizes == [3, 5, 3, 5]


def test_the_table_of_expected_traffic_multiplies_an_iteration_by_those_of_an_epoch():
    rows = [line.split() for line in expected.table(size=1000, world_size=4, examples=100).splitlines()[1:]]

    # 100 examples, padded, are 25 on each of 4 workers: 7 batches of 4. The ring sends 2 (N-1)/N S.
    assert ["16", "7", "all_reduce", "any", "1,500", "10,500"] in rows
    assert ["64", "2", "all_reduce", "any", "1,500", "3,000"] in rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A real run on two workers here, which send their gradients in half precision."""
    made = tmp_path_factory.mktemp("bf16")
    flags = ["--do_train", "--max_steps", 4, "--per_gpu_train_batch_size", 8, "--grad_dtype", "bf16"]
    run(ROOT / "task4_traffic/run_glue.py", 2, made, *flags)
    return made / "run"


@pytest.mark.medium
def test_a_run_keeps_its_tensors_its_window_and_its_framing(folder):
    traffic = json.loads((folder / "traffic_1.json").read_text())

    assert [window["iterations"] for window in traffic["windows"]] == [4]
    assert [group["iterations"] for group in traffic["sent"]] == [4]
    assert len(traffic["sent"][0]["tensors"]) == traffic["framing"]["messages"] == 41
    header = (folder / "counters_1.csv").read_text().splitlines()[0]
    assert tuple(header.split(",")) == HEAD
    assert not list(folder.glob("*.part"))


@pytest.mark.medium
def test_on_the_loopback_interface_the_sum_over_all_workers_is_expected_in_the_precision_of_the_run(folder):
    run_ = read_run(folder)

    assert run_.tensor_bytes == 2 * json.loads((folder / "rank0.json").read_text())["parameters"]
    assert run_.expected.sent == 2 * run_.tensor_bytes  # 2(N-1)/N S, twice
    assert run_.epoch.sent == run_.expected.sent * run_.steps_per_epoch
    assert ratios(run_)[0] > 1  # how much more depends on what else uses lo at the same time


@pytest.mark.medium
def test_the_prediction_is_the_payload_of_one_worker_at_the_rate_of_its_link(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "run")
    record = json.loads((tmp_path / "run/rank0.json").read_text())
    record["config"]["link_rate"] = 8e6  # a megabyte per second
    (tmp_path / "run/rank0.json").write_text(json.dumps(record))

    run_ = read_run(tmp_path / "run")

    assert run_.predicted == pytest.approx(run_.tensor_bytes / 1e6)  # 2(N-1)/N S, with two workers
    assert run_.communication and f"at least {run_.predicted:.4f} s predicted" in predictions([run_])
    assert read_run(folder).predicted is None and predictions([read_run(folder)]) == ""


@pytest.mark.parametrize(
    ("text", "bits"), [("1gbit", 1e9), ("100Mbit", 1e8), ("2.5gbit", 2.5e9), ("56kbit", 5.6e4), ("800bit", 800)]
)
def test_a_rate_is_read_in_the_words_of_tc(text, bits):
    assert link_rate(text) == bits


@pytest.mark.parametrize("text", ["fast", "1", "gbit", "-1gbit", "0mbit", "nangbit", "infgbit"])
def test_what_is_no_rate_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="expected a rate such as 1gbit"):
        link_rate(text)


@pytest.mark.medium
def test_a_comparison_prints_a_row_for_the_run_and_writes_both_plots(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["compare.py", str(folder), "--output", str(tmp_path)])
    compare.main()

    heads, row = (line.split() for line in capsys.readouterr().out.splitlines()[2:4])
    assert heads[:4] == ["batch", "dtype", "tensors", "S"]
    assert row[:3] == ["16", "bf16", "41"]
    plots = (tmp_path / f"traffic_{name}.png" for name in ("over_time", "per_epoch"))
    assert all(plot.read_bytes().startswith(b"\x89PNG") for plot in plots)


@pytest.mark.medium
def test_a_table_of_epochs_says_what_was_extrapolated(folder):
    run_ = read_run(folder)

    note = f"batch 16: extrapolated to an epoch of {run_.steps_per_epoch} iterations, 4 were observed"
    assert extrapolations([run_]) == note
    assert extrapolations([replace(run_, steps_per_epoch=4)]) == ""


@pytest.mark.medium
def test_runs_of_different_world_sizes_or_interfaces_are_not_compared(folder):
    run_ = read_run(folder)

    for change, words in (
        ({"world_size": 4}, "run has 2, b has 4"),
        ({"interface": "eth0"}, r"b counts rank 0 \(eth0"),
    ):
        with pytest.raises(InputError, match=words):
            check_comparable([run_, replace(run_, name="b", **change)])


def test_a_folder_of_another_task_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"expected rank0.json of a run of task4_traffic"):
        read_run(tmp_path)
