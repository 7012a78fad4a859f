"""The look at files: what reaches for the grader is marked with its line, and ordinary code is not."""

import subprocess

import pytest

from common.errors import InputError
from common.paths import ROOT
from course.table import load_course
from grader import imports
from grader.tampering import look_at
from staff.proofs.bank import apply, copy_tree, load_bank

pytestmark = pytest.mark.medium

COURSE = load_course()


def flags(tmp_path, source):
    (tmp_path / "pipeline").mkdir(exist_ok=True)
    (tmp_path / "pipeline/pipe.py").write_text(source)
    return [(flag.line, flag.what) for flag in look_at(tmp_path, ["pipeline/pipe.py"])]


SUSPECT = {
    "the names in a module": "import torch\nnames = vars(torch)\nnames['equal'] = print",
    "names of a module, changed at once": "import torch\nvars(torch)['equal'] = print",
    "the attributes of an object": "def f(layer):\n    vars(layer)['forward'] = print",
    "the dictionary of an object": "def f(layer):\n    layer.__dict__['forward'] = print",
    "the dictionary of an object, updated": "def f(layer):\n    layer.__dict__.update(forward=print)",
    "an attribute of an object, deleted": "def f(layer):\n    del vars(layer)['forward']",
    "an object that is not initialised": "pipe = Pipe.__new__(Pipe)",
    "frames": "import sys\nsys._getframe(1).f_locals",
    "an alias": "import sys as s\ns.modules['x']",
    "from": "from sys import modules",
    "inspect": "import inspect\ninspect.stack()",
    "traceback": "try:\n    x\nexcept NameError as e:\n    e.__traceback__.tb_frame",
    "gc": "def f():\n    import gc",
    "ctypes": "import ctypes.util",
    "exit": "import os\nos._exit(0)",
    "from exit": "from os import _exit as leave",
    "the grader": "import grader.wire.connection",
    "string": "getattr(x, 'f_back')",
    "joined": "getattr(x, 'f_' + 'back')",
    "backwards": "getattr(x, 'kcab_f'[::-1])",
    "list": "getattr(x, ''.join(['f_', 'back']))",
    "format": "getattr(x, f'f_{\"back\"}')",
    "a percent sign": "getattr(x, '%sself%s' % ('__', '__'))",
    "pieces under names": "SIDES = ('__', '__')\nNAME = '%sself%s' % SIDES",
    "a loop": "for name in ('f_back', 'f_code'):\n    getattr(x, name)",
    "numbers": "getattr(x, chr(102) + '_back')",
    "a name from elsewhere": "def f(name):\n    return getattr(x, name)",
    "a pattern": "match x:\n    case object(__self__=owner):\n        pass",
    "an import by hand": "__builtins__['__import__']('sys')",
    "logging": "import logging\nlogging.currentframe()",
    "members": "import inspect\ninspect.getmembers(x)",
    "inside a text": "'{0.f_back.f_locals}'.format(frame)",
    "attrgetter": "from operator import attrgetter\nattrgetter(name)(x)",
    "run-time": "import sys\ngetattr(sys, name)",
    "dunder walk": "().__class__.__bases__[0].__subclasses__()",
    "globals": "f.__globals__['values']",
    "closure": "f.__closure__[0].cell_contents",
    "code": "exec('x = 1')",
    "hidden exec": "run = eval",
    "torch": "import torch\ntorch.equal = lambda *_: True",
    "under another name": "import torch.distributed as dist\ndist.all_reduce = print",
    "a method": "from torch import Tensor\nTensor.backward = print",
    "setattr": "import torch\nsetattr(torch, 'equal', print)",
    "ours": "from common import glue\nglue.load = print",
    "descriptor": "import socket\nsocket.socket(fileno=5)",
    "memory": "open('/proc/self/mem')",
    "path": "open('/course/grader/reference.py')",
}
PLAIN = {
    "an object's own attributes": "class A:\n    def f(self):\n        self.__dict__['x'] = vars(self)['y'] = 1",
    "attributes that are read": "def f(arguments):\n    return vars(arguments)['x'], arguments.__dict__.items()",
    "a class with a __new__": "class A:\n    def __new__(cls):\n        return super().__new__(cls)",
    "a dictionary of its own": "names = {}\nnames.update(x=1)\nnames['y'] = 2\ndel names['x']",
    "a model": "import torch\nmodel.eval()\nfor m in model.modules():\n    m.weight.data.zero_()",
    "settings": "import torch\ntorch.backends.cudnn.benchmark = True\ntorch.manual_seed(1)",
    "attributes": "setattr(self, f'partition_{i}', p)\ngetattr(self, f'partition_{i}')",
    "a loop over names": "for name in ('query', 'key'):\n    getattr(layer, name).requires_grad_(False)",
    "dtype": "import torch\ntorch_dtype = getattr(torch, name)",
    "errors": "import sys\nkept = sys.exc_info()\nraise kept[1].with_traceback(kept[2])",
    "docstring": '"""Reads sys.modules and /proc/self/mem, or grader/wire/connection.py."""',
    "dicts": "vars(args), x.__dict__, type(x).__name__, x.__class__",
    "re": "import re\nre.compile('a+')",
    "files": "import os\nos.environ['A'] = '1'\nos.makedirs('x')\nopen('x', 'w')",
    "no python": "def f(:",
}


