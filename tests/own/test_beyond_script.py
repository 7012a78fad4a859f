"""The script of the bonus lessons as its README starts it: losses of task 3, messages and bytes, bad flags."""

import functools
import re
import subprocess

import pytest

from common.arguments import parse_beyond_arguments
from common.errors import InputError
from common.paths import ROOT
from tests.own import workers
from tests.own.workers import mean_losses

FLAGS = ("--dropout", "0", "--max_steps", "5", "--batch_size", "8")
RUNS = {  # the name of a run: its workers and flags
    "one worker": (1, "ring"),
    "two workers": (2, "ring"),  # which share the data as the two places of a data axis do
    "one bucket": (2, "overlap", "--bucket_mb", "100"),
    "many buckets": (2, "overlap", "--bucket_mb", "0.1"),
    "tensor on 2": (2, "tensor"),
    "tensor on 4": (4, "tensor"),
    "1f1b on 2": (2, "1f1b", "--n_chunk", "4"),
    "1f1b on 4": (4, "1f1b", "--n_chunk", "2"),
    "gpipe on 2": (2, "1f1b", "--schedule", "gpipe"),
    "data x tensor": (4, "grid"),
    "pipeline x data": (4, "grid", "--grid", "pipeline=2,data=2"),
    "pipeline x tensor": (4, "grid", "--grid", "pipeline=2,tensor=2"),
}
FAST = ("one worker", "tensor on 2", "1f1b on 2")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """run(name) -> the records of all workers of one of RUNS, which is made once."""
    folder = tmp_path_factory.mktemp("runs")

    @functools.cache
    def records(name):
        count, *flags = RUNS[name]
        return workers.run(ROOT / "beyond/run_gpt2.py", count, folder / name, *FLAGS, "--strategy", *flags)

    return records


@pytest.mark.medium
@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.proof) for name in RUNS][2:]
)
def test_losses_are_those_of_workers_that_have_the_whole_model(run, name):
    whole = "two workers" if "data" in name or "bucket" in name else "one worker"
    assert mean_losses(run(name)) == pytest.approx(mean_losses(run(whole)), abs=1e-5)


@pytest.mark.proof
def test_the_ring_sends_two_messages_for_each_other_rank_and_the_fewest_bytes(run):
    sent = [entry for record in run("two workers") for entry in record["collectives"] if entry["name"] == "send"]
    first = run("two workers")[0]
    steps = len(first["iterations"])

    assert [entry["count"] for entry in sent] == [2 * steps, 2 * steps]
    assert sum(entry["bytes"] for entry in sent) == 2 * 4 * first["parameters"] * steps
    for record in run("two workers"):
        later = [step["phases"]["communication"] for step in record["iterations"][1:]]
        assert record["communication"]["exposed_seconds"] == pytest.approx(sum(later) / len(later))


@pytest.mark.proof
@pytest.mark.parametrize("name", ["two workers", "one bucket", "many buckets"])
def test_no_rank_sends_its_weights(run, name):
    for record in run(name):
        broadcast = sum(entry["bytes"] for entry in record["collectives"] if entry["name"] == "broadcast")
        assert broadcast < record["parameters"]  # the order: one index for each tensor


@pytest.mark.proof
def test_smaller_buckets_are_more_messages_of_the_same_bytes_in_all(run):
    for few, many in zip(run("one bucket"), run("many buckets"), strict=True):
        assert many["communication"]["messages"] > few["communication"]["messages"] + 2
        assert many["communication"]["bytes"] == few["communication"]["bytes"] >= few["parameters"] * 4


@pytest.mark.medium
@pytest.mark.parametrize("name", FAST[1:])
def test_the_first_worker_of_a_grid_records_the_metrics_of_one_worker(run, name):
    alone, first = run("one worker")[0], run(name)[0]
    assert alone["evaluations"]
    for evaluation, expected in zip(first["evaluations"], alone["evaluations"], strict=True):
        assert evaluation["metrics"] == pytest.approx(expected["metrics"], rel=1e-4)


@pytest.mark.medium
def test_a_stage_sends_each_micro_batch_and_the_gradient_of_the_shared_matrix(run):
    for record in run("1f1b on 2"):
        (sent,) = [entry for entry in record["collectives"] if entry["name"] == "send"]
        assert sent["count"] == (4 + 1) * len(record["iterations"])


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--strategy", "ring", "--grid", "data=2"], "--grid works only with --strategy grid, got ring"),
        (["--strategy", "grid", "--world_size", "3"], "--grid: expected a grid for 3 workers, for instance tensor=3"),
        (["--strategy", "grid", "--grid", "data=2,tensor=2"], "data=2,tensor=2 needs 4 workers, got 2"),
        (["--strategy", "grid", "--grid", "rows=2"], "expected axes and sizes such as pipeline=2"),
        (["--strategy", "grid", "--grid", "data=2,data=2"], "expected axes and sizes such as pipeline=2"),
        (["--strategy", "grid", "--grid", "data=0"], "expected axes and sizes such as pipeline=2"),
        (["--strategy", "tensor", "--world_size", "3"], "expected a tensor axis that divides the"),
        (["--strategy", "1f1b", "--world_size", "64"], "one for each block; got 64"),
        (["--strategy", "1f1b", "--n_chunk", "3"], "is not divisible by 3 (micro-batches, see --n_chunk)"),
        (["--strategy", "tensor", "--save_to", "x"], "--save_to"),
    ],
)
def test_a_grid_that_does_not_fit_is_one_clear_line(flags, words):
    given = ["--world_size", "2"] if "--world_size" not in flags else []
    with pytest.raises(InputError, match=re.escape(words)):
        parse_beyond_arguments([*flags, *given, "--local_rank", "0", "--batch_size", "64"])


@pytest.mark.parametrize("size", ["0", "-1", "nan", "1e9"])
def test_a_bucket_of_no_size_is_one_clear_line(size):
    with pytest.raises(InputError, match="--bucket_mb: expected a size in MiB, above 0"):
        parse_beyond_arguments(["--strategy", "overlap", "--bucket_mb", size])


@pytest.mark.parametrize(
    "file", sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("[a-z]*/**/*.sbatch")), ids=str
)
def test_a_batch_script_is_valid_shell(file):
    assert subprocess.run(["bash", "-n", ROOT / file]).returncode == 0
