"""submit.py carry: a student's lines go from the home file into later scripts, and nothing written there is lost."""

import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from staff.grade.submissions import write_files
from staff.tests.handouts import open_handout, solved_handout

HOME, LATER, HELLO = "task1_single/run_glue.py", "task2a_gather_scatter/run_glue.py", "cluster/hello.py"
OPEN = 'raise NotImplementedError("TODO 1.2:'
AGAIN = ["# TODO(cos598d) 1.2: again", "pass", "# END TODO 1.2", "# TODO(cos598d) 1.3"]


@pytest.fixture
def tree(tmp_path) -> Path:
    """A handout in which task 1 is solved."""
    code = {name: text for name, text in open_handout().files.items() if not name.startswith(("tests/", "docs/"))}
    write_files(code | {HOME: solved_handout()[HOME]}, tmp_path)
    return tmp_path


def carry(tree: Path, *words: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "submit.py", "carry", *words], cwd=tree, capture_output=True, text=True)


def edit(tree: Path, name: str, old: str, new: str) -> None:
    path = tree / name
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new, 1))


def read(tree: Path, name: str = LATER) -> str:
    return (tree / name).read_bytes().decode()


def test_lines_are_carried_once_into_the_named_tasks_with_their_line_ends_and_mode(tree):
    later = tree / LATER
    later.write_text(later.read_text(), newline="\r\n")
    later.chmod(0o755)
    others = read(tree, "task3_ddp/run_glue.py")

    first, second = (carry(tree, "--into", "2a").stdout.splitlines() for _ in range(2))

    assert f"1.2 -> {LATER}: carried 1 line from {HOME}" in first and f"1.2 -> {LATER}: already there" in second
    assert "  loss.backward()\r\n" in read(tree) and "TODO 1." not in read(tree).replace("# END TODO", "")
    assert stat.S_IMODE(later.stat().st_mode) == 0o755 and read(tree).count("\n") == read(tree).count("\r\n")
    assert read(tree, "task3_ddp/run_glue.py") == others
    assert [path.name for path in later.parent.glob("run*")] == ["run_glue.py"]  # placeholders need no copy


@pytest.mark.parametrize(
    "name, old, new, message",
    [
        (LATER, OPEN, f"mine = 1  # {OPEN}", "kept what you wrote at line .*; use --force"),
        (HOME, "loss.backward()", "loss = = 1", "the lines in .* are not valid Python yet"),
        (HOME, "loss.backward()", "loss(", "cannot be read"),
        (HOME, "loss.backward()", f'{OPEN}")', "nothing to carry: 1.2"),
        (HOME, "# END TODO 1.2", "# gone", "TODO 1.2 has no line"),
        (LATER, "# END TODO 1.2", "# gone", "not touched: .* TODO 1.2 has no line"),
        (LATER, "# TODO(cos598d) 1.3", f"\n{' ' * 16}".join(AGAIN), "the number of parts differs: 1 in .*, 2 here"),
    ],
)
def test_lines_that_cannot_be_carried_are_named_and_the_later_file_keeps_its_own(tree, name, old, new, message):
    edit(tree, name, old, new)

    done = carry(tree, "--into", "task2a")

    assert re.search(message, done.stdout) and OPEN in read(tree), done.stderr


def test_force_replaces_own_lines_shows_the_difference_and_keeps_a_copy(tree):
    edit(tree, LATER, OPEN, f"mine = 1  # {OPEN}")
    edit(tree, HOME, "loss.backward()", 'text = """\nkept\n"""; loss.backward(json)')
    edit(tree, HOME, "import sys", "import json\nimport sys")
    (tree / f"{LATER}.orig").write_text("an older copy")
    before = read(tree)

    output = carry(tree, "--force").stdout

    assert 'text = """\nkept\n"""; loss' in read(tree) and "mine = 1" not in read(tree)  # a string keeps its lines
    assert "-mine = 1" in output and "they use json, which this file does not have" in output
    assert read(tree, f"{LATER}.orig2") == before and read(tree, f"{LATER}.orig") == "an older copy"


def test_the_small_programs_to_begin_with_get_the_lines_as_well_and_an_unknown_task_is_an_error(tree):
    write_files({LATER: solved_handout()[LATER]}, tree)

    assert f"2a.1 -> {HELLO}: carried" in carry(tree).stdout and "dist.init_process_group(" in read(tree, HELLO)
    assert carry(tree, "--into", "task9").stderr.startswith("error: expected a task, one of task1, task2a")
