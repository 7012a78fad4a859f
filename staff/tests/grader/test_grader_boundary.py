"""The process boundary: what a rank is sent of a test file never comes from a judge."""

import ast
import importlib

import pytest

from common.paths import ROOT
from grader.wire.request import RankFunction

pytestmark = pytest.mark.medium
RANKS = 1


IN_RANKS = [
    value
    for path in sorted((ROOT / "tests").glob("*/[a-z]*.py"))
    if "in_rank" in path.read_text() and path.parent.name != "own"
    for value in vars(importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))).values()
    if isinstance(value, RankFunction)
]


@pytest.mark.parametrize("function", IN_RANKS, ids=[function.name for function in IN_RANKS])
def test_what_a_rank_is_sent_of_a_test_file_holds_no_judge_and_no_test(function):
    """Only definitions, and imports of libraries: names of the grader are for type checkers alone."""
    for source in function.sources:
        for node in ast.parse("\n".join(source.lines)).body:
            checked = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
            names = {getattr(node, "module", ""), *(alias.name for alias in getattr(node, "names", ()))}
            ours = {name for name in names if name and name.split(".")[0] in ("grader", "tests", "staff")}
            assert checked or not ours, f"{source.path}: {ast.unparse(node)}"
            name = getattr(node, "name", "")
            assert not name.startswith(("check", "test", "expected", "mistakes")), name


def test_a_rank_has_nothing_of_the_graders_but_what_runs_it(play):
    """What its process has loaded is in its memory, and a student's code can read that."""
    (loaded,) = play("def go(context):\n    return [name for name in sys.modules]", 1).values

    ours = {name for name in loaded if name.partition(".")[0] in ("grader", "tests", "staff", "course", "handin")}
    assert {".".join(name.split(".")[:2]) for name in ours} == {"grader", "grader.inside", "grader.wire"}
