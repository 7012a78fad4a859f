"""The start of GPT-2's processes as the script makes it, with forkserver; the graders fork (tests/start/test_start.py).

What they refuse because of the start fails there. That what they accept runs there is seen by the graded test that runs
the script, which every variant must pass.
"""

import os
import subprocess
import sys

import pytest

from cluster.launch import free_port
from common.paths import cache_dir
from staff.grade.submissions import write_files
from staff.proofs.bank import changed_files, load_bank

SCRIPT = "task2b_allreduce/run_gpt2.py"
OF_THE_START = ("forkserver", "function inside", "lambda", "new process does not have", "every worker runs the script")
WRONG = [
    entry
    for entry in load_bank()
    if entry.is_mistake and entry.file == SCRIPT and any(words in entry.name for words in OF_THE_START)
]


@pytest.mark.slow
@pytest.mark.parametrize("entry", WRONG, ids=lambda entry: entry.name)
def test_what_the_graders_refuse_for_its_start_fails_with_forkserver(entry, tmp_path):
    """On two workers, for two steps."""
    write_files(changed_files(entry), tmp_path)
    flags = ["--world_size", "2", "--batch_size", "8", "--max_steps", "2", "--join_seconds", "20"]
    command = [sys.executable, SCRIPT, *flags, "--master_port", str(free_port()), "--output_dir", "out"]
    environment = os.environ | {"COS598D_CACHE": str(cache_dir("models").parent), "HF_HUB_OFFLINE": "1"}

    process = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)

    assert process.returncode != 0
