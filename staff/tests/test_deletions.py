"""Only statements of given code are drawn, and a deletion counts as noticed only if a test fails without it."""

import ast
from pathlib import Path
from queue import SimpleQueue

import pytest

from common.paths import ROOT
from staff.proofs import deletions
from staff.proofs.deletions import Statement, is_noticed, statements_of

EXPECTED = ROOT / "task4_traffic" / "expected.py"


def test_no_statement_of_a_region_is_drawn():
    lines = EXPECTED.read_text(encoding="utf-8").splitlines()
    begin = next(number for number, line in enumerate(lines, 1) if "# BEGIN SOLUTION" in line)

    drawn = {statement.first for statement in statements_of(EXPECTED)}

    assert drawn
    assert begin + 1 not in drawn


def test_every_statement_can_be_deleted_alone():
    text = EXPECTED.read_text(encoding="utf-8")

    for statement in statements_of(EXPECTED):
        lines = text.splitlines()
        lines[statement.first - 1 : statement.last] = [" " * statement.indent + "pass"]
        assert ast.dump(ast.parse("\n".join(lines))) != ast.dump(ast.parse(text))


@pytest.mark.parametrize(("line", "expected"), [(2, True), (3, False)])
def test_a_deletion_is_noticed_only_by_a_test_that_needs_the_statement(tmp_path, monkeypatch, line, expected):
    module = tmp_path / "module.py"
    module.write_text("def double(number):\n    number = number * 2\n    unused = 0\n    return number\n")
    (tmp_path / "test_module.py").write_text(
        "from module import double\n\ndef test_double():\n    assert double(2) == 4\n"
    )
    monkeypatch.setattr(deletions, "nearest_tests", lambda path: ["test_module.py"])
    trees: SimpleQueue[Path] = SimpleQueue()
    trees.put(tmp_path)

    assert is_noticed(Statement(Path("module.py"), line, line, 4), trees) is expected
    assert "unused" in module.read_text()
