"""What a command imports before it answers --help, a wrong flag or a wrong value: a reader waits for every import.

Nothing is timed here. Which modules are loaded by then is the same on every machine.
"""

import json
import subprocess
import sys

import pytest

from common.paths import ROOT
from tests.own.course_commands import LIGHT, TRAINING, Command, lines

HEAVY = ("torch", "transformers", "datasets", "sklearn", "matplotlib", "pandas", "scipy")
INTERNAL = {"cluster.bandwidth", "cluster.guard", "cluster.cloudlab_profile"}  # started by others
ON_GPUS = {"cluster.gpu_check"}  # asks torch for them first
NOT_YET = ("datasets", "matplotlib", "pandas", "scipy", "sklearn", "torch._dynamo")
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


@pytest.fixture(scope="module")
def light():
    return run_all(LIGHT, HEAVY)


@pytest.mark.parametrize("command", LIGHT, ids=lambda command: command.start[-1])
def test_a_command_that_trains_nothing_checks_its_flags_without_torch(command, light):
    answers = [light[" ".join(line)] for line in lines(command)]

    assert [code for code, _ in answers] == [0, 2, 2]
    assert all(loaded == [] for _, loaded in answers)


@pytest.mark.medium
def test_task_scripts_check_their_flags_before_they_load_data_sets_and_plots():
    answers = run_all(TRAINING, NOT_YET)

    assert {line: [code, loaded] for line, (code, loaded) in answers.items()} == {
        " ".join(line): [code, []] for command in TRAINING for line, code in zip(lines(command), (0, 2, 2), strict=True)
    }


@pytest.mark.medium
def test_the_first_program_of_the_course_loads_no_transformers():
    hello = Command(("cluster/hello.py", "--step", "join"), ("--step", "none"))

    assert all(loaded == [] for _, loaded in run_all([hello], ["transformers"]).values())


def test_every_command_of_the_course_is_tried():
    tried = {command.start[-1] for command in (*LIGHT, *TRAINING)}
    shipped = [path for folder in ("task*", "pipeline", "cluster") for path in ROOT.glob(f"{folder}/*.py")]
    commands = {str(path.relative_to(ROOT)) for path in shipped if "add_argument" in path.read_text()}

    assert {name.removesuffix(".py").replace("/", ".") for name in commands} - INTERNAL - ON_GPUS <= {
        name.removesuffix(".py").replace("/", ".") for name in tried
    }
