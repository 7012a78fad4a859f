"""The command `python -m staff.sandbox`: which layers work on this machine; see graded_run.py."""

import common.workers.environment  # isort: skip  # noqa: F401 (stops with a message if torch is missing)

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

from common.errors import exit_on_input_error
from staff.grade import hand_ins
from staff.sandbox import graded_run


def tests_not_graded_here(network: bool) -> list[str]:
    """The tests that need a network of their own, where there is none, each with its points."""
    with tempfile.TemporaryDirectory() as scratch:
        tests = [] if network else hand_ins.collect(Path(scratch), hand_ins.grader_files())
    return hand_ins.not_graded_here(tests)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m staff.sandbox",
        description=graded_run.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--probe", action="store_true", help="show which layers this machine supports (default)")
    parser.add_argument(
        "--protect", action="store_true", help="as root: make solutions and hidden tests unreadable for other users"
    )
    options = parser.parse_args(argv)
    if options.protect:
        for name in graded_run.protect():
            print(f"closed to other users: {name}")
    held = graded_run.probe() | {"not_graded_here": tests_not_graded_here(graded_run.probe()["network"])}
    for name in ("user", "landlock", "seccomp", "network", "scratch", "limits", "memory"):
        print(f"{name:10} {'active' if held[name] else 'NOT AVAILABLE HERE'}")
    if held["files"] == "open":
        print(
            f"submissions could read: {', '.join(graded_run.open_secrets()[:5])}; run --protect as root to prevent this"
        )
    for line in held["not_graded_here"]:
        print(line)
    print(held["level"])
    print(json.dumps(held))


if __name__ == "__main__":
    exit_on_input_error(main)
