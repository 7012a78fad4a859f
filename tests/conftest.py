"""Makes pytest a grader for the tests in this folder; see grader/plugin.py."""

import sys

if "--tree" in sys.argv:  # pytest takes the next word for a folder of tests, whose settings and graders would count
    sys.exit("error: expected --tree=DIR, got --tree DIR; write it as one word")

pytest_plugins = ["grader.plugin", "grader.carried"]
