"""The commands of the documentation run in a copy of the tree: those of the READMEs as they stand there, with an empty
cache, so that each may be the first one in a fresh clone; those that made a figure in a small setting.
"""

import importlib.util
import json
import re
import shlex
import subprocess
import sys

import pytest

from cluster.emulate import why_not
from common.paths import ROOT
from staff.handout.assemble import assemble
from staff.tests.handouts import copied

SECONDS = 900  # on a busy machine
PAGES = [path for path in ROOT.glob("[a-z]*/*.md") if path.parent.name != "docs"]
READMES = [*ROOT.glob("*.md"), *PAGES, ROOT / "docs/faq.md"]
FIRST = r"(python|torchrun|make|pytest|sbatch|srun|dool|source|paste|diff|staff/gradescope/)"
NO_NODES = why_not() if sys.platform == "linux" else "network namespaces are Linux's"

# A documented command, as a pattern -> the same in a small setting.
SMALL = {
    r"task1_single/run_glue\.py": "task1_single/run_glue.py --max_steps 2",
    r"benchmark\.checks\.network": "-m benchmark.checks.network --quick --parts tiny,rate",
    r"benchmark\.checks\.activation_memory": "-m benchmark.checks.activation_memory --quick",
    r"benchmark\.checks\.checkpoint_cost": "-m benchmark.checks.checkpoint_cost --quick",
    r"make pictures|cluster\.demo\.pictures": "-m cluster.demo.pictures --only pipeline --into runs/pictures",
    r"benchmark\.checks\.pipeline_speed": "-m benchmark.checks.pipeline_speed --quick --plot bubble.png",
    r"benchmark\.checks\.network --parts (tiny,large|rate)": "-m benchmark.checks.network --quick",
    r"make demo$|cluster\.demo\.ladder --(workers|demo)": "-m cluster.demo.ladder --workers 2 --batch 4 --iterations 2",
    r"cluster\.demo\.two_workers": "-m cluster.demo.two_workers --steps 2",
    r"make demo-cluster|cluster\.demo\.ladder --nodes": "-m cluster.demo.ladder --nodes 2 --random_bert 1M "
    "--iterations 2",
    r"benchmark\.run": "-m benchmark.run --workers 2 --max_steps 4 --dropped 1",
    r"benchmark\.compare": "-m benchmark.compare --workers 2 --max_steps 5 --only fsdp",
    r"benchmark\.prove": "-m benchmark.prove --strategies ddp",
    r"benchmark\.sweep": "-m benchmark.sweep --strategies single --batch_sizes 1 --workers 1 --steps 3",
    r"benchmark\.sweep .*--examples_per_step": "-m benchmark.sweep --only single,ddp --workers 1,2 --steps 6 "
    "--examples_per_step 4 --output_dir runs/benchmark/strong",
    r"benchmark\.predict": "-m benchmark.predict --strategies fsdp",
    r"benchmark\.tables": "-m benchmark.tables runs/benchmark/sweep",  # of the row above
}
NO_JSON = (
    "task1_single",
    "-m cluster.demo.ladder",
    "-m cluster.demo.two_workers",
    "-m cluster.demo.pictures",
)  # lines for people

# What is not run here, and why; what is in brackets runs it in another form.
ELSEWHERE = {
    r"^make (setup|demo|demo-cluster|lint|test|bank|check|verify|report)\b": "installs, or runs the tests (.ci/run)",
    r"^make (handout|gradescope)\b": "test_handout.py, test_gradescope.py",
    r"install\.py benchmark": "installs; benchmark/README.md's figures were made with it",
    r"^source ": "a line for the user's shell",
    r"download_glue_data": "needs the network (test_download_glue_data.py: a server on loopback)",
    r"bert-base-cased|--model_name_or_path gpt2": "needs the hub (test_models.py: a hub on loopback)",
    r"\[flags\]|FILES|SCRIPT|\.\.\.|FLAGS|SUBMISSION|submissions/|\bNAME\b": "a pattern, not a command",
    r"--local_rank R|--node_rank R|--local_rank [0-3]\b": "one of several terminals or nodes (test_task_scripts.py)",
    r"--hosts ": "needs more machines (test_launch.py, test_doctor.py: ssh to loopback)",
    r"^(sbatch|srun) ": "needs SLURM (test_slurm.py: four virtual nodes)",
    r"grader\.watch|^make watch": "runs until it is ended (test_watch.py)",
    r"grader\.debug": "asks in a terminal (test_debug.py)",
    r"--kill |--step_seconds|lost_time": "ends by a kill (staff/tests/beyond/test_survive.py)",
    r"--shell": "waits for a person (test_emulate.py)",
    r"--interface eno1|^dool|node0\.csv": "names interfaces and files of CloudLab nodes (test_traffic.py)",
    r"--input en_meta/": "needs OSCAR (test_oscar.py)",
    r"\$(bert|m)\b": "uses a variable of the line above (test_traffic.py, test_task_scripts.py)",
    r"^paste ": "reads what a run has left; the command above it makes that",
    r"submit\.py": "test_submit_*.py, staff/tests/test_copies.py",
    r"pytest -q staff/tests/common/test_glue.py|-m pytest --hint": "test_glue.py, test_grader_course.py",
    r"staff\.(attacks|sandbox|grade|mistakes|gradescope|proofs)|staff/gradescope": "staff's tests",
    r"runs/task4_\$|for batch|compare\.py": "test_traffic.py",
}


