"""The handout of this tree, open and solved, made once for all tests of a process; and a copy of the repository."""

import functools
import shutil
import subprocess
from pathlib import Path

from common.paths import ROOT
from staff.handout.assemble import Handout, assemble
from staff.proofs.bank import solved_files


@functools.cache
def open_handout() -> Handout:
    return assemble(ROOT)


def solved_handout() -> dict[str, bytes]:
    return open_handout().files | solved_files()


def copied(tree: Path) -> Path:
    """Copy the files that git knows, with this environment; return the copy's folder."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    for name in filter(lambda name: (ROOT / name).is_file(), names.decode().split("\0")):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, tree / name)
    (tree / ".venv").symlink_to(ROOT / ".venv")
    return tree
