"""What `import` finds: packages are declared, our folders import in one direction, no file hides a standard module."""

import ast
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.paths import ROOT

pytestmark = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a checkout")

# What the programs of a folder may import of other folders (CONTRIBUTING.md, "Where things are").
MAY_IMPORT = {
    "common": set(),
    "course": {"common"},
    "task1_single": {"common"},
    "task2a_gather_scatter": {"common"},
    "task2b_allreduce": {"common"},
    "task3_ddp": {"common"},
    "task4_traffic": {"common"},
    "pipeline": {"common"},
    "beyond": {"common"},
    "cluster": {"common", "course"},
    "benchmark": {"common", "pipeline", "beyond", "cluster", "task4_traffic"},
    "grader": {"common", "course"},
    "handin": {"common", "course", "cluster", "task4_traffic"},
    "staff": {"common", "course", "grader", "handin", "tests"},
}


def imported(file: Path) -> Iterator[str]:
    """The first part of each module that a file imports absolutely."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


@pytest.fixture(scope="module")
def files() -> list[Path]:
    """All tracked Python files."""
    tracked = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in tracked.split() if (ROOT / name).exists()]


def test_imports_between_our_folders_go_in_one_direction(files):
    wrong = []
    for file in files:
        name, folder = file.relative_to(ROOT).as_posix(), file.relative_to(ROOT).parts[0]
        if folder in MAY_IMPORT and not name.startswith(("staff/tests/", "staff/banks/")):
            others = set(imported(file)) & {*MAY_IMPORT, "tests"} - {folder} - MAY_IMPORT[folder]
            wrong += [(name, other) for other in others]

    assert wrong == []
