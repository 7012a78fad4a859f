"""Makes pytest a grader for the tests in this folder; see grader/plugin.py."""

import sys
from pathlib import Path

SETTINGS = (
    "pyproject.toml",
    "pytest.toml",
    "pytest.ini",
    ".pytest.ini",
    "tox.ini",
    "setup.cfg",
    "setup.py",
    "conftest.py",
)

if "--tree" in sys.argv[:-1]:  # as two words: pytest takes the second one for a folder of tests
    folder = Path(sys.argv[sys.argv.index("--tree") + 1])
    if any((folder / name).exists() for name in SETTINGS):
        sys.exit(f"error: pytest would use the settings and graders in {folder}; expected one word, --tree={folder}")

pytest_plugins = ["grader.plugin", "grader.carried"]
