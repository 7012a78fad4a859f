"""The script of the bonus lessons as its README starts it: losses of task 3, messages and bytes, SLURM, bad flags."""

import json
import os
import random
import socket
import subprocess
import sys

import pytest

from common.arguments import parse_beyond_arguments
from common.errors import InputError
from common.paths import ROOT
from tests.own.warm import Script

FLAGS = ("--dropout", "0", "--max_steps", "5", "--batch_size", "8")
WORKERS = 2


def free_port_of_slurm() -> int:
    """A free port among those that cluster/course.sbatch takes: 20000 and the last four digits of the job."""
    while True:
        port = random.randrange(20000, 30000)
        try:
            with socket.create_server(("127.0.0.1", port)):
                return port
        except OSError:
            continue


def started_by_hand(script, folder, *flags):
    """One command line for each worker."""
    folder.mkdir()
    words = ["--master_ip", "127.0.0.1", "--master_port", free_port_of_slurm(), "--world_size", WORKERS]
    words += ["--output_dir", folder, "--overwrite_output_dir", *FLAGS, *flags]
    workers = [
        Script(ROOT / script, [*words, "--local_rank", rank], folder / f"log{rank}.txt") for rank in range(WORKERS)
    ]
    assert [worker.wait(timeout=240) for worker in workers] == [0] * WORKERS, (folder / "log0.txt").read_text()


def started_by_slurm(script, folder, *flags):
    """cluster/course.sbatch, with an srun that starts its tasks here."""
    folder.mkdir()
    fakes = {
        "scontrol": "echo 127.0.0.1",
        "srun": 'for SLURM_PROCID in 0 1; do export SLURM_PROCID; "${@:2}" & done; wait -n && wait -n',
    }
    for name, body in fakes.items():
        (folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / name).chmod(0o755)
    slurm = {"SLURM_JOB_NODELIST": "node7", "SLURM_NTASKS": str(WORKERS), "SLURM_CPUS_PER_TASK": "1"}
    slurm |= {"SLURM_JOB_ID": str(free_port_of_slurm()), "PYTHON": sys.executable}
    environment = os.environ | slurm | {"PATH": f"{folder}:{os.environ['PATH']}"}
    command = ["bash", "cluster/course.sbatch", script, *FLAGS, *flags, "--output_dir", str(folder / "out")]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    for file in (folder / "out").iterdir():
        file.rename(folder / file.name)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """{name: the records of both workers}; all with the same seed, batch and steps."""
    folder = tmp_path_factory.mktemp("runs")
    overlap = ("--strategy", "overlap", "--bucket_mb")
    started_by_hand("task3_ddp/run_gpt2.py", folder / "task 3")
    started_by_hand("beyond/run_gpt2.py", folder / "ring", "--strategy", "ring")
    started_by_hand("beyond/run_gpt2.py", folder / "one bucket", *overlap, "100")
    started_by_slurm("beyond/run_gpt2.py", folder / "many buckets", *overlap, "0.1")
    return {
        run.name: [json.loads((run / f"rank{rank}.json").read_text()) for rank in range(WORKERS)]
        for run in folder.iterdir()
    }


BEYOND = ["ring", "one bucket", "many buckets"]


@pytest.mark.proof
@pytest.mark.parametrize("name", BEYOND)
def test_losses_are_those_of_task_3(runs, name):
    for ours, theirs in zip(runs[name], runs["task 3"], strict=True):
        losses = [[step["loss"] for step in record["iterations"]] for record in (ours, theirs)]
        assert losses[0] == pytest.approx(losses[1], abs=1e-5)


@pytest.mark.proof
@pytest.mark.parametrize("name", BEYOND)
def test_exposed_seconds_are_those_of_the_phase_without_the_first_iteration(runs, name):
    for record in runs[name]:
        later = [step["phases"]["communication"] for step in record["iterations"][1:]]
        assert record["communication"]["exposed_seconds"] == pytest.approx(sum(later) / len(later))


@pytest.mark.proof
def test_the_ring_sends_two_messages_for_each_other_rank_and_the_fewest_bytes(runs):
    sent = [entry for record in runs["ring"] for entry in record["collectives"] if entry["name"] == "send"]
    first = runs["ring"][0]

    assert [entry["count"] for entry in sent] == [2 * (WORKERS - 1) * len(first["iterations"])] * WORKERS
    assert sum(entry["bytes"] for entry in sent) == 2 * (WORKERS - 1) * 4 * first["parameters"] * len(
        first["iterations"]
    )


@pytest.mark.proof
def test_smaller_buckets_are_more_messages_of_the_same_bytes_in_all(runs):
    for few, many in zip(runs["one bucket"], runs["many buckets"], strict=True):
        assert many["communication"]["messages"] > few["communication"]["messages"] + 2
        assert many["communication"]["bytes"] == few["communication"]["bytes"] >= few["parameters"] * 4


@pytest.mark.proof
@pytest.mark.parametrize("name", BEYOND)
def test_no_rank_sends_its_weights(runs, name):
    for record in runs[name]:
        broadcast = sum(entry["bytes"] for entry in record["collectives"] if entry["name"] == "broadcast")
        assert broadcast < record["parameters"]  # the order: one index for each tensor


@pytest.mark.parametrize("size", ["0", "-1", "nan", "1e9"])
def test_a_bucket_of_no_size_is_one_clear_line(size):
    with pytest.raises(InputError, match="--bucket_mb: expected a size in MiB, above 0"):
        parse_beyond_arguments(["--strategy", "overlap", "--bucket_mb", size])


@pytest.mark.parametrize(
    "file", sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("[a-z]*/**/*.sbatch")), ids=str
)
def test_a_batch_script_is_valid_shell(file):
    assert subprocess.run(["bash", "-n", ROOT / file]).returncode == 0
