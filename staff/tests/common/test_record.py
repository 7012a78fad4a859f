"""The record of a run: its epochs and iterations, its files, what becomes of the run before it, and epoch times."""

import json

import pytest
import torch

from common.arguments import parse_gpt2_arguments, parse_traffic_arguments
from common.epochs import mean_and_deviation, measured_epochs
from common.record import Record
from common.workers import run_files
from common.workers.process_group import Worker
from task2b_allreduce.scaling import epoch_metrics
from task4_traffic.traffic import TrafficRecord


@pytest.fixture(autouse=True)
def root(tmp_path, monkeypatch):
    monkeypatch.setattr(run_files, "ROOT", tmp_path)  # folders in runs/ are kept
    return tmp_path


def train(folder, steps, workers=1, rank=0, per_epoch=3, is_killed=False):
    """One rank of a run of so many steps over batches 0, 1, ...; return its record and the batches of each epoch."""
    place = ["--world_size", str(workers), "--local_rank", str(rank), "--n_epochs", "9", "--batch_size", "12"]
    flags = [*place, "--max_steps", str(steps), "--output_dir", str(folder), "--overwrite_output_dir"]
    record = Record(parse_gpt2_arguments("task3_ddp", flags), Worker(rank, workers))
    epochs = []
    if is_killed:
        return record, epochs
    for epoch in record.epochs(range(per_epoch)):
        epochs.append([])
        for batch in record.iterations([torch.tensor(number) for number in range(per_epoch)]):
            with record.phase("forward"):
                epochs[-1].append(batch.item())  # type: ignore[attr-defined]
            record.loss(float(len(record.losses)))
        record.evaluation(epoch, {"acc": 0.5})
    record.write()
    return json.loads((folder / f"rank{rank}.json").read_text()), epochs


def test_a_run_of_several_epochs_stops_in_the_middle_of_one_and_records_every_iteration_once(tmp_path):
    folder = tmp_path / "a/folder/that/is/not/there"

    record, epochs = train(folder, steps=8)

    assert epochs == [[0, 1, 2], [0, 1, 2], [0, 1]]
    assert record["steps_per_epoch"] == 3
    assert [step["loss"] for step in record["iterations"]] == [float(i) for i in range(8)]
    assert (folder / "loss_0.txt").read_text() == "".join(f"{float(i)}\n" for i in range(8))
    assert record["evaluations"] == [{"epoch": epoch, "metrics": {"acc": 0.5}} for epoch in (1, 2, 3)]
    seconds = [step["seconds"] for step in record["iterations"]]
    assert record["seconds_per_iteration"] == pytest.approx(sum(seconds[1:]) / 7)  # the first one warms up
    assert all(step["phases"]["backward"] is None and step["phases"]["forward"] > 0 for step in record["iterations"])
    tokens = record["config"]["model_max_length"] * 12
    assert measured_epochs(record, tokens) == [(sum(seconds[3:6]), 3 * tokens / sum(seconds[3:6]))]  # the whole ones


@pytest.mark.parametrize(("runs", "newest", "kept"), [
    ([(4, 2), (3, 1), (5, 1), (2, 1)], 2, 5),  # steps and workers: the longest of those that are whole
    ([(4, 2), (6, 2, "rank 1 dies"), (2, 1)], 2, 4),
    ([(4, 2), (4, 1), (3, 1)], 3, 4),  # of two that are as long, the newer one
    ([(4, 1), (6, 1, "is killed"), (5, 1, "is killed")], None, 4),
    ([(4, 2, "rank 1 dies"), (2, 2, "rank 1 dies")], 2, 4),  # the records of the other ranks are on other machines
])  # fmt: skip
@pytest.mark.parametrize("folder", ["runs/task3_ddp", "mine"])
def test_no_long_run_is_lost_to_a_quick_try_or_to_one_that_is_killed(tmp_path, folder, runs, newest, kept):
    folder = tmp_path / folder
    (folder / "notes").mkdir(parents=True)

    for steps, workers, *ends in runs:
        for rank in range(1 if ends else workers):
            train(folder, steps, workers, rank, is_killed=ends == ["is killed"])

    def length(folder):
        record = folder / "rank0.json"
        return len(json.loads(record.read_text())["iterations"]) if record.exists() else None

    assert length(folder) == newest and (folder / "notes").exists()
    kept_folder = folder.with_name(f"{folder.name}.kept")
    assert length(kept_folder) == (kept if folder.parent.name == "runs" else None)  # elsewhere, the user overwrites it
    assert not (kept_folder / "rank1.json").exists() or runs[1] != (4, 1)  # no file of another run


def test_another_rank_leaves_the_files_of_an_earlier_run_alone_when_it_begins(tmp_path):
    flags = ["--output_dir", str(tmp_path), "--overwrite_output_dir", "--interface", "lo"]
    config = parse_traffic_arguments("task4_traffic", [*flags, "--world_size", "2", "--local_rank", "1"])
    (tmp_path / "counters_1.csv").write_text("of an earlier run\n")

    TrafficRecord(config, Worker(1, 2))._counter.stop()

    assert (tmp_path / "counters_1.csv").read_text() == "of an earlier run\n"


def test_the_deviation_is_that_of_a_sample_and_one_value_has_none():
    assert mean_and_deviation([1.0, 2.0, 6.0]) == (3.0, pytest.approx(7**0.5))  # (4 + 1 + 9) / (3 - 1)
    assert mean_and_deviation([5.0]) == (5.0, 0.0)


@pytest.mark.parametrize(("seconds", "per_epoch", "epochs"), [
    ([9.0, 1.0, 2.0, 4.0], 1, [(1.0, 128.0), (2.0, 64.0), (4.0, 32.0)]),  # the first one warms up
    ([9.0, 1.0, 1.0, 3.0, 2.0], 2, [(4.0, 64.0)]),  # the last one is not whole
    ([1.0, 3.0, 2.0], 2, [(4.0, 64.0)]),
    ([1.0, 1.0, 2.0], 9, [(4.0, 96.0)]),
], ids=["four", "two and a half", "one and a half", "a part of one"])  # fmt: skip
def test_epochs_are_those_that_are_whole_without_the_first(tmp_path, seconds, per_epoch, epochs):
    record, _ = train(tmp_path, len(seconds), per_epoch=per_epoch, workers=2)
    for step, time in zip(record["iterations"], seconds, strict=True):
        step["seconds"] = time

    assert measured_epochs(record, tokens=128) == epochs
    own_tokens = 6 * record["config"]["model_max_length"]  # of the 12 examples of two workers
    mean = sum(speed for _, speed in epochs) / len(epochs) * own_tokens / 128
    assert epoch_metrics(record)["tokens_per_second"] == pytest.approx(mean)


def test_every_file_of_a_run_is_known(tmp_path):
    """A file that is not listed would stay behind, beside those of the next run. workers.run looks at real runs."""
    for name in ("rank10.json", "loss_0.txt", "traffic_1.json", "counters_1.csv", "trace_0.json", "trace.png", "mine"):
        (tmp_path / name).touch()

    assert {path.name for path in tmp_path.iterdir()} - {f.name for f in run_files.files_of_a_run(tmp_path)} == {"mine"}
