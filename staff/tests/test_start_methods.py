"""The start of GPT-2's processes as the script makes it, with forkserver; the graders fork (tests/start/test_start.py).

What the graders accept runs there, and what they refuse because of the start fails there.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.launch import free_port
from common.paths import cache_dir
from staff.grade.submissions import write_files
from staff.proofs.bank import Entry, changed_files, load_bank

SCRIPT = "task2b_allreduce/run_gpt2.py"
OF_THE_START = ("forkserver", "function inside", "lambda", "new process does not have", "every worker runs the script")
ENTRIES = [entry for entry in load_bank() if entry.file == SCRIPT]
RIGHT = [entry for entry in ENTRIES if not entry.is_mistake and "2b.9" in entry.bodies]
WRONG = [entry for entry in ENTRIES if entry.is_mistake and any(words in entry.name for words in OF_THE_START)]


def start(entry: Entry, tree: Path) -> subprocess.CompletedProcess:
    """Run the script of a tree with this entry, on two workers, for two steps."""
    write_files(changed_files([entry]), tree)
    flags = ["--world_size", "2", "--batch_size", "8", "--max_steps", "2", "--join_seconds", "20"]
    command = [sys.executable, SCRIPT, *flags, "--master_port", str(free_port()), "--output_dir", "out"]
    environment = os.environ | {"COS598D_CACHE": str(cache_dir("models").parent), "HF_HUB_OFFLINE": "1"}
    return subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=240)


@pytest.mark.slow
@pytest.mark.parametrize("entry", RIGHT, ids=lambda entry: entry.name)
def test_what_the_graders_accept_starts_with_forkserver(entry, tmp_path):
    process = start(entry, tmp_path)

    assert process.returncode == 0, process.stderr
    records = [json.loads((tmp_path / "out" / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert [len(record["iterations"]) for record in records] == [2, 2]


@pytest.mark.slow
@pytest.mark.parametrize("entry", WRONG, ids=lambda entry: entry.name)
def test_what_the_graders_refuse_for_its_start_fails_with_forkserver(entry, tmp_path):
    assert start(entry, tmp_path).returncode != 0
