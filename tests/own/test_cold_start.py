"""What a command imports before it answers --help, a wrong flag or a wrong value: a reader waits for every import.

Nothing is timed here. Which modules are loaded by then is the same on every machine.
"""

import json
import subprocess
import sys

import pytest

from common.paths import ROOT

# How a command is started -> flags with a value that it refuses before it does anything.
# They train nothing, so they check their flags before they load torch.
LIGHT = {
    "-m cluster.launch": "--workers 0 -- cluster/hello.py",
    "-m cluster.ladder": "--workers 1",
    "-m cluster.two_workers": "--steps 0",
    "-m cluster.random_bert": "1X",
    "-m cluster.pictures": "--rate fast",
    "-m cluster.doctor": "--master_port none",
    "-m cluster.emulate": "--nodes 0 -- true",
    "submit.py": "report --netid ab1234",
    "download_glue_data.py": "--tasks nothing",
    "task4_traffic/counters.py": "--read no_such_file",
    "prepare_oscar.py": "--input README.md --output no_such_folder --size lots",
    "-m benchmark.sweep": "--workers 0",
    "-m benchmark.tables": "no_such_folder",
    "-m benchmark.predict": "--rate 1gbps",
    "-m staff.handout": "--out README.md",
    "-m staff.grade": "no_such_submission --out no_such_folder",
    "-m staff.mistakes": "--times 0",
    "-m staff.attacks": "--jobs none",
    "-m staff.sandbox": "--no_such_wall",
    "-m staff.gradescope.build": "--out",
}
# They import torch and transformers at the top, as a reader expects of them, and nothing that is not needed yet.
TRAINING = {
    "task1_single/run_glue.py": "--task_name nothing",
    "task2a_gather_scatter/run_glue.py": "--world_size 0",
    "task2b_allreduce/run_glue.py": "--world_size 2 --local_rank 2",
    "task2b_allreduce/run_gpt2.py": "--batch_size 0",
    "task3_ddp/run_glue.py": "--learning_rate 0",
    "task3_ddp/run_gpt2.py": "--n_epochs 0",
    "task4_traffic/run_glue.py": "--dropout 1",
    "task4_traffic/expected.py": "--world_size 1",
    "task4_traffic/compare.py": "no_such_folder",
    "pipeline/run_gpt2.py": "--n_chunk 0",
}
HELLO = {"cluster/hello.py": "--world_size 0"}
COMMANDS = {**LIGHT, **HELLO, **TRAINING}


def lines(command: str) -> list[str]:
    """Its command lines that end at once: --help with exit code 0, a wrong flag and a wrong value with 2."""
    return [f"{command} --help", f"{command} --no_such_flag", f"{command} {COMMANDS[command]}"]


HEAVY = ("torch", "transformers", "torch._dynamo", "datasets", "sklearn", "matplotlib", "pandas", "scipy")
RUN = """
import json, runpy, sys
seen = {}
for line in json.loads(sys.argv[1]):
    sys.argv, code = line.removeprefix("-m ").split(), None
    try:
        if line.startswith("-m "):
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        code = end.code
    seen[line] = [code, [name for name in %r if name in sys.modules]]
print(json.dumps(seen))
"""


@pytest.fixture(scope="module")
def answer():
    """Run all command lines, one after the other, in one new process; return a function that gives, for each line of a
    command, the exit code and what is loaded by then."""
    todo = [line for command in COMMANDS for line in lines(command)]
    process = [sys.executable, "-c", RUN % (HEAVY,), json.dumps(todo)]
    done = subprocess.run(process, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout.splitlines()[-1])
    return lambda command: [answers[line] for line in lines(command)]


@pytest.mark.parametrize("command", LIGHT)
def test_a_command_that_trains_nothing_checks_its_flags_without_torch(command, answer):
    assert answer(command) == [[code, []] for code in (0, 2, 2)]


def test_the_first_program_of_the_course_loads_torch_and_no_transformers(answer):
    assert answer("cluster/hello.py") == [[code, ["torch"]] for code in (0, 2, 2)]


@pytest.mark.parametrize("command", TRAINING)
def test_task_scripts_check_their_flags_before_they_load_data_sets_and_plots(command, answer):
    assert answer(command) == [[code, ["torch", "transformers"]] for code in (0, 2, 2)]
