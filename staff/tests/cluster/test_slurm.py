"""The batch scripts under a real SLURM: four virtual nodes on this machine, made by cluster/virtual_slurm.sh."""

import csv
import os
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

from common.paths import ROOT
from staff.tests.handouts import solved_handout

SLURM = ROOT / "cluster/virtual_slurm.sh"
MISSING = [name for name in ("slurmctld", "slurmd", "munged", "unshare", "ip") if not shutil.which(name)]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"needs SLURM, see {SLURM.name}; not installed: {', '.join(MISSING)}"),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can make the namespaces of the virtual nodes"),
    pytest.mark.skipif(not (ROOT / ".venv/bin/torchrun").exists(), reason="the batch scripts use .venv: make setup"),
]

TINY = (
    "--mem=3G --cpus-per-task=1 "
    "--export=ALL,PRECISION=fp32,MODEL=gpt2-tiny,LENGTH=64,BATCH_SIZE=2,MAX_STEPS=4,WORKERS_PER_NODE=1"
)
WITHOUT_GPUS = f"--gpus-per-node=0 {TINY}"
DDP = f"{WITHOUT_GPUS} --nodelist=n2 benchmark/slurm/ddp.sbatch --output_dir"
JOBS = {
    "hello": "--mem=1G cluster/course.sbatch cluster/hello.py",
    "one node": f"{DDP} FOLDER/one",  # two jobs at once must not take each other's port
    "the same node": f"{DDP} FOLDER/same",
    "pipeline": f"{WITHOUT_GPUS},WORKERS_PER_NODE=2 benchmark/slurm/pipeline.sbatch --output_dir FOLDER/pipeline",
    "deepspeed": f"{WITHOUT_GPUS},STRATEGY=zero1 benchmark/slurm/deepspeed.sbatch --output_dir FOLDER/deepspeed",
    "single": f"--gpus=0 {TINY} benchmark/slurm/single.sbatch --output_dir FOLDER/single",
    "grade": "--mem=3G --array=1-2 --export=ALL,OUT=FOLDER/graded staff/slurm/grade_class.sbatch 'FOLDER/class/*'",
}


class SlurmJob(NamedTuple):
    """The outcome of a job: the exit code of sbatch, and the output of its tasks."""

    code: int
    output: str


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with a class of a solved hand-in and an empty one."""
    folder = tmp_path_factory.mktemp("slurm")
    for name, content in solved_handout().items():
        path = folder / "class/solved" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    (folder / "class/empty").mkdir()
    return folder


@pytest.fixture(scope="module")
def jobs(folder) -> dict[str, SlurmJob]:
    """All jobs, submitted at once."""
    lines = []
    for name, job in JOBS.items():
        output, code = (shlex.quote(f"{folder}/{name}.{kind}") for kind in ("txt", "code"))
        options = job.replace("FOLDER/", f"{folder}/")
        lines.append(f"{{ sbatch --wait --open-mode=append --output={output} {options}; echo $? > {code}; }} &")
    done = subprocess.run(
        [SLURM, "bash", "-c", "\n".join([*lines, "wait"])], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return {
        name: SlurmJob(int((folder / f"{name}.code").read_text()), (folder / f"{name}.txt").read_text(errors="replace"))
        for name in JOBS
    }


@pytest.mark.parametrize("name", JOBS)
def test_a_batch_script_runs_on_nodes_without_gpus(jobs, folder, name):
    code, output = jobs[name]

    assert code == 0, output
    if name == "hello":
        assert [rank for rank in range(4) if f"rank {rank} of 4 has joined" not in output] == []
        assert output.count("got the sum [10.0, 100.0]") == 4
    elif name == "grade":
        rows = csv.DictReader((folder / "graded/gradebook.csv").read_text().splitlines())
        points = {row["submission"]: int(row["score"]) for row in rows}
        assert points["solved"] > points["empty"] == 0
    else:
        results = folder / {"one node": "one", "the same node": "same"}.get(name, name)
        assert list(results.rglob("result*.json")), output
