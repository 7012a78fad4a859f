"""What `import` finds: packages are declared, our folders import in one direction, no file hides a standard module."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from common.paths import ROOT

pytestmark = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a checkout")
OPTIONAL = {"geni", "horovod", "wandb"}  # on CloudLab alone; built by install.py; only with --wandb
OF_NEWER_PYTHONS = {"compression"}  # from 3.14 on, in place of backports.zstd

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


def declared() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [line for line in (ROOT / "requirements.txt").read_text().splitlines() if not line.startswith("#")]
    lines += [line for extra in project["optional-dependencies"].values() for line in extra]
    return {plain(re.split(r"[<>=;\s]", line)[0]) for line in lines}


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def imported(file: Path) -> Iterator[str]:
    """The first part of each module that a file imports absolutely."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def undeclared(files: list[Path], own: set[str]) -> set[str]:
    known = own | sys.stdlib_module_names | OPTIONAL | OF_NEWER_PYTHONS
    distributions, names = packages_distributions(), declared()
    modules = {module for file in files for module in imported(file)} - known
    return {m for m in modules if not names & {plain(name) for name in distributions.get(m, [m])}}


def shadowing(files: list[Path]) -> list[Path]:
    """Modules named like one of the standard library, in a folder that holds a script.

    Python puts the folder of a script that it starts by path first in sys.path: `import statistics` finds them.
    """
    script_folders = {file.parent for file in files if '__name__ == "__main__"' in file.read_text(encoding="utf-8")}
    modules = [(file.parent, file.stem, file) for file in files]
    modules += [(file.parent.parent, file.parent.name, file) for file in files if file.name == "__init__.py"]
    return [file for folder, name, file in modules if folder in script_folders and name in sys.stdlib_module_names]


@pytest.fixture(scope="module")
def files() -> list[Path]:
    """All tracked Python files."""
    tracked = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in tracked.split() if (ROOT / name).exists()]


def test_no_file_beside_a_script_has_the_name_of_a_standard_module(files):
    assert shadowing(files) == []


def test_every_package_that_is_imported_is_declared(files):
    own = {file.relative_to(ROOT).parts[0].removesuffix(".py") for file in files}

    assert undeclared(files, own) == set()


def test_imports_between_our_folders_go_in_one_direction(files):
    wrong = []
    for file in files:
        name, folder = file.relative_to(ROOT).as_posix(), file.relative_to(ROOT).parts[0]
        if folder in MAY_IMPORT and not name.startswith(("staff/tests/", "staff/banks/")):
            others = set(imported(file)) & {*MAY_IMPORT, "tests"} - {folder} - MAY_IMPORT[folder]
            wrong += [(name, other) for other in others]

    assert wrong == []
