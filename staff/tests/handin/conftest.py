"""A student whose regions are solved and whose scripts have run, for all tests of a process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.launch import free_port
from common.paths import ROOT
from staff.grade.submissions import write_files
from staff.tests.handouts import solved_handout
from staff.tests.warm import ENVIRONMENT, Script

BERT = "--dropout 0 --max_steps 6 --per_gpu_train_batch_size"
GPT2 = "--dropout 0 --max_steps 4 --batch_size 8"
RUNS = [  # script, workers, flags
    ("task1_single/run_glue.py", 1, f"{BERT} 8"),
    ("task2a_gather_scatter/run_glue.py", 2, f"{BERT} 4 --timeline 2"),
    ("task2b_allreduce/run_glue.py", 2, f"{BERT} 4 --timeline 2"),
    ("task3_ddp/run_glue.py", 2, f"{BERT} 4"),
    ("task4_traffic/run_glue.py", 2, f"{BERT} 4"),
    ("pipeline/run_gpt2.py", 1, f"{GPT2} --model_parallel_mode model_parallel"),
    ("pipeline/run_gpt2.py", 1, f"{GPT2} --model_parallel_mode pipeline_parallel"),
    ("beyond/run_gpt2.py", 2, f"{GPT2} --strategy overlap --bucket_mb 0.5"),
]


@pytest.fixture(scope="session")
def student(tmp_path_factory) -> Path:
    """A student's folder in which every region is solved and every script has run."""
    tree = tmp_path_factory.mktemp("student")
    write_files(solved_handout(), tree)
    environment = ENVIRONMENT | {"COS598D_CACHE": os.environ.get("COS598D_CACHE", str(ROOT / ".cache"))}
    for script, workers, flags in RUNS:
        words = ["--master_port", free_port(), "--master_ip", "127.0.0.1", "--world_size", workers, "--local_rank"]
        log = tree / f"{Path(script).parent}.log"
        ranks = [Script(tree / script, [*flags.split(), *words, rank], log, environment) for rank in range(workers)]
        assert [rank.wait(timeout=300) for rank in ranks] == [0] * workers, log.read_text()
    alone = [
        sys.executable,
        "task2b_allreduce/run_gpt2.py",
        *GPT2.split(),
        "--world_size",
        "1",
        "--master_port",
        str(free_port()),
    ]  # starts its own worker
    subprocess.run(alone, cwd=tree, env=os.environ | environment, check=True, capture_output=True)
    return tree
