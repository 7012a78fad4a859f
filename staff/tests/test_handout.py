"""The handout builder: what it writes, what it refuses to give out, and what it never deletes. Then our own tree."""

import json
import os
import shutil
import stat
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from common.errors import InputError
from common.paths import ROOT
from course.manifest import code_digest
from course.table import load_course
from staff.handout.assemble import MANIFEST, assemble, write
from staff.tests.handouts import open_handout

pytestmark = pytest.mark.medium

START = """tasks = ["1"]
total = 10
may_change = ["task1_single/*", "common/lesson.py"]
[imports]
[task.1]
"""
COURSE = f"""{START}title = "One"
folder = "task1_single"
submitted_as = "task1"
readme = "task1_single/README.md"
tests = ["tests/test_task1.py"]
marker = "task1"
[regions."1.1"]
title = "first"
file = "task1_single/run.py"
points = 4
hints = ["a", "b", "c"]
[regions."1.2"]
title = "second"
file = "common/lesson.py"
points = 6
needs = ["1.1"]
hints = ["a", "b", "c"]
# === staff only: below ===
[handout]
ships = ["README.md", "course.toml", "common/*.py", "task*/**/*"]
common_lines = ["model.train()"]
taught_names = ["set_epoch"]
[hidden]
visibility = "hidden"
"""
RUN = '''#!/usr/bin/env python
"""A script."""


def train(model, loss):
    # TODO(cos598d) 1.1: go back (3 lines)
    # BEGIN SOLUTION 1.1
    model.train()
    loss.backward()
    sampler.set_epoch(1)
    # END SOLUTION 1.1
    return model
'''
LESSON = '''"""A lesson."""


def mean(values, number_of_workers):
    # TODO(cos598d) 1.2: average (2 lines)
    # BEGIN SOLUTION 1.2
    running_total = sum(values)
    return running_total / number_of_workers
    # END SOLUTION 1.2
'''
GRADED = """import pytest


@pytest.mark.graded("1.1")
def test_it_goes_back(grade): ...


@pytest.mark.graded("1.2")
def test_it_averages(grade): ...
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A small solved course with everything a handout needs, and things that must not ship."""
    files = {
        "course.toml": COURSE,
        "README.md": "# The course\n\n<!-- === staff only === -->\nSecrets\n",
        "task1_single/README.md": "# Task 1\n## 1.1 and 1.2\n1. Read.\n2. Think.\n",
        "task1_single/run.py": RUN,
        "common/lesson.py": LESSON,
        "task1_single/__pycache__/run.py": "stale",
        "tests/test_task1.py": GRADED,
        "staff/secret.py": "answers = 1\n",
        "benchmark/run.py": "x = 1\n",
    }
    for name, text in files.items():
        path = tmp_path / "tree" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "tree"


def edit(tree: Path, name: str, old: str, new: str) -> None:
    text = (tree / name).read_text()
    assert old in text
    (tree / name).write_text(text.replace(old, new))


