"""Every command that has produced a figure of the documentation still runs, in a small setting, to its last line."""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.emulate import why_not
from common.paths import ROOT

SECONDS = 900  # on a busy machine
DOCUMENTS = [ROOT / "docs" / "measurements.md", *ROOT.glob("README.md"), *ROOT.glob("[a-z]*/README.md")]
NO_NODES = why_not() if sys.platform == "linux" else "network namespaces are Linux's"

# A documented command, as a pattern -> the same in a small setting.
SMALL = {
    r"task1_single/run_glue\.py": "task1_single/run_glue.py --max_steps 2",
    r"benchmark\.checks\.timings --only loop": "-m benchmark.checks.timings --quick --only loop",
    r"benchmark\.checks\.timings(?! --only loop)": "-m benchmark.checks.timings --quick",
    r"benchmark\.checks\.network": "-m benchmark.checks.network --quick --parts tiny",
    r"benchmark\.checks\.claims": "-m benchmark.checks.claims --quick",
    r"benchmark\.checks\.activation_memory": "-m benchmark.checks.activation_memory --quick",
    r"make pictures|cluster\.pictures": "-m cluster.pictures --only pipeline --into runs/pictures",
    r"benchmark\.checks\.pipeline_speed": "-m benchmark.checks.pipeline_speed --quick --plot bubble.png",
    r"benchmark\.checks\.network --parts (tiny,large|rate|delay)": "-m benchmark.checks.network --quick",
    r"make demo$|cluster\.ladder --(workers|demo)": "-m cluster.ladder --workers 2 --batch 4 --iterations 2",
    r"cluster\.two_workers": "-m cluster.two_workers --steps 2",
    r"make demo-cluster|cluster\.ladder --nodes": "-m cluster.ladder --nodes 2 --random_bert 1M --iterations 2",
    r"benchmark\.run": "-m benchmark.run --workers 2 --max_steps 4 --dropped 1",
    r"benchmark\.compare": "-m benchmark.compare --workers 2 --max_steps 5 --only fsdp",
    r"benchmark\.prove": "-m benchmark.prove --strategy ddp",
    r"benchmark\.accounting": "-m benchmark.accounting --workers 2 --only ddp",
    r"benchmark\.accounting .*--emulated": "-m benchmark.accounting --workers 2 --only ddp --emulated",
    r"benchmark\.sweep": "-m benchmark.sweep --strategies single --batch_sizes 1 --workers 1 --steps 3",
    r"benchmark\.frameworks": "-m benchmark.frameworks --strategies single,ddp --workers 1,2 --steps 6",
    r"benchmark\.checks\.step_peaks": "-m benchmark.checks.step_peaks --quick",
    r"benchmark\.capacity": "-m benchmark.capacity --quick",
    r"benchmark\.tables": "-m benchmark.tables runs/benchmark/sweep",  # of the row above
}
IN_MAKE_BANK = [row for row in SMALL.values() if re.search("only loop|parts tiny", row)]
NO_JSON = (
    "task1_single",
    "-m cluster.ladder",
    "-m cluster.two_workers",
    "-m cluster.pictures",
)  # their last line is for people

# What another test runs in a small setting.
ELSEWHERE = {
    r"make (test|bank|check|verify|setup|handout|gradescope)\b|try_zip\.sh": "the tests themselves",
    r"staff\.mistakes": "test_every_mistake_is_caught_by_name_every_variant_passes_and_no_test_passes_all_mistakes",
    r"staff\.(proofs\.harmful_class|grade)": "test_hostile_names_and_answers_change_nothing_for_honest_hand_ins",
    r"staff\.attacks": "test_no_attack_gains_anything",
    r"benchmark\.(calibrate|checks\.prediction)": "tests/own/test_predict_runs.py runs both, with real workers",
    r"benchmark\.(predict|tables .*--predict|checks\.gpu)": "tests/own/test_predict_curves.py and test_predict.py",
}
# The commands of a README that produce a figure.
FIGURES = r"benchmark\.|cluster\.(ladder|two_workers)|make demo|make pictures"


def documented() -> list[str]:
    """The commands of docs/measurements.md, and those of the README files that produce a figure."""
    found = []
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8").replace("\\\n", " ")
        pieces = re.findall(r"`([^`\n]+)`", text) + re.findall(r"^(?:python|make) .*", text, re.MULTILINE)
        commands = [" ".join(re.sub(r"\s+#.*", "", piece).split()) for piece in pieces]
        wanted = "" if document.name == "measurements.md" else FIGURES
        found += [
            command for command in commands if re.match(r"(python|make) ", command) and re.search(wanted, command)
        ]
    return list(dict.fromkeys(found))


COMMANDS = documented()


@pytest.mark.parametrize("command", COMMANDS)
def test_a_documented_command_has_a_small_setting_or_a_test_elsewhere(command):
    assert any(re.search(pattern, command) for pattern in [*SMALL, *ELSEWHERE]), command


def test_every_row_is_needed():
    unused = [pattern for pattern in [*SMALL, *ELSEWHERE] if not any(re.search(pattern, text) for text in COMMANDS)]

    assert unused == []


def test_every_check_of_the_benchmark_is_run():
    checks = [path for path in (ROOT / "benchmark" / "checks").glob("*.py") if "__main__" in path.read_text()]
    files = [*ROOT.glob("staff/tests/test_*.py"), *ROOT.glob("tests/own/test_*.py")]
    tests = "".join(path.read_text(encoding="utf-8") for path in files)
    started = [path.stem for path in checks if re.search(rf'checks\.{path.stem}(", "| )--quick', tests)]

    started_by_others = {"ranks", "delayed_links"}  # by claims, network and others
    assert {path.stem for path in checks} - set(started) == started_by_others


def test_the_tests_elsewhere_exist():
    tests = "".join(path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("test_*.py"))

    assert [name for name in ELSEWHERE.values() if name.startswith("test_") and f"def {name}(" not in tests] == []


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of every tracked file, so that runs, figures and the cache are made there."""
    copy = tmp_path_factory.mktemp("measured") / "tree"
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    for name in tracked:
        if (ROOT / name).exists():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
    return copy


def marked(command: str) -> object:
    """The cheap ones run in make test; those that need nodes or packages are skipped without them."""
    marks = [pytest.mark.proof if command in IN_MAKE_BANK else pytest.mark.slow]
    if NO_NODES and any(word in command for word in ("checks.network", "--nodes", "--emulated", "cluster.pictures")):
        marks.append(pytest.mark.skip(reason=NO_NODES))
    if re.search(r"benchmark\.(?!checks\.(?!step_peaks)|tables)", command) and not importlib.util.find_spec(
        "tensorboard"
    ):
        marks.append(pytest.mark.skip(reason="needs the benchmark's packages: python install.py benchmark"))
    return pytest.param(command, marks=marks)


@pytest.mark.parametrize("command", [marked(command) for command in SMALL.values()])
def test_a_command_that_produced_a_figure_runs_to_its_last_line(tree, command, monkeypatch):
    for name in ("COS598D_CACHE", "COS598D_DATA"):
        monkeypatch.delenv(name, raising=False)

    done = subprocess.run([sys.executable, *command.split()], cwd=tree, capture_output=True, text=True, timeout=SECONDS)

    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    last = done.stdout.splitlines()[-1]
    assert command.startswith(NO_JSON) or json.loads(last)
