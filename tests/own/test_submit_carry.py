"""submit.py carry: a student's lines go from the home file into later scripts, and nothing written there is lost."""

import stat
from pathlib import Path

import pytest

from common.errors import InputError
from course.table import load_course
from handin.carry import carry, summary

COURSE = load_course()
HOME, LATER = "task1_single/run_glue.py", "task2a_gather_scatter/run_glue.py"
SCRIPT = '''"""A script of the handout."""

import math


def step(values):
    for value in values:
        # TODO(cos598d) 1.2: add it up (1 line)
        raise NotImplementedError("TODO 1.2: add it up; see task1_single/README.md")
        # END TODO 1.2
    if values:
            # TODO(cos598d) 1.3: and give it back (1 line)
            raise NotImplementedError("TODO 1.3: and give it back; see task1_single/README.md")
            # END TODO 1.3
'''
PLACEHOLDER = 'raise NotImplementedError("TODO 1.2: add it up; see task1_single/README.md")'


def solve(text, *lines, placeholder=PLACEHOLDER, indent=8):
    return text.replace(placeholder, f"\n{' ' * indent}".join(lines))


SOLVED = solve(SCRIPT, "total = 0", "total += math.floor(value)")
OWN = solve(SCRIPT, "total = sum(values)")
TWICE = SCRIPT + "\n\n" + SCRIPT.partition("\n\n\n")[2].replace("1.3", "1.4")


def without_end(text):
    return text.replace("        # END TODO 1.2\n", "")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A handout with task 1 solved and task 2a as it was given."""
    write(tmp_path, HOME, SOLVED)
    write(tmp_path, LATER, SCRIPT)
    return tmp_path


def write(tree, name, text):
    path = tree / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, newline="")


def read(tree, name=LATER):
    return (tree / name).read_bytes().decode()


def test_solved_lines_are_carried_once_into_the_named_task_and_the_rest_of_the_file_stays(tree):
    write(tree, "task3_ddp/run_glue.py", SCRIPT)
    lines = list(carry(tree, COURSE, ["2a"]))

    assert read(tree) == SOLVED
    assert read(tree, "task3_ddp/run_glue.py") == SCRIPT
    assert lines == [
        f"1.2 -> {LATER}: carried 2 lines from {HOME}",
        f"1.3 -> {LATER}: nothing to carry yet, {HOME} line 13 is not solved",
    ]
    assert summary(lines) == [lines[0], "not written yet, so there is nothing to carry: 1.3"]
    assert next(carry(tree, COURSE, ["2a"], force=True)).endswith("already there")
    assert [path.name for path in (tree / LATER).parent.iterdir()] == ["run_glue.py"]  # and no copy of placeholders


@pytest.mark.parametrize(
    "home, later, message",
    [
        (SOLVED, OWN, f"1.2 -> {LATER}: kept what you wrote at line 8"),
        (solve(SCRIPT, "total = = 1"), SCRIPT, "are not valid Python yet"),
        (SOLVED, TWICE, f"1.2 part 1 -> {LATER}: not carried, {HOME} has 1 part of this TODO, this file has 2"),
        (SOLVED, without_end(SCRIPT), f"{LATER}:8: TODO 1.2 has no line '# END TODO 1.2' below"),
        (without_end(SOLVED), SCRIPT, f"{HOME}:8: TODO 1.2 has no line '# END TODO 1.2' below"),
    ],
)
def test_a_later_file_stays_as_it_is_where_lines_cannot_be_carried(tree, home, later, message):
    write(tree, HOME, home)
    write(tree, LATER, later)

    lines = list(carry(tree, COURSE, ["task2a"]))

    assert read(tree) == later
    assert message in lines[0]


def test_force_replaces_them_shows_the_difference_and_keeps_a_copy(tree):
    write(tree, LATER, OWN)
    write(tree, f"{LATER}.orig", "an older copy")

    output = "\n".join(carry(tree, COURSE, force=True))

    assert "total += math.floor(value)" in read(tree)
    assert "-total = sum(values)" in output
    assert "run_glue.py.orig2" in output
    assert read(tree, f"{LATER}.orig2") == OWN
    assert read(tree, f"{LATER}.orig") == "an older copy"


def test_lines_get_the_indent_of_the_place_they_go_to_but_not_inside_strings(tree):
    deep = SCRIPT.replace("and give it back", "x").replace("1.3: x; see", "1.3: x; see")
    solved = solve(SCRIPT, 'text = """', "kept", '"""', indent=0)
    write(tree, HOME, solved.replace("        kept", "kept"))
    write(tree, LATER, deep.replace("        # TODO(cos598d) 1.2", "        if value:\n            # TODO(cos598d) 1.2")
          .replace(f"        {PLACEHOLDER}", f"            {PLACEHOLDER}")
          .replace("        # END TODO 1.2", "            # END TODO 1.2"))  # fmt: skip

    list(carry(tree, COURSE))

    assert '            text = """\nkept\n"""\n' in read(tree)


def test_a_name_that_only_the_home_file_has_is_said(tree):
    home = solve(SCRIPT, "total = statistics.fmean(values)").replace("import math", "import math\nimport statistics")
    write(tree, HOME, home)

    lines = list(carry(tree, COURSE))

    assert "they use statistics, which this file does not have" in lines[0]


def test_line_ends_and_mode_of_the_later_file_stay(tree):
    write(tree, LATER, SCRIPT.replace("\n", "\r\n"))
    (tree / LATER).chmod(0o755)

    list(carry(tree, COURSE))

    assert read(tree) == SOLVED.replace("\n", "\r\n")
    assert stat.S_IMODE((tree / LATER).stat().st_mode) == 0o755


def test_a_task_that_does_not_exist_is_an_error_in_one_line(tree):
    with pytest.raises(InputError, match="expected a task, one of task1, task2a"):
        list(carry(tree, COURSE, ["task9"]))


def test_the_small_programs_to_begin_with_get_the_lines_as_well(tree):
    write(tree, LATER, "def join():\n    # TODO(cos598d) 2a.1: join (1 line)\n    return 1\n    # END TODO 2a.1\n")
    opened = 'raise NotImplementedError("TODO 2a.1: join; see x")'
    write(tree, "cluster/hello.py", read(tree).replace("return 1", opened))

    lines = list(carry(tree, COURSE))

    assert f"2a.1 -> cluster/hello.py: carried 1 line from {LATER}" in lines
    assert "return 1" in read(tree, "cluster/hello.py")