def documented(text: str) -> list[str]:
    """The lines of its code blocks that begin with a program, and the commands in its tables."""
    blocks = re.findall(r"^```(?:shell|bash)?\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    lines += re.findall(r"\| `((?:python|make) [^`]+)` \|", text)
    commands = [" ".join(re.sub(r"\s+#.*", "", line).split()) for line in lines]
    return [command for command in commands if re.match(FIRST, command)]


def matches(command: str, *tables: dict[str, str]) -> bool:
    return any(re.search(pattern, command) for table in tables for pattern in table)


COMMANDS = {command for path in READMES for command in documented(path.read_text(encoding="utf-8"))}
AS_WRITTEN = sorted(
    command
    for command in COMMANDS
    if not matches(command, ELSEWHERE) and not command.startswith("python -m benchmark.")
)


def test_a_command_that_made_a_figure_has_a_small_setting():
    measured = (ROOT / "docs/measurements.md").read_text(encoding="utf-8")
    figures = {*re.findall(r"`((?:python|make) [^`\n]+)`", measured), *(c for c in COMMANDS if "benchmark." in c)}

    assert [command for command in sorted(figures) if not matches(command, SMALL, ELSEWHERE)] == []


def test_the_handout_s_texts_name_only_programs_of_the_handout():
    """A wrong one: `python -m benchmark.run` above the line that begins the staff's part of a README."""
    files = assemble(ROOT).files
    folders = {path.split("/")[0] for path in files if "/" in path} | {"runs", "submit_figures", "report", "dist"}
    ours = [
        path.name for path in ROOT.iterdir() if path.is_dir() and path.name not in folders and path.name.isidentifier()
    ]
    absent = [
        (name, folder)
        for name in files
        if name.endswith(".md")
        for folder in ours
        if re.search(rf"\b{folder}(/|\.)\w", files[name].decode())
    ]

    assert "benchmark" in ours and absent == []


def test_the_handout_s_texts_show_pictures_and_link_to_files_of_the_handout():
    """A wrong one: a picture in docs/ that `ships` in course.toml does not name."""
    files = assemble(ROOT).files
    links = [
        (name, (ROOT / name).parent.joinpath(target).resolve().relative_to(ROOT).as_posix())
        for name in files
        if name.endswith(".md")
        for target in re.findall(r"\]\(([^)#:\s]+)", re.sub(r"`[^`\n]+`", "", files[name].decode()))
    ]

    assert len(links) > 100 and [link for link in links if link[1] not in files] == []


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of every tracked file, so that runs, figures and the cache are made there."""
    return copied(tmp_path_factory.mktemp("documented"))


def run(words, tree, monkeypatch, cache=None):
    for name in ("COS598D_CACHE", "COS598D_DATA"):
        monkeypatch.delenv(name, raising=False)
    if cache:
        monkeypatch.setenv("COS598D_CACHE", str(cache))
    process = subprocess.run(words, cwd=tree, capture_output=True, text=True, timeout=SECONDS)
    assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-4000:]
    return process.stdout


def marked(command: str) -> object:
    """Two run in make bank; those that need nodes or packages are skipped without them."""
    marks = [pytest.mark.proof if re.search("parts tiny", command) else pytest.mark.slow]
    if any(word in command for word in ("checks.network", "--nodes", "cluster.demo.pictures")):
        marks.append(pytest.mark.skipif(bool(NO_NODES), reason=str(NO_NODES)))
    if re.search(r"benchmark\.(?!checks|tables)", command):
        without = importlib.util.find_spec("tensorboard") is None
        marks.append(pytest.mark.skipif(without, reason="needs the benchmark's packages: python install.py benchmark"))
    return pytest.param(command, marks=marks)


@pytest.mark.parametrize("command", [marked(command) for command in SMALL.values()])
def test_a_command_that_produced_a_figure_runs_to_its_last_line(tree, command, monkeypatch):
    output = run([sys.executable, *command.split()], tree, monkeypatch)

    assert command.startswith(NO_JSON) or json.loads(output.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("command", AS_WRITTEN)
def test_a_command_of_a_readme_runs_as_it_is_written(tree, tmp_path, command, monkeypatch):
    programs = {"python": [sys.executable], "torchrun": [sys.executable, "-m", "torch.distributed.run"]}
    words = [part for word in shlex.split(command) for part in programs.get(word, [word])]

    run(words, tree, monkeypatch, cache=tmp_path)
