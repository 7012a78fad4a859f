"""Runs a script of the course on one worker inside the test's process: no process starts, so a run takes half a second.

Its process group is a real one, with this process as its only rank.
"""

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from cluster.launch import free_port
from common.paths import ROOT, import_file


@contextlib.contextmanager
def command(*words: object) -> Iterator[None]:
    """Inside, this process was started with these words; threads and environment are as before at the end."""
    threads = torch.get_num_threads()
    own = {"OMP_NUM_THREADS": "1"}  # threads of a busy machine wait for each other
    torch.set_num_threads(1)
    with mock.patch.object(sys, "argv", [str(word) for word in words]), mock.patch.dict(os.environ, own):
        try:
            yield
        finally:
            torch.set_num_threads(threads)


def run(script: Path | str, folder: Path, *flags: object) -> dict[str, Any]:
    """Run a script on one worker, with its record in `folder`; return the record."""
    module = import_file(ROOT / script, Path(script).stem)
    place = ["--output_dir", folder, "--no_cuda", "--master_port", free_port()]
    with command(script, *flags, *place):
        if hasattr(module, "start_workers"):  # task 2b's run_gpt2.py starts a process for each worker; here, this one
            with command(script, *flags, *place, "--world_size", 1):
                module.run_worker(0, module.parse_gpt2_arguments("task2b_allreduce", world_size=2))
        else:
            module.main()
    return json.loads((folder / "rank0.json").read_text())
