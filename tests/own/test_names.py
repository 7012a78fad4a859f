"""File names that would change what `import` finds when a script is started by its path."""

import subprocess
import sys
from pathlib import Path

import pytest

from common.paths import ROOT


def shadowing(files: list[Path]) -> list[Path]:
    """Modules named like one of the standard library, in a folder that holds a script.

    Python puts the folder of a script that it starts by path first in sys.path: `import statistics` finds them.
    """
    script_folders = {file.parent for file in files if '__name__ == "__main__"' in file.read_text(encoding="utf-8")}
    modules = [(file.parent, file.stem, file) for file in files]
    modules += [(file.parent.parent, file.parent.name, file) for file in files if file.name == "__init__.py"]
    return [file for folder, name, file in modules if folder in script_folders and name in sys.stdlib_module_names]


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a checkout")
def test_no_file_beside_a_script_has_the_name_of_a_standard_module():
    tracked = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True).stdout

    assert shadowing([ROOT / name for name in tracked.split() if (ROOT / name).exists()]) == []
