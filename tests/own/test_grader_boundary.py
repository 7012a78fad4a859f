"""The process boundary: what a rank has in memory comes from inside/ and wire/, and never from a judge."""

import ast
import importlib

import pytest

from common.paths import ROOT
from grader.in_rank import InRank

pytestmark = pytest.mark.medium


def imported(path):
    """The grader's modules that a file imports, wherever in the file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "grader":
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "grader")


@pytest.mark.parametrize(("side", "may_import"), [("inside", {"inside", "wire"}), ("wire", {"wire"})])
def test_the_rank_side_imports_only_the_rank_side_and_what_both_ends_share_needs_none_of_them(side, may_import):
    paths = [*(ROOT / "grader" / side).rglob("*.py")]
    assert paths
    for path in paths:
        crossing = {name for name in imported(path) if (name.split(".") + ["", ""])[1] not in {*may_import, ""}}
        assert not crossing, f"{path.relative_to(ROOT)} imports {crossing}"


IN_RANKS = [
    value
    for path in sorted((ROOT / "tests").glob("*/[a-z]*.py"))
    if "in_rank" in path.read_text() and path.parent.name != "own"
    for value in vars(importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))).values()
    if isinstance(value, InRank)
]


@pytest.mark.parametrize("function", IN_RANKS, ids=[function.function for function in IN_RANKS])
def test_what_a_rank_is_sent_of_a_test_file_holds_no_judge_and_no_test(function):
    """Only definitions, and imports of libraries: names of the grader are for type checkers alone."""
    for source in function.sources:
        for node in ast.parse("\n".join(source["lines"])).body:
            checked = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
            names = {getattr(node, "module", ""), *(alias.name for alias in getattr(node, "names", ()))}
            ours = {name for name in names if name and name.split(".")[0] in ("grader", "tests", "staff")}
            assert checked or not ours, f"{source['path']}: {ast.unparse(node)}"
            assert not getattr(node, "name", "").startswith(("check", "test", "expected", "mistakes")), node.name


def test_a_function_in_a_rank_is_sent_without_the_rest_of_its_file():
    lines = {line for function in IN_RANKS for source in function.sources for line in source["lines"]}

    assert len(IN_RANKS) > 8
    assert not any("Expected(" in line or "grade.fail" in line or "@graded" in line for line in lines)
