"""Makes pytest a grader for the tests in this folder; see grader/plugin.py."""

pytest_plugins = ["grader.plugin", "grader.carried"]