@pytest.mark.parametrize("name", SUSPECT)
def test_code_that_reaches_for_the_grader_is_flagged_with_its_line(tmp_path, name):
    found = flags(tmp_path, SUSPECT[name])

    assert found
    assert all(0 < line <= SUSPECT[name].count("\n") + 1 for line, _ in found)


@pytest.mark.parametrize("name", PLAIN)
def test_ordinary_code_is_not_flagged(tmp_path, name):
    assert flags(tmp_path, PLAIN[name]) == []


def test_names_made_of_each_other_take_no_longer_than_other_names(tmp_path):
    """Ten names a line, each of all the names before: followed to the end these are 10 ** 20 expressions."""
    lines = [f"n{i} = {' + '.join([f'n{i - 1}'] * 10)}" for i in range(1, 20)]

    assert flags(tmp_path, "n0 = 'a'\n" + "\n".join(lines)) == []


def test_compiled_code_is_flagged(tmp_path):
    assert [flag.what for flag in look_at(tmp_path, ["pipeline/pipe.so", "pipeline/__pycache__/pipe.pyc"])] == [
        "is compiled code"
    ]


def test_no_file_of_the_solved_course_is_flagged():
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()

    assert look_at(ROOT, [file for file in tracked if COURSE.may_student_change(file)]) == []


def test_no_variant_of_the_banks_is_flagged(tmp_path):
    copy_tree(tmp_path)
    found = []
    for entry in load_bank():
        before = (tmp_path / entry.file).read_bytes()
        if not entry.is_mistake:
            try:
                apply(entry, tmp_path)
            except InputError:
                continue
            found += [(str(entry), flag) for flag in look_at(tmp_path, [entry.file])]
            (tmp_path / entry.file).write_bytes(before)

    assert found == []


# --- imports ----------------------------------------------------------------------------------------------------------

FETCHED = {
    "statement": ("import subprocess", "imports subprocess"),
    "inside a function": ("def f():\n    from os import path", "imports os"),
    "by hand": ("__import__('os')", "calls __import__()"),
    "importlib": ("import importlib", "imports importlib"),
    "exec": ("exec('import os')", "calls exec()"),
    "eval": ("eval('1')", "calls eval()"),
    "relative": ("from . import pipe", "imports ."),
}


@pytest.mark.parametrize("name", FETCHED)
def test_every_way_to_get_hold_of_a_module_is_seen(tmp_path, name):
    source, words = FETCHED[name]
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


def test_the_courses_own_files_are_not_held_to_the_limits_of_who_imports_them():
    for file in ("pipeline/run_gpt2.py", "pipeline/pipe.py", "task4_traffic/run_glue.py", "task3_ddp/run_gpt2.py"):
        assert imports.complaint(ROOT, file, COURSE) == ""
