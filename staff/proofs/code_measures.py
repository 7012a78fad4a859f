"""Measures of the code itself: files and lines by package, import cycles, names that two things share, uses of Any.

    python -m staff.proofs.code_measures [FOLDER]

staff/tests/test_code_measures.py holds what must stay; the other figures are for comparing two states.
"""

import argparse
import ast
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from common.errors import InputError, exit_on_input_error
from common.paths import ROOT

NOT_CODE = ("tests", "banks", "files", "hidden", "dist", "runs")  # folders whose lines are not counted
SHARED_NAMES = {"__init__", "__main__", "conftest", "run_glue", "run_gpt2"}
OURS = re.compile(r"\bCOS598D_[A-Z_]+\b")


@dataclass(frozen=True)
class Measures:
    """What is computed; `packages` are folders with the number of .py files directly in each, and their lines."""

    packages: dict[str, tuple[int, int]]
    lines: int
    cycles: list[list[str]]
    uses_of_any: int
    class_names: dict[str, list[str]]
    module_names: dict[str, list[str]]
    environment: list[str]


def measure(root: Path) -> Measures:
    """Read every .py file below `root` that is code: no tests, no banks, no hidden folders."""
    files = {file: file.read_text(encoding="utf-8") for file in _files(root)}
    trees = {file: ast.parse(text) for file, text in files.items()}
    packages: dict[str, tuple[int, int]] = {}
    for file, text in files.items():
        folder = file.parent.relative_to(root).as_posix()
        count, lines = packages.get(folder, (0, 0))
        packages[folder] = (count + 1, lines + text.count("\n"))
    uses = sum(isinstance(node, ast.Name) and node.id == "Any" for tree in trees.values() for node in ast.walk(tree))
    environment = {name for text in files.values() for name in OURS.findall(text)}
    return Measures(
        dict(sorted(packages.items())),
        sum(lines for _, lines in packages.values()),
        cycles(imports(root, trees)),
        uses,
        _shared((node.name, file.relative_to(root)) for file, node in _classes(trees)),
        _shared((file.stem, file.relative_to(root)) for file in files if file.stem not in SHARED_NAMES),
        sorted(environment),
    )


def _files(root: Path) -> Iterator[Path]:
    for file in sorted(root.rglob("*.py")):
        folders = file.relative_to(root).parts[:-1]
        if not any(part.startswith((".", "__")) or part in NOT_CODE for part in folders):
            yield file


def _classes(trees: dict[Path, ast.Module]) -> Iterator[tuple[Path, ast.ClassDef]]:
    for file, tree in trees.items():
        yield from ((file, node) for node in tree.body if isinstance(node, ast.ClassDef) and node.name[0] != "_")


def _shared(named: Iterator[tuple[str, Path]]) -> dict[str, list[str]]:
    places: dict[str, list[str]] = defaultdict(list)
    for name, file in named:
        places[name].append(file.as_posix())
    return {name: files for name, files in sorted(places.items()) if len(files) > 1}


def imports(root: Path, trees: dict[Path, ast.Module]) -> dict[str, set[str]]:
    """Module -> modules of ours that it imports, functions included."""
    names = {".".join(file.relative_to(root).with_suffix("").parts): file for file in trees}
    found: dict[str, set[str]] = {}
    for module, file in names.items():
        wanted: set[str] = set()
        for node in ast.walk(trees[file]):
            if isinstance(node, ast.ImportFrom) and node.module:
                wanted |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
            elif isinstance(node, ast.Import):
                wanted |= {alias.name for alias in node.names}
        found[module] = {name for name in wanted if name in names and name != module}
    return found


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules that import each other in a circle (Tarjan 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(graph[node]):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            at = stack.index(node)
            group = stack[at:]
            del stack[at:]
            if len(group) > 1:
                found.append(sorted(group))

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=ROOT, help="a checkout (default: this one)")
    folder = parser.parse_args(argv).folder
    if not (folder / "course.toml").is_file():
        raise InputError(f"{folder} is no checkout of the course: expected a course.toml in it")
    found = measure(folder.resolve())
    for package, (count, lines) in found.packages.items():
        print(f"{package:28} {count:4} files {lines:7} lines")
    print(f"{'together':28} {sum(count for count, _ in found.packages.values()):4} files {found.lines:7} lines")
    print(f"import cycles: {found.cycles or 'none'}")
    print(f"uses of Any: {found.uses_of_any}; environment variables of ours: {len(found.environment)}")
    for what, names in (("classes", found.class_names), ("modules", found.module_names)):
        print(f"{what} that share a name: {dict(Counter({name: len(files) for name, files in names.items()}))}")
    print(json.dumps(asdict(found)))


if __name__ == "__main__":
    exit_on_input_error(main)
