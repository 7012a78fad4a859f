"""What the dev container runs when it is created, in the handout and with nothing of this environment."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from staff.grade.submissions import write_files
from staff.tests.handouts import open_handout

KEPT = ("PIP_", "SSL_", "http")  # how this machine reaches a package index


@pytest.mark.slow  # installs everything: minutes, and gigabytes on a machine whose index has torch with CUDA
def test_the_dev_container_sets_itself_up_and_the_doctor_is_content(tmp_path):
    write_files(open_handout().files, tmp_path / "handout")
    container = json.loads((tmp_path / "handout/.devcontainer/devcontainer.json").read_text())
    python = Path(sys.executable).resolve().parent  # instead of the image's Python
    clean = {"HOME": str(tmp_path), "PATH": f"{python}:/usr/bin:/bin"}
    environment = clean | {name: value for name, value in os.environ.items() if name.startswith(KEPT)}

    command = ["bash", "-c", container["postCreateCommand"]]
    result = subprocess.run(command, cwd=tmp_path / "handout", env=environment, capture_output=True, text=True)

    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
    assert container["image"].startswith("python:3.")
    command = [".venv/bin/python", "task1_single/run_glue.py", "--max_steps", "2"]
    subprocess.run(command, cwd=tmp_path / "handout", env=environment, check=True, capture_output=True)
