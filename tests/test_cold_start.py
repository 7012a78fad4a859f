"""What a command imports before it answers --help, a wrong flag or a wrong value: a reader waits for every import.

Nothing is timed here. Which modules are loaded by then is the same on every machine; benchmark.checks.feedback times it.
"""

import json
import subprocess
import sys

import pytest

from benchmark.checks.feedback_commands import LIGHT, TRAINING, lines
from common.paths import ROOT

HEAVY = ("torch", "transformers", "datasets", "sklearn", "matplotlib", "pandas", "scipy")
NOT_YET = ("transformers.modeling_utils", "torch._dynamo", *HEAVY[2:])
RUN = """
import json, runpy, sys
seen = {}
for line in json.loads(sys.argv[1]):
    sys.argv, code = line, None
    try:
        if line[0] == "-m":
            sys.argv = line[1:]
            runpy.run_module(line[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(line[0], run_name="__main__")
    except SystemExit as end:
        code = end.code
    seen[" ".join(line)] = [code, [name for name in %r if name in sys.modules]]
print(json.dumps(seen))
"""


def run_all(commands, watched):
    """Run the command lines one after the other in one new process: exit code, and what is loaded by then, of each."""
    todo = [line for command in commands for line in lines(command)]
    process = [sys.executable, "-c", RUN % (watched,), json.dumps(todo)]
    done = subprocess.run(process, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
