"""Delete statements of given code, one at a time, and count how many deletions the tests next to them notice.

    python -m staff.proofs.deletions [--count 100] [--seed 1] [--jobs 2]

Statements are drawn from the folders below, without regions (the banks prove those). The tests next to a statement
are the files of tests/own and staff/tests that name its module most often. Prints every deletion that they did not
notice; the last line is {"deletions": n, "noticed": n, "survived": ["file:line", ...]}.
"""

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from common.errors import exit_on_input_error
from common.paths import ROOT
from staff.handout.regions import find_regions

FOLDERS = ("common", "handin", "staff/grade", "benchmark/measure", "task4_traffic")
TESTS = ("tests/own", "staff/tests")
NEAREST = 6  # test files
LIMIT = 300  # seconds for them: a deletion may make a program wait
QUICK = "not slow and not bank and not proof"


@dataclass(frozen=True)
class Statement:
    """A statement of a file, and the lines that it takes."""

    path: Path  # below the root
    first: int
    last: int
    indent: int

    def __str__(self) -> str:
        return f"{self.path}:{self.first}"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100, help="deletions to draw (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the draw (%(default)s)")
    parser.add_argument("--jobs", type=int, default=2, help="deletions that are tested in parallel (%(default)s)")
    arguments = parser.parse_args(argv)
    files = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    statements = [statement for path in files for statement in statements_of(path)]
    drawn = random.Random(arguments.seed).sample(statements, min(arguments.count, len(statements)))
    with tempfile.TemporaryDirectory() as folder:
        trees: SimpleQueue[Path] = SimpleQueue()
        for number in range(arguments.jobs):
            trees.put(copied(Path(folder) / str(number)))
        with ThreadPoolExecutor(arguments.jobs) as pool:
            noticed = list(pool.map(lambda statement: is_noticed(statement, trees), drawn))
    survived = [str(statement) for statement, is_seen in zip(drawn, noticed, strict=True) if not is_seen]
    print(json.dumps({"deletions": len(drawn), "noticed": sum(noticed), "survived": survived}))


def statements_of(path: Path) -> Iterator[Statement]:
    """The statements of functions that can be deleted alone: no docstrings, no imports, nothing in a region."""
    text = path.read_text(encoding="utf-8")
    regions = find_regions(text, str(path))
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    for node in dict.fromkeys(node for function in functions for node in ast.walk(function)):
        if not isinstance(node, ast.Expr | ast.Assign | ast.AugAssign | ast.Return | ast.Raise | ast.If):
            continue
        is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        is_solution = any(region.line <= node.lineno <= region.end_line for region in regions)
        if not is_docstring and not is_solution:
            yield Statement(path.relative_to(ROOT), node.lineno, node.end_lineno or node.lineno, node.col_offset)


def copied(tree: Path) -> Path:
    """A copy of the files that git knows, with this environment."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    for name in filter(lambda name: (ROOT / name).is_file(), names.decode().split("\0")):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, tree / name)
    (tree / ".venv").symlink_to(ROOT / ".venv")
    return tree


def is_noticed(statement: Statement, trees: SimpleQueue[Path]) -> bool:
    """Whether a test fails without the statement; takes a tree, and puts it back as it was."""
    tests = nearest_tests(statement.path)
    tree = trees.get()
    path = tree / statement.path
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines(keepends=True)
    deleted = "".join(lines[statement.first - 1 : statement.last]).strip()
    lines[statement.first - 1 : statement.last] = [" " * statement.indent + "pass\n"]
    try:
        path.write_text("".join(lines), encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", QUICK, *tests]
        environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
        try:
            run = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=LIMIT)
        except subprocess.TimeoutExpired:
            return True
        if run.returncode == 0:
            print(f"{statement} survived {' '.join(tests)}: {deleted}", flush=True)
        return run.returncode != 0
    finally:
        path.write_text(text, encoding="utf-8")
        trees.put(tree)


def nearest_tests(path: Path) -> list[str]:
    """The test files that name a module most often; of a module that none names, those that name its package."""
    name = ".".join(path.with_suffix("").parts)
    while True:
        counts = {
            str(file.relative_to(ROOT)): file.read_text(encoding="utf-8").count(name)
            for folder in TESTS
            for file in sorted((ROOT / folder).rglob("test_*.py"))
        }
        if named := sorted((file for file, count in counts.items() if count), key=lambda file: -counts[file]):
            return named[:NEAREST]
        name = name.rpartition(".")[0]


if __name__ == "__main__":
    exit_on_input_error(main)