def test_the_handout_holds_what_is_listed_without_the_solutions_and_the_staff_s_table(tree, tmp_path):
    handout = assemble(tree)
    write(handout, tmp_path / "out")

    built = {path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert built == {
        MANIFEST, "README.md", "course.toml", "common/lesson.py", "task1_single/README.md", "task1_single/run.py",
        "tests/test_task1.py",
    }  # fmt: skip
    assert not handout.problems
    assert handout.files["common/lesson.py"].decode() == (
        '"""A lesson."""\n\n\ndef mean(values, number_of_workers):\n'
        "    # TODO(cos598d) 1.2: average (2 lines)\n"
        '    raise NotImplementedError("TODO 1.2: average; see task1_single/README.md")\n'
        "    # END TODO 1.2\n"
    )
    course = load_course(tmp_path / "out" / "course.toml")
    assert course.regions["1.2"].hints == ("a", "b", "c")
    assert not course.handout.ships and not course.hidden
    assert handout.files["README.md"] == b"# The course\n"


def test_a_solved_handout_has_every_solution_where_a_student_would_have_written_it(tree):
    solved, given = assemble(tree, solved=True), assemble(tree)

    assert solved.problems == [] and solved.files.keys() == given.files.keys()
    text = solved.files["common/lesson.py"].decode()
    assert "    # TODO(cos598d) 1.2: average (2 lines)\n    running_total = sum(values)\n" in text
    assert "# END TODO 1.2" in text and b"SOLUTION" not in solved.files["task1_single/run.py"]


def test_building_again_gives_the_same_bytes_times_and_modes_and_the_zip_begins_with_the_readme(tree, tmp_path):
    def state(name: str) -> list:
        archive = write(assemble(tree), tmp_path / name / "handout")
        for path in tree.rglob("*"):
            os.utime(path, (1, 1))
            path.chmod(0o700)
        with zipfile.ZipFile(archive) as opened:
            assert opened.namelist()[0] == "handout/README.md"
            for info in opened.infolist():
                path = tmp_path / name / info.filename
                assert opened.read(info) == path.read_bytes()
                assert stat.S_IMODE(info.external_attr >> 16) == stat.S_IMODE(path.stat().st_mode)
        paths = sorted((tmp_path / name / "handout").rglob("*"))
        folder = [(path.stat().st_mode, path.stat().st_mtime, path.is_file() and path.read_bytes()) for path in paths]
        return [*folder, archive.read_bytes()]

    assert state("first") == state("second")
    assert os.access(tmp_path / "first/handout/task1_single/run.py", os.X_OK)


INSIDE = "(\n    # TODO(cos598d) 1.1: x\n    # BEGIN SOLUTION 1.1\n    loss\n    # END SOLUTION 1.1\n    )\n"
LEAKS = [
    ("task1_single/README.md", "Think.", "Write `loss.backward()`.", "README.md:4: a line of the solution of 1.1"),
    ("common/lesson.py", "def mean", "# loss . backward( )\ndef mean", "lesson.py:4: a line of the solution of 1.1"),
    ("task1_single/run.py", "return model", "return model  # running_total", "run.py:9: the name running_total"),
    ("course.toml", '["a", "b", "c"]', '["a", "b", "use running_total"]', "the name running_total"),
    ("README.md", "course", "course\n# begin  solution", "README.md:2: a solution marker remains"),
    ("task1_single/README.md", "## 1.1 and", "1.1\n##", "a section whose heading names 1.1"),
    ("task1_single/README.md", "and 1.2", "and 1.25", "a section whose heading names 1.2"),
    ("task1_single/run.py", "def train(model, loss):", "def train(model, loss:", "task1_single/run.py:"),
    ("common/lesson.py", "1.2", "1.1", "common/lesson.py: course.toml places region 1.2 here"),
    ("course.toml", '"common/*.py"', '"common/*.py", "staff/*.py"', "staff/secret.py: must not ship (it matches staff"),
    ("course.toml", '"common/*.py"', '"common/*.py", "benchmark/*.py"', "benchmark/run.py: must not ship"),
    ("course.toml", "total = 10", "# === staff only\ntotal = 10", "lacks the hints of region 1.1"),
    ("course.toml", "# === staff only", "# == staff only", "course.toml: the staff's part is not cut off: [handout]"),
    ("task1_single/run.py", "return model", "return (  # TODO(cos598d) 1.2\n    model)", "run.py:12: "),
    ("task1_single/run.py", "return model\n", f"return {INSIDE}", "run.py: does not compile"),
]


@pytest.mark.parametrize(("name", "old", "new", "message"), LEAKS)
def test_a_leak_is_named_with_its_file(tree, name, old, new, message):
    edit(tree, name, old, new)

    try:
        problems = assemble(tree).problems
    except InputError as error:
        problems = [str(error)]
    assert any(message in problem for problem in problems), problems


def test_the_same_id_in_a_later_script_is_stripped_and_guarded_too(tree):
    later = RUN.replace("sampler.set_epoch(1)", "later_only.step_forward()")
    (tree / "task1_single" / "later.py").write_text(later)
    edit(tree, "README.md", "course", "later_only.step_forward()")

    handout = assemble(tree)

    assert b"backward" not in handout.files["task1_single/later.py"]
    assert any("README.md:1: a line of the solution of 1.1" in problem for problem in handout.problems)


def test_a_handout_with_problems_is_not_written(tree, tmp_path):
    edit(tree, "task1_single/README.md", "Think.", "loss.backward()")

    with pytest.raises(InputError, match="1 problem"):
        write(assemble(tree), tmp_path / "out")

    assert sorted(path.name for path in tmp_path.iterdir()) == ["tree"]


def test_an_untouched_handout_is_replaced_even_after_it_was_run(tree, tmp_path):
    write(assemble(tree), tmp_path / "out")
    (tmp_path / "out/common/__pycache__").mkdir()
    (tmp_path / "out/common/__pycache__/lesson.pyc").write_bytes(b"cache")
    edit(tree, "README.md", "course", "new course")

    write(assemble(tree), tmp_path / "out")

    assert (tmp_path / "out/README.md").read_text() == "# The new course\n"
    assert not (tmp_path / "out/common/__pycache__").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "out.zip", "tree"]


@pytest.mark.parametrize(("change", "equal"), [
    (lambda text: b"# mine\r\n\r\n" + text.replace(b"\n", b"\r\n") + b"  # the model\r\n", True),
    (lambda text: text + b"import os\n", False),
    (lambda text: text.replace(b"loss", b"cost"), False),
])  # fmt: skip
def test_the_digest_of_a_file_is_that_of_its_code_whatever_its_comments_and_line_ends(tree, tmp_path, change, equal):
    write(assemble(tree), tmp_path / "out")
    content = (tmp_path / "out/task1_single/run.py").read_bytes()

    given = json.loads((tmp_path / "out" / MANIFEST).read_text())["code"]["task1_single/run.py"]
    assert (code_digest(change(content)) == given) is equal


