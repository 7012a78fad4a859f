"""Every package that is imported is declared: in requirements.txt, or as an extra in pyproject.toml."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

from common.paths import ROOT

OPTIONAL = {"wandb", "geni", "horovod"}  # imported where it is there; runs on CloudLab alone; built by install.py
OF_NEWER_PYTHONS = {"compression"}  # from 3.14 on, in place of backports.zstd


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


def test_every_package_that_is_imported_is_declared():
    tracked = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    files = [ROOT / name for name in tracked.split() if (ROOT / name).exists()]
    own = {file.relative_to(ROOT).parts[0].removesuffix(".py") for file in files}

    assert undeclared(files, own) == set()
