"""Task 4 in the report: traffic that was observed and expected, and the commands of the runs that are missing."""

from types import SimpleNamespace

import pytest

import task4_traffic.compare
from tests.own.run_records import change, read_report, section, write_run


def read(tree):
    text, findings = read_report(tree)
    missing = [row for row in findings.missing if row[0].startswith("task 4")]
    return section(text, "Network traffic"), "\n".join(findings.doubts), missing


@pytest.fixture
def tree(tmp_path):
    """Task 4 with two batch sizes."""
    for batch in (64, 32):
        folder = tmp_path / f"runs/task4_{batch}"
        write_run(folder, "task4_traffic", 4, per_gpu_train_batch_size=batch // 4)
    return tmp_path


@pytest.fixture
def measured(monkeypatch):
    """Stands for task4_traffic.compare.read_run, which calls a student's lines; observed bytes can be changed."""
    kept = SimpleNamespace(
        steps_per_epoch=10, batch=64, world_size=4, tensors=41, tensor_bytes=2e6, whose="rank 0 (eth0)"
    )
    kept.expected, kept.framing = SimpleNamespace(sent=3e6), SimpleNamespace(sent=1e5)
    kept.observed = SimpleNamespace(sent=3.1e6)
    monkeypatch.setattr(task4_traffic.compare, "read_run", lambda folder: kept)
    return kept


def test_traffic_stands_in_a_row_for_each_batch_size(tree, measured):
    text, doubts, _ = read(tree)

    assert "| tiny-bert-v2 | 64 | fp32 | 4 | 41 | 2.000 | 10 | 0.1000\u00a0±" in text
    assert (
        "| tiny-bert-v2 | 64 | fp32 | rank 0 (eth0) | 30.00 | 31.00 | 31.00 | 1.033 | 1.000 | `runs/task4_64` |" in text
    )
    assert "`runs/task4_32`" in text
    assert "traffic" not in doubts and "Extrapolated" not in text


def test_a_prediction_stands_beside_what_was_measured_and_a_larger_model_is_not_compared(tree, measured):
    write_run(tree / "runs/task4_64", "task4_traffic", 4, per_gpu_train_batch_size=16, link_rate=1e8)
    large = {"model_name_or_path": "/anywhere/random-bert-8M", "per_gpu_train_batch_size": 2, "link_rate": 1e9}
    write_run(tree / "runs/task4_predicted", "task4_traffic", 4, **large)
    measured.communication, measured.predicted = 0.5123, 0.25

    text, doubts, _ = read(tree)

    assert "| 0.5123 | 0.2500 | `runs/task4_64` |" in text
    assert "| – | – | `runs/task4_32` |" in text
    assert "| random-bert-8M |" in text and "not comparable" not in doubts


def test_much_more_traffic_than_expected_and_other_numbers_of_workers_are_flagged(tree, measured):
    write_run(tree / "runs/task4_16", "task4_traffic", 2, per_gpu_train_batch_size=8)
    measured.observed.sent = 6.2e6

    doubts = read(tree)[1]

    assert "runs/task4_64: the observed traffic is 2.00 times the expected traffic" in doubts
    assert "traffic of runs/task4_64 and runs/task4_16 is not comparable: 4 workers vs. 2" in doubts


def test_bytes_that_were_counted_in_different_ways_are_flagged(tree, measured, monkeypatch):
    ways = {"task4_64": "all 4 workers (lo)", "task4_32": "rank 0 (eth0)"}
    runs = {name: SimpleNamespace(**vars(measured) | {"whose": whose}) for name, whose in ways.items()}
    monkeypatch.setattr(task4_traffic.compare, "read_run", lambda folder: runs[folder.name])

    doubt = "not all counted in the same way: `runs/task4_64` counts all 4 workers (lo); `runs/task4_32` counts rank 0"
    assert doubt in read(tree)[1]


def test_missing_runs_are_named_with_commands_that_count_bytes_as_the_others_did(tree, measured):
    (what, command), (name, launched), _ = read(tree)[2]
    for rank in range(4):
        for batch in (64, 32):
            change(tree / f"runs/task4_{batch}/rank{rank}.json", host={"name": f"node{rank}"})

    assert what == "task 4 with total batch 16"
    assert command.startswith("for b in 4; do python -m cluster.launch --workers 4 -- task4_traffic/run_glue.py")
    assert name == "task 4 with --grad_dtype bf16" and launched.startswith("python -m cluster.launch --workers 4 --")
    assert read(tree)[2][1][1].startswith("python -m cluster.emulate --nodes 4 --rate 1gbit --")


def test_traffic_that_cannot_be_expected_yet_is_named(tree, monkeypatch):
    def unsolved(folder):
        raise NotImplementedError("TODO 4.2")

    monkeypatch.setattr(task4_traffic.compare, "read_run", unsolved)

    text, doubts, _ = read(tree)

    assert "Not measured" in text
    assert "runs/task4_64: the expected traffic cannot be computed (NotImplementedError: TODO 4.2)" in doubts


def test_a_run_without_its_traffic_file_is_named_with_the_command_that_makes_it(tree):
    write_run(tree / "runs/task4_bf16", "task4_traffic", 2, per_gpu_train_batch_size=8, grad_dtype="bf16")
    write_run(tree / "runs/task4_traffic.kept", "task4_traffic", 4, per_gpu_train_batch_size=8)

    _, doubts, missing = read(tree)
    doubts = doubts.splitlines()

    problem = "expected traffic_0.json of a run of task4_traffic/run_glue.py, got no such file; run it again"
    script = "task4_traffic/run_glue.py --num_train_epochs 1 --per_gpu_train_batch_size"
    assert (
        f"runs/task4_64: {problem}: `python -m cluster.launch --workers 4 -- {script} 16 "
        "--output_dir runs/task4_64 --overwrite_output_dir`"
    ) in doubts
    assert (
        f"runs/task4_bf16: {problem}: `python -m cluster.launch --workers 2 -- {script} 8 --grad_dtype bf16 "
        "--output_dir runs/task4_bf16 --overwrite_output_dir`"
    ) in doubts
    assert f"runs/task4_traffic.kept: {problem}, or delete this folder" in doubts
    assert [what for what, _ in missing[:-1]] == ["task 4 with total batch 16"]  # its only run is the one with bf16


def test_an_epoch_that_was_extrapolated_is_named_in_the_caption(tree, measured):
    write_run(tree / "runs/task4_16", "task4_traffic", 4, per_gpu_train_batch_size=4, steps=20, per_epoch=40)

    text = read(tree)[0]

    assert "Extrapolated to an epoch from fewer iterations: 20 of 40 in `runs/task4_16`.\n\n|" in text
