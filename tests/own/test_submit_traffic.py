"""Task 4 in the report, and the report on a run that was really made."""

from types import SimpleNamespace

import pytest

import task4_traffic.compare
from common.paths import ROOT
from course.table import load_course
from handin.report_pictures import Pictures
from handin.sections import Findings
from handin.write_report import write_markdown
from tests.own.run_records import change, write_run
from tests.own.warm import Script


def read(tree):
    findings = Findings()
    text = write_markdown(tree, load_course(), None, tree / "runs", {}, findings, Pictures(tree))
    return text.partition("\n## Network traffic\n")[2].partition("\n## ")[0], "\n".join(findings.doubts)


def missing(tree):
    """What of task 4 is missing, with its command."""
    findings = Findings()
    write_markdown(tree, load_course(), None, tree / "runs", {}, findings, Pictures(tree))
    return [row for row in findings.missing if row[0].startswith("task 4")]


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
    text, doubts = read(tree)

    assert "| tiny-bert-v2 | 64 | fp32 | 4 | 41 | 2.000 | 10 | 0.1000\u00a0±" in text
    assert (
        "| tiny-bert-v2 | 64 | fp32 | rank 0 (eth0) | 30.00 | 31.00 | 31.00 | 1.033 | 1.000 | `runs/task4_64` |" in text
    )
    assert "`runs/task4_32`" in text
    assert "traffic" not in doubts


def test_a_prediction_stands_beside_what_was_measured(tree, measured):
    write_run(tree / "runs/task4_64", "task4_traffic", 4, per_gpu_train_batch_size=16, link_rate=1e8)
    measured.communication, measured.predicted = 0.5123, 0.25

    text, _ = read(tree)

    assert "| 0.5123 | 0.2500 | `runs/task4_64` |" in text
    assert "| – | – | `runs/task4_32` |" in text


def test_much_more_traffic_than_expected_is_flagged(tree, measured):
    measured.observed.sent = 6.2e6

    assert "runs/task4_64: the observed traffic is 2.00 times the expected traffic" in read(tree)[1]


def test_traffic_of_runs_on_other_numbers_of_workers_is_not_comparable(tree, measured):
    write_run(tree / "runs/task4_16", "task4_traffic", 2, per_gpu_train_batch_size=8)

    assert "traffic of runs/task4_64 and runs/task4_16 is not comparable: 4 workers vs. 2" in read(tree)[1]


def test_bytes_that_were_counted_in_different_ways_are_flagged(tree, measured, monkeypatch):
    ways = {"task4_64": "all 4 workers (lo)", "task4_32": "rank 0 (eth0)"}
    kept = {name: SimpleNamespace(**vars(measured) | {"whose": whose}) for name, whose in ways.items()}
    monkeypatch.setattr(task4_traffic.compare, "read_run", lambda folder: kept[folder.name])

    said = "not all counted in the same way: `runs/task4_64` counts all 4 workers (lo); `runs/task4_32` counts rank 0"
    assert said in read(tree)[1]


def test_a_prediction_for_a_larger_model_is_not_compared_with_the_runs_of_the_small_one(tree, measured):
    large = {"model_name_or_path": "/anywhere/random-bert-8M", "per_gpu_train_batch_size": 2, "link_rate": 1e9}
    measured.communication, measured.predicted = 0.5, 0.41
    write_run(tree / "runs/task4_predicted", "task4_traffic", 4, **large)

    text, doubts = read(tree)

    assert "| random-bert-8M |" in text and "not comparable" not in doubts


def test_the_commands_of_task_4_count_bytes_as_its_runs_did(tree, measured):
    name, launched = missing(tree)[1]
    for rank in range(4):
        for batch in (64, 32):
            change(tree / f"runs/task4_{batch}/rank{rank}.json", host={"name": f"node{rank}"})

    assert name == "task 4 with --grad_dtype bf16" and launched.startswith("python -m cluster.launch --workers 4 --")
    assert missing(tree)[1][1].startswith("python -m cluster.emulate --nodes 4 --rate 1gbit --")


