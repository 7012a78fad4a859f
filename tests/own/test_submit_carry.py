"""submit.py carry: a student's lines go from the home file into later scripts, and nothing written there is lost."""

import re
import stat

import pytest

from tests.own.student_tree import make_tree, submit

HOME, LATER = "task1_single/run_glue.py", "task2a_gather_scatter/run_glue.py"
OPEN = 'raise NotImplementedError("TODO 1.2: not yet")'
AGAIN = ["# TODO(cos598d) 1.2: again", "pass", "# END TODO 1.2", "# TODO(cos598d) 1.3"]


@pytest.fixture
def tree(tmp_path):
    """Every region is solved in its home file, and in no other."""
    return make_tree(tmp_path)


def edit(tree, name, old, new):
    path = tree / name
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def read(tree, name=LATER):
    return (tree / name).read_bytes().decode()


def test_lines_are_carried_once_into_the_named_tasks_with_their_line_ends_and_mode(tree, tmp_path_factory):
    solved = make_tree(tmp_path_factory.mktemp("solved"), solved=True)
    later = tree / LATER
    later.write_text(later.read_text(), newline="\r\n")
    later.chmod(0o755)
    others = read(tree, "task3_ddp/run_glue.py")

    first, second = (submit(tree, "carry", "--into", "2a").stdout.splitlines() for _ in range(2))

    assert f"1.2 -> {LATER}: carried 1 line from {HOME}" in first and f"1.2 -> {LATER}: already there" in second
    assert read(tree) == read(solved).replace("\n", "\r\n") and stat.S_IMODE(later.stat().st_mode) == 0o755
    assert read(tree, "task3_ddp/run_glue.py") == others
    assert [path.name for path in later.parent.glob("run*")] == ["run_glue.py"]  # placeholders need no copy


def test_without_a_name_every_later_script_gets_them_and_so_does_hello(tree, tmp_path_factory):
    solved = make_tree(tmp_path_factory.mktemp("solved"), solved=True)

    submit(tree, "carry")

    scripts = [*tree.glob("task*/*.py"), *tree.glob("pipeline/*.py"), tree / "cluster/hello.py"]
    names = [path.relative_to(tree).as_posix() for path in scripts]
    assert [name for name in names if read(tree, name) != read(solved, name)] == []


@pytest.mark.parametrize(
    "name, old, new, message",
    [
        (LATER, OPEN, "mine = 1", "kept what you wrote at line .*; use --force"),
        (HOME, "loss.backward()", "loss = = 1", "the lines in .* are not valid Python yet"),
        (HOME, "loss.backward()", "loss(", "cannot be read"),
        (HOME, "loss.backward()", OPEN, "not written yet, so there is nothing to carry: 1.2"),
        (HOME, "# END TODO 1.2", "# gone", "TODO 1.2 has no line"),
        (LATER, "# END TODO 1.2", "# gone", "not touched: .* TODO 1.2 has no line"),
        (
            LATER,
            "# TODO(cos598d) 1.3",
            f"\n{' ' * 16}".join(AGAIN),
            "the number of parts differs: 1 in .*, 2 here",
        ),
    ],
)
def test_lines_that_cannot_be_carried_are_named_and_the_later_file_keeps_its_own(tree, name, old, new, message):
    edit(tree, name, old, new)

    output = submit(tree, "carry", "--into", "task2a").stdout

    assert re.search(message, output) and (new if name == LATER else OPEN) in read(tree)


def test_force_replaces_own_lines_shows_the_difference_and_keeps_a_copy(tree):
    edit(tree, LATER, OPEN, "mine = 1")
    edit(tree, HOME, "loss.backward()", 'text = """\nkept\n"""; loss.backward(json)')
    edit(tree, HOME, "import sys", "import json\nimport sys")
    before = read(tree)
    (tree / f"{LATER}.orig").write_text("an older copy")

    output = submit(tree, "carry", "--force").stdout

    assert 'text = """\nkept\n"""; loss' in read(tree) and "mine = 1" not in read(tree)  # a string keeps its lines
    assert "-mine = 1" in output and "they use json, which this file does not have" in output
    assert read(tree, f"{LATER}.orig2") == before and read(tree, f"{LATER}.orig") == "an older copy"


def test_a_task_that_does_not_exist_is_an_error_in_one_line(tree):
    done = submit(tree, "carry", "--into", "task9")

    assert done.returncode == 2 and done.stderr.startswith("error: expected a task, one of task1, task2a")
