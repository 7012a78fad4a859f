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


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A handout with task 1 solved and task 2a as it was given."""
    write(tmp_path, HOME, solve(SCRIPT, "total = 0", "total += math.floor(value)"))
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

    assert read(tree) == solve(SCRIPT, "total = 0", "total += math.floor(value)")
    assert read(tree, "task3_ddp/run_glue.py") == SCRIPT
    assert lines == [
        f"1.2 -> {LATER}: carried 2 lines from {HOME}",
        f"1.3 -> {LATER}: nothing to carry yet, {HOME} line 13 is not solved",
    ]
    assert summary(lines) == [lines[0], "not written yet, so there is nothing to carry: 1.3"]
    assert next(carry(tree, COURSE, ["2a"], force=True)).endswith("already there")
    assert [path.name for path in (tree / LATER).parent.iterdir()] == ["run_glue.py"]  # and no copy of placeholders


def test_lines_written_in_the_later_file_are_kept(tree):
    own = solve(SCRIPT, "total = sum(values)")
    write(tree, LATER, own)

    lines = list(carry(tree, COURSE))

    assert read(tree) == own
    assert lines[0].startswith(f"1.2 -> {LATER}: kept what you wrote at line 8")


def test_force_replaces_them_shows_the_difference_and_keeps_a_copy(tree):
    own = solve(SCRIPT, "total = sum(values)")
    write(tree, LATER, own)
    write(tree, f"{LATER}.orig", "an older copy")

    output = "\n".join(carry(tree, COURSE, force=True))

    assert "total += math.floor(value)" in read(tree)
    assert "-total = sum(values)" in output
    assert "run_glue.py.orig2" in output
    assert read(tree, f"{LATER}.orig2") == own
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


def test_lines_that_are_no_python_yet_are_not_carried(tree):
    write(tree, HOME, solve(SCRIPT, "total = = 1"))

    lines = list(carry(tree, COURSE))

    assert read(tree) == SCRIPT
    assert "not valid Python yet" in lines[0]


def test_a_name_that_only_the_home_file_has_is_said(tree):
    home = solve(SCRIPT, "total = statistics.fmean(values)").replace("import math", "import math\nimport statistics")
    write(tree, HOME, home)

    lines = list(carry(tree, COURSE))

    assert "they use statistics, which this file does not have" in lines[0]


@pytest.mark.parametrize("broken", [HOME, LATER])
def test_a_file_without_its_end_todo_line_is_named_and_left_alone(tree, broken):
    write(tree, broken, read(tree, broken).replace("        # END TODO 1.2\n", ""))
    before = read(tree)

    output = "\n".join(carry(tree, COURSE, ["task2a"]))

    assert read(tree) == before
    assert f"{broken}:8: TODO 1.2 has no line '# END TODO 1.2' below" in output


def test_another_number_of_parts_is_not_guessed_at(tree):
    write(tree, LATER, SCRIPT + "\n\n" + SCRIPT.partition("\n\n\n")[2].replace("1.3", "1.4"))

    lines = list(carry(tree, COURSE))

    assert "math.floor" not in read(tree)
    assert lines[0] == f"1.2 part 1 -> {LATER}: not carried, {HOME} has 1 part of this TODO, this file has 2"


def test_line_ends_and_mode_of_the_later_file_stay(tree):
    write(tree, LATER, SCRIPT.replace("\n", "\r\n"))
    (tree / LATER).chmod(0o755)

    list(carry(tree, COURSE))

    assert read(tree) == solve(SCRIPT, "total = 0", "total += math.floor(value)").replace("\n", "\r\n")
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
