"""Every script computes what plain PyTorch computes (by_hand.py), and its record says so.

With one worker it runs in this process, with several in processes of their own. Dropout is on, so losses also show the
seeds, and that it is off in evaluation and on again in the next epoch. The flags are none of the defaults.
"""

import dataclasses
import json
import re
import subprocess
import sys
from statistics import fmean

import pytest
import torch

from cluster.launch import free_port
from common.models.load import model_path
from common.paths import ROOT
from staff.tests import workers
from staff.tests.tasks import by_hand
from staff.tests.tasks.by_hand import Flags, RunByHand
from staff.tests.tasks.one_process import command, run
from task2b_allreduce.scaling import combine

BERT, GPT2 = Flags(), Flags(batch=24)
TINY = ("--model_name_or_path", "tiny")
TEXTS = by_hand.documents()


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    with command("pytest"):
        yield


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder with the data of RTE, STS-B and OSCAR."""
    folder = tmp_path_factory.mktemp("data")
    for task in ("rte", "sts-b"):
        by_hand.write_glue(folder / task, task, train=22, dev=33)
    by_hand.write_oscar(folder / "oscar", TEXTS)
    return folder


def losses_of(record: dict) -> list[float]:
    return [step["loss"] for step in record["iterations"]]


def means(losses: list[list[float]]) -> list[float]:
    """The mean over the ranks, for each step."""
    return [fmean(step) for step in zip(*losses, strict=True)]


def must_be(records: list[dict], expected: RunByHand) -> None:
    """Check losses and metrics of all ranks; the first one has the metrics."""
    for record, losses in zip(records, expected.losses, strict=True):
        assert losses_of(record) == pytest.approx(losses, abs=1e-5)
    evaluations = [(evaluation["epoch"], evaluation["metrics"]) for evaluation in records[0]["evaluations"]]
    assert [epoch for epoch, _ in evaluations] == list(range(1, len(expected.metrics) + 1))
    for (_, metrics), wanted in zip(evaluations, expected.metrics, strict=True):
        assert metrics == pytest.approx(wanted, abs=1e-4, rel=1e-4)
    assert all(record["evaluations"] == [] for record in records[1:])


# --- one worker, in this process ---


@pytest.mark.parametrize(("task", "glue", "max_steps"), [
    ("task1_single", "rte", 0),
    ("task1_single", "sts-b", 9),  # of 12
    ("task2a_gather_scatter", "sts-b", 0),
    ("task2b_allreduce", "sts-b", 15),  # more than two epochs
    ("task3_ddp", "sts-b", 0),
    ("task4_traffic", "rte", 0),
])  # fmt: skip
def test_bert_on_one_worker_is_trained_and_evaluated_as_by_hand(tmp_path, data, task, glue, max_steps):
    flags = ["--data_dir", data / glue, "--task_name", glue, *TINY, *BERT.words("glue"), "--max_steps", max_steps]
    record = run(f"{task}/run_glue.py", tmp_path / "deep" / "run", *flags)

    folder, reseeded = model_path("tiny", "bert"), task != "task1_single"
    must_be([record], by_hand.train_bert(glue, folder, data / glue, BERT, reseeded=reseeded, max_steps=max_steps))
    assert (record["steps_per_epoch"], record["examples"]) == (6, {"train": 22, "dev": 33})


@pytest.mark.parametrize(("script", "flags"), [
    ("task2b_allreduce", []),
    ("task3_ddp", ["--max_steps", 3]),
    *[("beyond", ["--strategy", name]) for name in ("overlap", "zero2", "zero3")],
    ("pipeline", ["--model_parallel_mode", "pipeline_parallel", "--n_chunk", 5]),
    *[pytest.param(*row, marks=pytest.mark.medium) for row in (
        *[("beyond", ["--strategy", name]) for name in ("ring", "zero1", "tensor", "1f1b")],
        *[("pipeline", ["--model_parallel_mode", mode]) for mode in ("none", "model_parallel")],
        ("pipeline", ["--schedule", "gpipe", "--n_chunk", 8]),
    )],
])  # fmt: skip
def test_gpt2_on_one_worker_is_trained_and_evaluated_as_by_hand(tmp_path, data, script, flags):
    given = dataclasses.replace(GPT2, dropout=0.0) if script == "pipeline" else GPT2  # a pipe has masks of its own
    words = ["--data_dir", data / "oscar", *TINY, *given.words("gpt2")]
    record = run(f"{script}/run_gpt2.py", tmp_path / "run", *words, *flags)

    max_steps = flags[1] if "--max_steps" in flags else 0
    must_be([record], expected_of(script, given, max_steps=max_steps))
    if "--n_chunk" in flags and "--schedule" not in flags:  # as many micro-batches as asked for: 24 examples in 5
        boxes = json.loads((tmp_path / "run/trace.json").read_text())["traceEvents"]
        assert len({box["args"]["micro_batch"] for box in boxes if box["ph"] == "X"}) == 5


def expected_of(script: str, given: Flags, **options: int) -> RunByHand:
    """What a run_gpt2.py computes. That of the pipeline does not evaluate."""
    shuffled = script == "pipeline"
    expected = by_hand.train_gpt2(model_path("tiny", "gpt2"), TEXTS, given, shuffled=shuffled, **options)
    return dataclasses.replace(expected, metrics=[]) if shuffled else expected


@pytest.fixture(scope="module")
def finished(tmp_path_factory, data):
    """The folder and the record of a run of task 1 that only trains, with a profile."""
    folder = tmp_path_factory.mktemp("task1") / "run"
    flags = ["--data_dir", data / "rte", *TINY, *BERT.words("glue"), "--do_train", "--profile"]
    return folder, run("task1_single/run_glue.py", folder, *flags)


def test_the_record_has_the_keys_of_its_description_and_numbers_that_agree(finished):
    folder, record = finished
    described = (ROOT / "common/README.md").read_text().partition("## The record of a run")[2].split("\n## ")[0]
    keys = {key for cell in re.findall(r"^\| (`.*?) \|", described, re.M) for key in re.findall(r"`(\w+)`", cell)}
    steps, config = record["iterations"], record["config"]
    seconds = [step["seconds"] for step in steps]

    assert set(record) == keys
    assert set(steps[0]["phases"]) == {"data", "forward", "backward", "communication", "optimizer"}
    assert all(sum(part or 0 for part in step["phases"].values()) <= step["seconds"] for step in steps)
    assert record["seconds_per_iteration"] == pytest.approx(sum(seconds[1:]) / (len(seconds) - 1))
    assert [float(line) for line in (folder / "loss_0.txt").read_text().split()] == [step["loss"] for step in steps]
    assert {name: config[name] for name in ("seed", "learning_rate", "dropout", "rank")} == {
        "seed": 7, "learning_rate": 2e-3, "dropout": 0.25, "rank": 0
    }  # fmt: skip
    assert (record["task"], record["parameters"], record["collectives"]) == ("task1_single", 218_754, [])
    assert record["evaluations"] == []  # --do_train alone


def test_a_profile_is_one_trace_of_three_iterations(finished):
    names = [event.get("name") for event in json.loads((finished[0] / "trace_0.json").read_text())["traceEvents"]]

    assert sum(str(name).startswith("ProfilerStep#") for name in names) == 3


def test_a_model_that_is_only_evaluated_is_epoch_0_and_scores_what_it_scores_untrained(tmp_path, data):
    flags = ["--data_dir", data / "sts-b", "--task_name", "sts-b", *TINY, *BERT.words("glue"), "--do_eval"]
    record = run("task2a_gather_scatter/run_glue.py", tmp_path / "run", *flags)

    untrained = dataclasses.replace(BERT, learning_rate=0.0)
    expected = by_hand.train_bert("sts-b", model_path("tiny", "bert"), data / "sts-b", untrained)
    assert record["evaluations"] == [{"epoch": 0, "metrics": pytest.approx(expected.metrics[0], abs=1e-4)}]
    assert record["iterations"] == []


@pytest.mark.parametrize(("flags", "before", "after", "words"), [
    (["--dropout", 0], "", "", "gradient: x 1.0000"),
    (["--dropout", 0], "loss.backward()", "(2 * loss).backward()", "gradient: x 2.0000 (every parameter): the loss"),
])  # fmt: skip
def test_check_gradients_judges_the_first_step(tmp_path, data, flags, before, after, words):
    script = tmp_path / "run_glue.py"
    script.write_text((ROOT / "task2b_allreduce/run_glue.py").read_text().replace(before, after))
    flags += ["--data_dir", data / "rte", *TINY, "--max_steps", 1, "--do_train", "--check_gradients"]

    assert run(script, tmp_path / "run", *flags)["gradient"].startswith(words)


def test_gpt2_keeps_the_gradients_of_its_first_step_for_the_course_to_compare(tmp_path, data):
    kept = ROOT / "tests" / "model0_gradients.pth"
    words = ["--data_dir", data / "oscar", *TINY, *GPT2.words("gpt2")]
    try:
        record = run("task2b_allreduce/run_gpt2.py", tmp_path / "run", *words, "--pytest", "True")
        gradients = torch.load(kept)
    finally:
        kept.unlink(missing_ok=True)

    expected = by_hand.train_gpt2(model_path("tiny", "gpt2"), TEXTS, GPT2, max_steps=1).gradients
    for gradient, wanted in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, wanted)
    assert record["iterations"] == []


def test_the_times_of_workers_are_averaged_and_their_speeds_added():
    names = ("training_time", "training_time_std", "tokens_per_second", "tokens_per_second_std")
    workers_of_a_run = [dict(zip(names, numbers, strict=True)) for numbers in ((2.0, 0.2, 100.0, 3.0), (4.0, 0, 50, 4))]

    assert combine(workers_of_a_run) == dict(zip(names, (3.0, 0.1, 150.0, 5.0), strict=True))


# --- several workers, in processes of their own ---


@pytest.mark.medium
@pytest.mark.parametrize(("task", "count", "batch"), [("task2a_gather_scatter", 2, 4), ("task3_ddp", 3, 6)])
def test_several_workers_train_bert_as_one_with_their_mean_gradient(tmp_path, data, task, count, batch):
    given = dataclasses.replace(BERT, batch=batch)
    flags = ["--data_dir", data / "sts-b", "--task_name", "sts-b", *TINY, *given.words("glue", count)]
    records = workers.run(ROOT / task / "run_glue.py", count, tmp_path, *flags)

    must_be(records, by_hand.train_bert("sts-b", model_path("tiny", "bert"), data / "sts-b", given, workers=count))
    size = 4 * records[0]["parameters"] * len(records[0]["iterations"])
    sent = [{entry["name"]: entry["bytes"] for entry in record["collectives"]} for record in records]
    if task == "task3_ddp":
        assert [bytes_by_name["all_reduce"] for bytes_by_name in sent] == [size] * 3
    else:
        assert sent[0] == {"gather": size, "scatter": 2 * size}  # rank 0 has a mean for each worker


WHOLE, DATA_PARALLEL = 1, 2  # whether the ranks together take a batch, or each its part of it
NO_DROPOUT = dataclasses.replace(GPT2, dropout=0.0)


@pytest.mark.medium
@pytest.mark.parametrize(("script", "count", "parts", "flags"), [
    ("task3_ddp", 2, DATA_PARALLEL, []),
    ("beyond", 2, WHOLE, ["--strategy", "tensor"]),
    ("beyond", 2, WHOLE, ["--strategy", "1f1b", "--n_chunk", 4]),
    ("pipeline", 2, WHOLE, ["--schedule", "1f1b", "--n_chunk", 8]),
    *[pytest.param(*row, marks=pytest.mark.proof) for row in (
        ("beyond", 2, DATA_PARALLEL, ["--strategy", "ring"]),
        ("beyond", 2, DATA_PARALLEL, ["--strategy", "overlap", "--bucket_mb", 0.1]),
        ("beyond", 2, DATA_PARALLEL, ["--strategy", "zero1"]),
        ("beyond", 2, DATA_PARALLEL, ["--strategy", "zero3"]),
        ("beyond", 4, WHOLE, ["--strategy", "1f1b", "--n_chunk", 2, "--schedule", "gpipe"]),
        ("beyond", 4, DATA_PARALLEL, ["--strategy", "grid"]),
        ("beyond", 4, DATA_PARALLEL, ["--strategy", "grid", "--grid", "pipeline=2,data=2"]),
        ("beyond", 4, WHOLE, ["--strategy", "grid", "--grid", "pipeline=2,tensor=2"]),
        ("pipeline", 2, WHOLE, ["--schedule", "gpipe", "--n_chunk", 8]),
        ("pipeline", 2, WHOLE, ["--schedule", "interleaved", "--n_chunk", 8]),
    )],
])  # fmt: skip
def test_several_workers_train_gpt2_as_one(tmp_path, data, script, count, parts, flags):
    given = GPT2 if count == parts else NO_DROPOUT  # ranks that share a model share or split masks
    words = ["--data_dir", data / "oscar", *TINY, *given.words("gpt2")]
    records = workers.run(ROOT / script / "run_gpt2.py", count, tmp_path, *words, *flags)

    has_stages = script == "beyond" and bool({"1f1b", "pipeline=2,data=2", "pipeline=2,tensor=2"} & {*flags})
    expected = expected_of(script, given, workers=parts, whole=has_stages)
    assert means([losses_of(record) for record in records]) == pytest.approx(means(expected.losses), abs=2e-5)
    must_be(records[:1], dataclasses.replace(expected, losses=[losses_of(records[0])]))


@pytest.mark.proof
def test_task_2b_starts_its_own_workers(tmp_path, data):
    words = ["--data_dir", data / "oscar", *TINY, *GPT2.words("gpt2"), "--world_size", 2, "--master_port", free_port()]
    command = [sys.executable, "task2b_allreduce/run_gpt2.py", *map(str, words), "--output_dir", str(tmp_path / "run")]

    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)

    assert done.returncode == 0, done.stderr
    records = [json.loads((tmp_path / f"run/rank{rank}.json").read_text()) for rank in range(2)]
    must_be(records, by_hand.train_gpt2(model_path("tiny", "gpt2"), TEXTS, GPT2, workers=2))
    assert "submit_figures/ is not changed" in done.stdout  # the figures are those of runs without --output_dir
