"""Figures are drawn wherever a program runs: also with the settings of a notebook, and without a screen."""

import os
import subprocess
import sys

from common.paths import ROOT


def test_the_backend_of_a_notebook_does_not_stop_a_figure(tmp_path):
    path = tmp_path / "losses.png"
    code = f"from common.figures import bars; bars({str(path)!r}, ['a', 'b'], [1, 2], label='ms', title='t')"
    env = os.environ | {"MPLBACKEND": "module://matplotlib_inline.backend_inline"}

    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, check=True)

    assert path.read_bytes().startswith(b"\x89PNG")
