"""`python submit.py update`: a student's work in a corrected handout, and a hand-in of an older one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from staff.grade.own_texts import older_handout
from staff.handout.assemble import assemble, write
from staff.tests.handouts import copied, open_handout

pytestmark = pytest.mark.medium

TASK, OTHER = "task1_single/run_glue.py", "task2b_allreduce/run_glue.py"
OPEN = 'raise NotImplementedError("TODO 1.2'
FIXED = "# a corrected line\nCORRECTED = 1\n"


def submit(tree: Path, *words: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "submit.py", *words], cwd=tree, capture_output=True, text=True)


def solve(tree: Path, file: str, body: str, extra: str = "") -> None:
    lines = (tree / file).read_text(encoding="utf-8").split("\n")
    (tree / file).write_text(
        "\n".join(line.partition(OPEN)[0] + body if OPEN in line else line for line in lines) + extra
    )


@pytest.fixture
def corrected(tmp_path) -> Path:
    """The zip of a handout in which a lesson's file, a page and a new file differ."""
    source = copied(tmp_path / "source")
    with (source / TASK).open("a") as file:
        file.write(FIXED)
    with (source / "README.md").open("r+") as file:
        text = file.read()
        file.seek(0)
        file.write(text.replace("You train", "Corrected: you train", 1))
    (source / "common/more.py").write_text("MORE = 1\n")
    return write(assemble(source), tmp_path / "new/handout")


def test_a_student_s_lines_are_in_the_corrected_files_and_what_was_there_is_kept(tmp_path, corrected):
    tree = tmp_path / "handout"
    write(open_handout(), tree)
    solve(tree, TASK, "loss.backward()  # mine", "import os\n")
    solve(tree, OTHER, "loss.backward()  # too", "HELPER = 1\n")
    (tree / "runs/mine").mkdir(parents=True)
    (tree / "task1_single/helper.py").write_text("mine = 1\n")
    before = {name: (tree / name).read_bytes() for name in (TASK, OTHER, "README.md")}

    done = submit(tree, "update", str(corrected))

    assert done.returncode == 0, done.stderr
    text = (tree / TASK).read_text()
    assert "loss.backward()  # mine" in text and text.endswith(FIXED) and "import os\n# a" not in text
    assert (tree / OTHER).read_bytes() == before[OTHER], "the handout's file is the same"
    assert "Corrected" in (tree / "README.md").read_text() and (tree / "common/more.py").exists()
    assert (tree / "runs/mine").is_dir() and (tree / "task1_single/helper.py").exists()
    (kept,) = (path for path in tmp_path.glob("handout-*"))
    assert (kept / TASK).read_bytes() == before[TASK] and not (kept / "runs").exists()
    said = done.stdout
    assert str(kept) in said and "you also changed lines outside" in said
    assert "your lines of 1.2 are in it" in said and "common/more.py: new" in said

    again = submit(tree, "update", str(corrected))
    assert again.returncode == 0 and again.stdout.count("\n") == 1, "there is nothing to do"


@pytest.mark.parametrize("break_it, words", [
    (lambda tree, zip: zip.write_bytes(b"PK"), "expected the zip of a handout"),
    (lambda tree, zip: (tree / ".handout.json").unlink(), "unpack the new handout instead"),
    (lambda tree, zip: (tree / TASK).write_text("def ("), "expected Python"),
])  # fmt: skip
def test_what_cannot_be_updated_stays_as_it_is(tmp_path, corrected, break_it, words):
    tree = tmp_path / "handout"
    write(open_handout(), tree)
    break_it(tree, corrected)
    before = {path: path.read_bytes() for path in tree.rglob("*") if path.is_file() and "__pycache__" not in path.parts}

    done = submit(tree, "update", str(corrected))

    assert (done.returncode, words in done.stderr) == (2, True), done.stderr
    assert {path: path.read_bytes() for path in before} == before and not list(tmp_path.glob("handout-*"))


def test_a_hand_in_of_another_handout_says_so_and_one_of_this_does_not(tmp_path):
    (tmp_path / "group").mkdir()
    (tmp_path / "group/handout.json").write_text(json.dumps({"version": "0123abcd"}))

    assert older_handout(tmp_path, "0123abcd") == []
    assert "made with handout 0123abcd" in older_handout(tmp_path, "89abcdef")[0]
