"""A student's folder, made from the source: regions are solved in their home file, and open in later files."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

from common.paths import ROOT
from course.table import load_course
from course.todo import REGION_ID

COURSE = load_course()
HOMES = {region.id: region.file for region in COURSE.regions.values()}
REGION = re.compile(rf"( *)# BEGIN SOLUTION ({REGION_ID})\n(.*?) *# END SOLUTION ", re.DOTALL)


def make_tree(tree: Path, solved: bool = False) -> Path:
    """Fill a folder with everything but the graders' tests. solved: every region, in every file."""
    for name in ("course.toml", "submit.py"):
        shutil.copy(ROOT / name, tree)
    for folder in ("common", "course", "cluster", "grader", "handin", *(task.folder for task in COURSE.tasks.values())):
        shutil.copytree(ROOT / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for path in tree.rglob("*.py"):
        name, text = path.relative_to(tree).as_posix(), path.read_text(encoding="utf-8")
        if "# BEGIN SOLUTION" in text and not name.startswith("grader/"):

            def of_student(match: re.Match[str], name: str = name) -> str:
                indent, region, body = match.groups()
                placeholder = f'{indent}raise NotImplementedError("TODO {region}: not yet")\n'
                return f"{body if solved or HOMES[region] == name else placeholder}{indent}# END TODO "

            path.write_text(REGION.sub(of_student, text), encoding="utf-8")
    return tree


def submit(tree: Path, *words: str) -> subprocess.CompletedProcess:
    """Run a command of submit.py."""
    return subprocess.run([sys.executable, "submit.py", *words], cwd=tree, capture_output=True, text=True)
