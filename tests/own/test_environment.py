"""A script that is started without the environment says in one line how to activate it."""

import subprocess
import sys

import pytest

from common.paths import ROOT

SCRIPTS = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in ("task*", "pipeline", "beyond")
    for path in ROOT.glob(f"{folder}/run_*.py")
)


@pytest.mark.parametrize(
    "script", [*SCRIPTS, "task4_traffic/expected.py", "task4_traffic/compare.py", "cluster/hello.py"]
)
def test_without_torch_a_script_says_how_to_activate_the_environment(script):
    command = [sys.executable, "-S", ROOT / script]  # -S: without the packages that are installed

    done = subprocess.run(command, capture_output=True, text=True)

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: expected a Python with torch") and done.stderr.count("\n") == 1
    assert "run `source .venv/bin/activate` first" in done.stderr
