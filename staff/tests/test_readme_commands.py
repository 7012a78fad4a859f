"""Every command in every README runs as written, in a copy of the tree and with an empty cache, or has a reason not to.

So each of them may be the first command in a fresh clone.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest

from common.paths import ROOT

SECONDS = 900
FIRST = (
    "python",
    "torchrun",
    "make",
    "pytest",
    "sbatch",
    "srun",
    "dool",
    "source",
    "paste",
    "diff",
    "staff/gradescope/",
)
DOCUMENTS = [*ROOT.glob("*.md"), *ROOT.glob("[a-z]*/README.md"), ROOT / "docs" / "faq.md"]
READMES = sorted(path.relative_to(ROOT).as_posix() for path in DOCUMENTS)

# What a test does not run as it stands there, and why; what is in brackets runs it in another form.
ELSEWHERE = {
    r"^make (setup|demo|demo-cluster|test|bank|check|verify|report)\b": "installs, or runs the tests (.ci/run)",
    r"^make (handout|gradescope)\b": "test_handout.py, test_gradescope.py",
    r"install\.py benchmark": "installs; benchmark/README.md's figures were made with it",
    r"^source ": "a line for the user's shell",
    r"download_glue_data": "needs the network (test_download_glue_data.py: a server on loopback)",
    r"bert-base-cased|--model_name_or_path gpt2": "needs the hub (test_models.py: a hub on loopback)",
    r"\[flags\]|FILES|SCRIPT|\.\.\.|FLAGS|SUBMISSION|submissions/|\bNAME\b": "a pattern, not a command",
    r"--local_rank R|--node_rank R|--local_rank [0-3]\b": "one of several terminals or nodes (test_task_scripts.py)",
    r"--hosts ": "needs more machines (test_launch_ends.py, test_doctor.py: ssh to loopback)",
    r"^(sbatch|srun) ": "needs SLURM (test_slurm.py: four virtual nodes)",
    r"grader\.watch|^make watch": "runs until it is ended (test_watch.py)",
    r"grader\.debug": "asks in a terminal (test_debug.py)",
    r"--shell": "waits for a person (test_emulate.py)",
    r"--interface eno1|^dool|node0\.csv": "names interfaces and files of CloudLab nodes (test_traffic.py)",
    r"--input en_meta/": "needs OSCAR (test_oscar.py)",
    r"\$(bert|m)\b": "uses a variable of the line above (test_traffic.py, test_pipe_runs.py)",
    r"^paste ": "reads what a run has left; the command above it makes that",
    r"submit\.py": "test_submit_*.py, staff/tests/test_carry.py",
    r"pytest -q tests/own/test_glue.py|-m pytest --hint": "test_glue.py, test_graded_points.py",
    r"staff\.(attacks|sandbox|grade|mistakes|both_sides|gradescope|proofs|repeat)|staff/gradescope": "staff's tests",
    r"benchmark\.": "the benchmark's tests, and docs/measurements.md",
    r"runs/task4_\$|for batch|compare\.py": "test_traffic.py",
}


def commands():
    """(README, command) of every line in a code block that begins with a program, and of commands in tables."""
    found = []
    for readme in READMES:
        text = (ROOT / readme).read_text(encoding="utf-8")
        blocks = re.findall(r"^```(?:shell|bash)?\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
        lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
        lines += re.findall(r"\| `((?:python|make) [^`]+)` \|", text)
        for line in lines:
            command = " ".join(re.sub(r"\s+#.*", "", line).split())
            if command.startswith(FIRST) and (readme, command) not in found:
                found.append((readme, command))
    return found


def reason(command):
    """Why a command is not run here; "" for one that is."""
    return next((why for pattern, why in ELSEWHERE.items() if re.search(pattern, command)), "")


COMMANDS = commands()
RUN_HERE = sorted({command for _, command in COMMANDS if not reason(command)})


def test_every_reason_is_still_needed():
    texts = [command for _, command in COMMANDS]

    unused = [pattern for pattern in ELSEWHERE if not any(re.search(pattern, text) for text in texts)]

    assert unused == []


def test_the_commands_of_the_parts_are_run():
    for task in ("task1_single", "task2a_gather_scatter", "task2b_allreduce", "task3_ddp", "task4_traffic", "pipeline"):
        assert any(task in command for command in RUN_HERE), task


def test_every_script_that_a_readme_names_is_there():
    for readme, command in COMMANDS:
        for script in re.findall(r"(?:^|\s)((?:\w+/)+\w+\.py)\b", command):
            assert (ROOT / script).exists(), (readme, command)


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of every tracked file, so that runs, figures and reports are made there."""
    copy = tmp_path_factory.mktemp("readme") / "tree"
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    for name in tracked:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, copy / name)
    return copy


@pytest.mark.slow
@pytest.mark.parametrize("command", RUN_HERE)
def test_a_command_of_a_readme_runs(tree, tmp_path, command):
    words = shlex.split(command)
    begin = {"python": [sys.executable], "torchrun": [sys.executable, "-m", "torch.distributed.run"]}
    words = begin.get(words[0], [words[0]]) + words[1:]
    words = [sys.executable if word == "python" else word for word in words]

    environment = {**os.environ, "COS598D_CACHE": str(tmp_path)}
    done = subprocess.run(words, cwd=tree, env=environment, capture_output=True, text=True, timeout=SECONDS)

    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