TOUCHES: dict[str, Callable[[Path], object]] = {
    "add a note": lambda out: (out / "notes.txt").write_text("mine"),
    "edit a file": lambda out: (out / "README.md").write_text("mine"),
    "add a link": lambda out: (out / "link").symlink_to(out.parent),
    "remove the manifest": lambda out: (out / MANIFEST).unlink(),
    "break the manifest": lambda out: (out / MANIFEST).write_text("[]"),
    "put a link to nothing there": lambda out: (out.rename(out.with_name("moved")), out.symlink_to("nowhere")),
    "put another zip there": lambda out: out.with_name(f"{out.name}.zip").write_bytes(b"mine"),
}


@pytest.mark.parametrize("touch", TOUCHES.values(), ids=TOUCHES)
def test_what_the_builder_did_not_make_is_never_deleted(tree, tmp_path, touch):
    out = tmp_path / "out"
    write(assemble(tree), out)
    touch(out)
    before = {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")}

    with pytest.raises(InputError):
        write(assemble(tree), out)

    assert before == {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")}


def test_a_link_is_not_shipped(tree):
    (tree / "common" / "link.py").symlink_to(tree / "staff" / "secret.py")

    with pytest.raises(InputError, match=r"common/link\.py: expected a plain file"):
        assemble(tree)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("total = 10", "total = 1", "total = 1 leaves no point for region 1.1"),
        ('marker = "task1"', 'marker = "task1"\nbonus = true', "tasks names '1', but bonus = 0"),
        ("total = 10", "total = 10\nbonus = true", "bonus: expected int, got True"),
        ("points = 4", "points = true", "points: expected int, got True"),
        ("points = 4", "points = 0", "points: expected at least 1"),
        ('["a", "b", "c"]', '["a", "b"]', "expected 3 different hints, got 2"),
        ('needs = ["1.1"]', 'needs = ["1.3"]', "needs 1.3, which is not in the table"),
        ('needs = ["1.1"]', 'needs = ["1.2"]', "needs itself in a circle"),
        ('title = "first"', 'titel = "first"', "title: expected str"),
        ('title = "first"', 'title = "first"\nhint = "x"', "unknown key 'hint'"),
        ('"common/lesson.py"]', '"common/other.py"]', "which may_change does not list"),
        ('[regions."1.1"]', '[regions."9.1"]', "begins with a task"),
        ('ships = ["README.md"', 'ships = ["READM.md"', "matches no file"),
        ("total = 10", "total = ", "course's table as TOML"),
    ],
)
def test_a_mistake_in_the_table_gets_one_clear_line(tree, old, new, message):
    edit(tree, "course.toml", old, new)

    with pytest.raises(InputError, match=message):
        assemble(tree)


def test_what_a_region_builds_on_is_followed_all_the_way_and_a_student_may_change_task_folders_alone():
    course = load_course()

    assert set(course.all_needs("p.3")) == {"p.1", "p.2", "p.4"}
    assert {"1.2", "1.3", "2a.2"} <= set(course.all_needs("3.1"))
    assert course.may_student_change("task2b_allreduce/helpers/mine.py")
    assert not course.may_student_change("tests/task1/test_bert.py")
    assert not course.may_student_change("pipeline/../grader/run.py")


# --- our own tree ---


def test_our_handout_gives_nothing_away():
    assert open_handout().problems == []


def test_every_script_of_our_handout_answers_help(tmp_path):
    write(open_handout(), tmp_path / "handout")
    scripts = sorted((tmp_path / "handout").glob("task*/run_*.py")) + [tmp_path / "handout/pipeline/run_gpt2.py"]
    program = """
import runpy, sys
for script in sys.argv[1:]:  # in one process, which loads torch once
    sys.argv = [script, "--help"]
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        print(script, end.code)
"""
    command = [sys.executable, "-c", program, *map(str, scripts)]
    run = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)

    assert run.returncode == 0, run.stderr
    assert [line for line in run.stdout.splitlines() if line.startswith(str(tmp_path))] == [f"{s} 0" for s in scripts]


def test_the_command_prints_a_line_of_json_and_exits_with_2_on_a_problem(tree, tmp_path):
    for folder in ("staff", "common", "course", "grader"):
        shutil.copytree(ROOT / folder, tree / folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    edit(tree, "course.toml", '"common/*.py", "task*/**/*"', '"common/lesson.py", "task1_single/*"')
    run = [sys.executable, "-m", "staff.handout", "--out", str(tmp_path / "out")]

    complete = subprocess.run(run, cwd=tree, capture_output=True, text=True)
    (tree / "course.toml").unlink()
    without_table = subprocess.run(run, cwd=tree, capture_output=True, text=True)

    assert complete.returncode == 0, complete.stderr
    assert json.loads(complete.stdout.splitlines()[-1])["regions"] == 2
    assert "staff only" not in (tmp_path / "out/course.toml").read_text()
    assert (without_table.returncode, without_table.stderr.count("\n")) == (2, 1)
