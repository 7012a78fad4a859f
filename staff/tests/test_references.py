"""The files that documents, docstrings and comments name exist."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

from common.paths import ROOT

# Written by a run or by the reader, of another project, or any name in its place.
OTHERS = {
    "FILE.py", "FILE.toml", "file.py", "lesson.py", "my_engine.py", "path/to/file.py", "later/script.py", "task/run.py",
    "mine.py", "sheets/NAME.md", "report.md", "report/report.md", "scaling.md", "examples/run_glue.py",
}  # fmt: skip
FILE = re.compile(r"(?<![\w/.<*-])(?:[\w.-]+/)*[\w-]+\.(?:py|md|toml|sbatch|sh)\b(?!\.\w)")


def prose(file: Path) -> str:
    """A document, or the docstrings and comments of a program."""
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".md":
        return text
    nodes = (
        node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
    )
    return "\n".join([*filter(None, map(ast.get_docstring, nodes)), *re.findall(r"(?<![\"'\w])#.*", text)])


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a checkout")
def test_every_file_that_a_text_names_exists():
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    known = {"/".join(file.split("/")[level:]) for file in tracked for level in range(file.count("/") + 1)}
    dangling = []
    for file in tracked:
        if re.search(r"\.(py|md)$", file) and file != "CHANGELOG.md" and not file.startswith("staff/banks/"):
            text = prose(ROOT / file)
            files = set(FILE.findall(text)) - OTHERS - known
            dangling += [(file, name) for name in files if not (ROOT / file).parent.joinpath(name).is_file()]
    assert dangling == []
