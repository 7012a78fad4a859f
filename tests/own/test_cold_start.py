"""What a command imports before it answers --help, a wrong flag or a wrong value: a reader waits for every import.

Nothing is timed here. Which modules are loaded by then is the same on every machine.
"""

import json
import subprocess
import sys
from typing import NamedTuple

import pytest

from common.paths import ROOT


class Command(NamedTuple):
    """How a command is started, and flags with a value that it refuses before it does anything."""

    start: tuple[str, ...]
    refused: tuple[str, ...]


def module(name: str, refused: str) -> Command:
    return Command(("-m", name), tuple(refused.split()))


def script(path: str, refused: str) -> Command:
    return Command((path,), tuple(refused.split()))


# They train nothing, so they check their flags before they load torch.
LIGHT = (
    module("cluster.launch", "--workers 0 -- cluster/hello.py"),
    module("cluster.ladder", "--workers 1"),
    module("cluster.two_workers", "--steps 0"),
    module("cluster.random_bert", "1X"),
    module("cluster.pictures", "--rate fast"),
    module("cluster.doctor", "--master_port none"),
    module("cluster.emulate", "--nodes 0 -- true"),
    script("submit.py", "report --netid ab1234"),
    script("download_glue_data.py", "--tasks nothing"),
    script("task4_traffic/counters.py", "--read no_such_file"),
    script("prepare_oscar.py", "--input README.md --output no_such_folder --size lots"),
    module("benchmark.sweep", "--workers 0"),
    module("benchmark.tables", "no_such_folder"),
    module("benchmark.predict", "--rate 1gbps"),
    module("staff.handout", "--out README.md"),
    module("staff.grade", "no_such_submission --out no_such_folder"),
    module("staff.mistakes", "--times 0"),
    module("staff.attacks", "--jobs none"),
    module("staff.both_sides", "--region 9.9"),
    module("staff.proofs.harmful_class", "--seed none --out no_such_folder"),
    module("staff.sandbox", "--no_such_wall"),
    module("staff.gradescope.build", "--out"),
)
# They import torch and transformers at the top, as a reader expects of them, and nothing that is not needed yet.
TRAINING = (
    script("task1_single/run_glue.py", "--task_name nothing"),
    script("task2a_gather_scatter/run_glue.py", "--world_size 0"),
    script("task2b_allreduce/run_glue.py", "--world_size 2 --local_rank 2"),
    script("task2b_allreduce/run_gpt2.py", "--batch_size 0"),
    script("task3_ddp/run_glue.py", "--learning_rate 0"),
    script("task3_ddp/run_gpt2.py", "--n_epochs 0"),
    script("task4_traffic/run_glue.py", "--dropout 1"),
    script("task4_traffic/expected.py", "--world_size 1"),
    script("task4_traffic/compare.py", "no_such_folder"),
    script("pipeline/run_gpt2.py", "--n_chunk 0"),
)
HELLO = script("cluster/hello.py", "--world_size 0")


def lines(command: Command) -> list[list[str]]:
    """Its command lines that end at once: --help with exit code 0, a wrong flag and a wrong value with 2."""
    return [[*command.start, "--help"], [*command.start, "--no_such_flag"], [*command.start, *command.refused]]


HEAVY = ("torch", "transformers", "torch._dynamo", "datasets", "sklearn", "matplotlib", "pandas", "scipy")
INTERNAL = {"cluster.bandwidth", "cluster.guard", "cluster.cloudlab_profile"}  # started by others
ON_GPUS = {"cluster.gpu_check"}  # asks torch for them first
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


@pytest.fixture(scope="module")
def answer():
    """Run all command lines, one after the other, in one new process; return a function that gives, for each line of a
    command, the exit code and what is loaded by then."""
    todo = [line for command in (*LIGHT, HELLO, *TRAINING) for line in lines(command)]
    process = [sys.executable, "-c", RUN % (HEAVY,), json.dumps(todo)]
    done = subprocess.run(process, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout.splitlines()[-1])
    return lambda command: [answers[" ".join(line)] for line in lines(command)]


@pytest.mark.parametrize("command", LIGHT, ids=lambda command: command.start[-1])
def test_a_command_that_trains_nothing_checks_its_flags_without_torch(command, answer):
    assert answer(command) == [[code, []] for code in (0, 2, 2)]


def test_the_first_program_of_the_course_loads_torch_and_no_transformers(answer):
    assert answer(HELLO) == [[code, ["torch"]] for code in (0, 2, 2)]


@pytest.mark.parametrize("command", TRAINING, ids=lambda command: command.start[-1])
def test_task_scripts_check_their_flags_before_they_load_data_sets_and_plots(command, answer):
    assert answer(command) == [[code, ["torch", "transformers"]] for code in (0, 2, 2)]


def test_every_command_of_the_course_is_tried():
    tried = {command.start[-1] for command in (*LIGHT, HELLO, *TRAINING)}
    shipped = [path for folder in ("task*", "pipeline", "cluster") for path in ROOT.glob(f"{folder}/*.py")]
    commands = {str(path.relative_to(ROOT)) for path in shipped if "add_argument" in path.read_text()}

    assert {name.removesuffix(".py").replace("/", ".") for name in commands} - INTERNAL - ON_GPUS <= {
        name.removesuffix(".py").replace("/", ".") for name in tried
    }
