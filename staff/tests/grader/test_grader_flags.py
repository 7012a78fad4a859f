"""The look at files: what reaches for the grader is marked with its line, and ordinary code is not."""

import subprocess

import pytest

from common.paths import ROOT
from course.table import load_course
from grader import imports
from grader.tampering import Flag, look_at

pytestmark = pytest.mark.medium

COURSE = load_course()


def flags(tmp_path, source):
    (tmp_path / "pipeline").mkdir(exist_ok=True)
    (tmp_path / "pipeline/pipe.py").write_text(source)
    return [(flag.line, flag.what) for flag in look_at(tmp_path, ["pipeline/pipe.py"])]


SUSPECT = {
    "loaded modules": "import sys\nsys.modules['x']",
    "ctypes": "import ctypes.util",
    "fork": "import os\nos.fork()",
    "the grader": "import grader.wire.connection",
    "DDP's reducer": "import torch.distributed as dist\ndist.Reducer",
    "globals": "f.__globals__['values']",
    "code": "exec('x = 1')",
    "a function of torch": "import torch\ntorch.equal = lambda *_: True",
    "memory": "open('/proc/self/mem')",
    "path": "open('/course/grader/reference.py')",
}
PLAIN = {
    "a model": "import torch\nmodel.eval()\nfor m in model.modules():\n    m.weight.data.zero_()",
    "settings": "import torch\ntorch.backends.cudnn.benchmark = True\ntorch.manual_seed(1)",
    "errors": "import sys\nkept = sys.exc_info()\nraise kept[1].with_traceback(kept[2])",
    "docstring": '"""Reads sys.modules and /proc/self/mem, or grader/wire/connection.py."""',
    "files": "import os\nos.environ['A'] = '1'\nos.makedirs('x')\nopen('x', 'w')",
    "no python": "def f(:",
}


@pytest.mark.parametrize("name", [*SUSPECT, *PLAIN])
def test_what_reaches_for_the_grader_is_flagged_with_its_line_and_ordinary_code_is_not(tmp_path, name):
    source = SUSPECT.get(name) or PLAIN[name]

    flagged_lines = flags(tmp_path, source)

    assert bool(flagged_lines) == (name in SUSPECT)
    assert all(0 < line <= source.count("\n") + 1 for line, _ in flagged_lines)


def test_a_word_that_stands_in_many_lines_is_one_flag_and_hides_no_other(tmp_path):
    assert flags(tmp_path, "import gc\n" * 60 + "import ctypes\n") == [
        (61, "names ctypes"), (1, "names gc, in 60 lines")
    ]  # fmt: skip


def test_compiled_code_is_flagged(tmp_path):
    assert [flag.what for flag in look_at(tmp_path, ["pipeline/pipe.so", "pipeline/__pycache__/pipe.pyc"])] == [
        "is compiled code"
    ]


def test_no_file_of_the_solved_course_is_flagged_but_for_files_that_survive_needs():
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()

    flags = look_at(ROOT, [file for file in tracked if COURSE.may_student_change(file)])
    assert {(flag.file.removeprefix("beyond/"), flag.word) for flag in flags} == {
        ("survive.py", "names signal"), ("run_survive.py", "names signal"), ("storage.py", "names fileno"),
    }  # fmt: skip


# --- imports ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("source", "words"), [
    ("import subprocess", "imports subprocess"),
    ("def f():\n    from os import path", "imports os"),
    ("__import__('os')", "calls __import__()"),
    ("import importlib", "imports importlib"),
    ("exec('import os')", "calls exec()"),
    ("eval('1')", "calls eval()"),
    ("from . import pipe", "imports ."),
])  # fmt: skip
def test_every_way_to_get_hold_of_a_module_is_seen(tmp_path, source, words):
    (tmp_path / "common").mkdir()
    (tmp_path / "common/schedule.py").write_text(source)

    complaint = imports.complaint(tmp_path, "common/schedule.py", COURSE)

    assert words in complaint and "allowed here: only" in complaint


def test_a_file_of_the_students_own_is_held_to_the_limits_of_who_imports_it(tmp_path):
    (tmp_path / "pipeline").mkdir()
    (tmp_path / "pipeline/pipe.py").write_text("from pipeline import helper\nmodel.eval()\n")
    (tmp_path / "pipeline/helper.py").write_text("import math\nimport subprocess\n")

    complaint = imports.complaint(tmp_path, "pipeline/pipe.py", COURSE)

    assert complaint.startswith("pipeline/helper.py:2 imports subprocess")
    assert complaint.endswith("(pipeline/pipe.py imports this file)")


def test_a_word_that_the_courses_own_file_has_is_no_flag_and_another_one_is(tmp_path):
    for folder, text in (("ours", "import signal\n"), ("theirs", "import signal\nimport ctypes\nsignal.alarm(1)\n")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "lesson.py").write_text(text)

    flags = look_at(tmp_path / "theirs", ["lesson.py"], tmp_path / "ours")

    assert flags == [Flag("lesson.py", 2, "names ctypes")]
