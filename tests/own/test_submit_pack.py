"""submit.py pack: what goes into the archive and under which name, what stays out, and that nothing is replaced."""

import json
import stat
import zipfile
from hashlib import sha256
from pathlib import Path

import pytest

from tests.own.student_tree import COURSE, make_tree, submit

pytestmark = pytest.mark.medium
ADA = ("--netid", "ab1234", "--name", "Zo\u00eb  O'Last")
ARCHIVE = "dist/ab1234_Zo\u00eb_OLast.zip"
GRADERS = """import pytest

@pytest.mark.task1
@pytest.mark.graded('1.1')
def test_a(): pass

@pytest.mark.task1
@pytest.mark.graded('1.2')
def test_b(): assert False
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    """A student's folder, with files that do not belong into a hand-in."""
    tree = make_tree(tmp_path_factory.mktemp("student"), solved=True)
    for name, text in {
        "task1_single/weights.pth": "x",
        "task1_single/notes.md": "mine",
        "task2b_allreduce/train.tsv": "x",
        "pipeline/.secret.py": "x",
        "task3_ddp/big.txt": "x" * 1_000_001,
        "task3_ddp/given.png": "of the handout",
        "runs/task1_single/secret.py": "x",
        "task1_single/__pycache__/run_glue.py": "x",
    }.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(text)
    (tree / "task1_single/link.py").symlink_to(tree / "submit.py")
    (tree / "pipeline/pipe.py").unlink()
    digests = {"task3_ddp/given.png": sha256(b"of the handout").hexdigest()}
    (tree / ".handout.json").write_text(json.dumps({"format": 1, "files": digests, "code": {}}))
    return tree


def test_an_archive_holds_code_report_and_figures_and_names_what_is_missing_or_left_out(tree):
    done = submit(tree, "pack", *ADA, "--no-grading")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()

    with zipfile.ZipFile(tree / ARCHIVE) as archive:
        files = {info.filename: archive.read(info) for info in archive.infolist()}
        assert {info.external_attr >> 16 for info in archive.infolist()} == {stat.S_IFREG | 0o644}
    expected = {"report.md", "ab1234_Zo\u00eb_OLast.pdf", "common/schedule.py", "task1/notes.md", "task2b/run_gpt2.py"}
    assert expected < files.keys() and files["task4/expected.py"] == (tree / "task4_traffic/expected.py").read_bytes()
    assert not [
        name for name in files if name.endswith((".pth", ".tsv", ".secret.py", "big.txt", "link.py", "t/secret.py"))
    ]
    left_out = {line.removeprefix("left out: ").partition(" (")[0] for line in lines if line.startswith("left out")}
    given = {name for name in left_out if name.endswith(".png")}
    assert left_out - given == {
        "pipeline/.secret.py", "task1_single/link.py", "task1_single/weights.pth", "task2b_allreduce/train.tsv",
        "task3_ddp/big.txt",
    } and "task3_ddp/given.png" not in given  # fmt: skip
    assert "missing: pipeline/pipe.py is not in the archive, so its points will be lost" in lines
    assert "missing: task 1 over 3 epochs" in lines


def test_packed_again_the_archive_is_the_same_byte_for_byte_and_none_is_replaced(tree):
    words = ("pack", *ADA, "--no-grading", "--out", "again.zip")
    archives = []
    for mode in (0o755, 0o600):
        for path in tree.rglob("*.py"):
            path.chmod(mode)
        submit(tree, *words)
        archives.append((tree / "again.zip").read_bytes())
        (tree / "again.zip").rename(tree / "first.zip")
    (tree / "first.zip").rename(tree / "again.zip")
    refused = submit(tree, *words)

    assert archives[0] == archives[1] == (tree / "again.zip").read_bytes()
    assert refused.returncode == 2 and "exists already and is not replaced" in refused.stderr


def test_the_graders_points_are_shown_and_packed_without_messages_that_differ_from_run_to_run(tmp_path):
    tree = make_tree(tmp_path)
    (tree / "conftest.py").write_text("pytest_plugins = ['grader.plugin']\n")
    grader = tree / COURSE.tasks["1"].tests[0]
    grader.parent.mkdir(parents=True)
    grader.write_text(GRADERS)

    done = submit(tree, "pack", *ADA)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    grader.write_text("import nowhere_to_be_found")
    broken = submit(tree, "pack", *ADA, "--out", "broken.zip")

    assert next(line for line in lines if line.startswith("task1")).split()[1:4] == ["3", "of", "13"]
    assert any("1.2 crashed; 1.3 has no grader here" in line for line in lines)
    assert [line.split() for line in lines if line.startswith("total")] == [["total", "3", "of", "100"]]
    points = json.loads(zipfile.ZipFile(tree / ARCHIVE).read("points.json"))
    assert (points["score"], [set(test) & {"message", "points"} for test in points["tests"]]) == (3, [{"points"}] * 2)
    assert broken.returncode == 2 and "nowhere_to_be_found" in broken.stderr and "--no-grading" in broken.stderr


@pytest.mark.parametrize(
    "words, message",
    [
        (["pack", "--netid", "ab1"], "--name"),
        (["pack", "--netid", "a/b", "--name", "A B"], "error: --netid: expected letters and digits"),
        (["pack", "--netid", "ab1", "--name", "Ada"], "error: --name: expected first and last name"),
        (["report", "--netid", "ab1"], "error: give both --netid and --name"),
        (["report", "--runs", "nowhere"], "error: --runs: there is no folder nowhere"),
    ],
)
def test_a_wrong_command_line_is_said_in_one_line(tree, words, message):
    done = submit(tree, *words)

    assert done.returncode == 2 and message in done.stderr