def test_traffic_that_cannot_be_expected_yet_is_named(tree, monkeypatch):
    def unsolved(folder):
        raise NotImplementedError("TODO 4.2")

    monkeypatch.setattr(task4_traffic.compare, "read_run", unsolved)

    text, doubts = read(tree)

    assert "Not measured" in text
    assert "runs/task4_64: the expected traffic cannot be computed (NotImplementedError: TODO 4.2)" in doubts


def test_a_run_without_its_traffic_file_is_named_with_the_command_that_makes_it(tree):
    write_run(tree / "runs/task4_bf16", "task4_traffic", 2, per_gpu_train_batch_size=8, grad_dtype="bf16")

    doubts = read(tree)[1].splitlines()

    said = "expected traffic_0.json of a run of task4_traffic/run_glue.py, got no such file; run it again"
    script = "task4_traffic/run_glue.py --num_train_epochs 1 --per_gpu_train_batch_size"
    assert (
        f"runs/task4_64: {said}: `python -m cluster.launch --workers 4 -- {script} 16 "
        "--output_dir runs/task4_64 --overwrite_output_dir`"
    ) in doubts
    assert (
        f"runs/task4_bf16: {said}: `python -m cluster.launch --workers 2 -- {script} 8 --grad_dtype bf16 "
        "--output_dir runs/task4_bf16 --overwrite_output_dir`"
    ) in doubts


def test_a_kept_run_without_its_traffic_file_can_be_deleted(tmp_path):
    write_run(tmp_path / "runs/task4_traffic.kept", "task4_traffic", 4, per_gpu_train_batch_size=4)

    _, doubts = read(tmp_path)

    assert doubts.startswith("runs/task4_traffic.kept: expected traffic_0.json")
    assert "got no such file; run it again, or delete this folder" in doubts
    assert str(tmp_path) not in doubts


def test_an_epoch_that_was_extrapolated_is_named_in_the_caption(tree, measured):
    write_run(tree / "runs/task4_16", "task4_traffic", 4, per_gpu_train_batch_size=4, steps=20, per_epoch=40)

    text, _ = read(tree)

    assert "Extrapolated to an epoch from fewer iterations: 20 of 40 in `runs/task4_16`.\n\n|" in text


def test_whole_epochs_are_not_extrapolated(tree, measured):
    assert "Extrapolated" not in read(tree)[0]


def test_without_task_4_its_runs_are_missing_and_nothing_is_doubted(tmp_path):
    text, doubts = read(tmp_path)

    assert "Not measured: see `task4_traffic/README.md`" in text
    assert "task4" not in doubts
    assert [what for what, _ in missing(tmp_path)] == [
        "task 4 with total batch 64, 32, 16",
        "task 4 with --grad_dtype bf16",
        "task 4 with a prediction for a larger model",
    ]


def test_batch_sizes_without_a_run_are_named_with_the_command_that_makes_them(tree, measured):
    write_run(tree / "runs/task4_bf16", "task4_traffic", 4, per_gpu_train_batch_size=16, grad_dtype="bf16")

    (what, command), _ = missing(tree)

    assert what == "task 4 with total batch 16"
    assert command.startswith("for b in 4; do python -m cluster.launch --workers 4 -- task4_traffic/run_glue.py")


@pytest.mark.medium
def test_a_run_that_was_really_made_can_be_read(tmp_path):
    folder = tmp_path / "runs" / "task1_single"
    flags, log = ("--max_steps", 3, "--no_cuda", "--output_dir", folder), tmp_path / "log"
    code = Script(ROOT / "task1_single/run_glue.py", flags, log).wait(timeout=240)
    if "NotImplementedError" in log.read_text():
        pytest.skip("task 1 is not solved yet")
    assert code == 0, log.read_text()

    findings = Findings()
    text = write_markdown(tmp_path, load_course(), None, tmp_path / "runs", {}, findings, Pictures(tmp_path))

    losses = (folder / "loss_0.txt").read_text().split()
    assert f"| 1 one worker | {float(losses[0]):.6f} | {float(losses[1]):.6f} |" in text
    assert "runs/task1_single: only 3 iterations; the course asks for 40" in findings.doubts
    assert not [doubt for doubt in findings.doubts if "version" in doubt or "damaged" in doubt]
