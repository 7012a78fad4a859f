"""How near right programs come to the limits of the graders: the largest difference over its limit, by comparison.

    python -m staff.margins --seeds 5                 the solved source; a minute for a seed
    python -m staff.margins --seeds 2 tests/beyond    of some files; everything else is passed on to pytest

A comparison near 1 fails with another draw. Only accepted ones are in the table: a value that a known mistake would
leave differs on purpose. Also a plugin of pytest (`-p staff.margins`), which writes to the file in COS598D_MARGINS.
"""

import common.workers.environment  # isort: skip  # noqa: F401 (stops with a message if torch is missing)

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

import pytest

from common.paths import ROOT
from grader import arithmetic
from grader.arithmetic import Tolerance

HALVINGS = 10  # a margin is exact to a thousandth
Ratios = dict[str, float]  # "file:line" of the comparison -> its largest ratio
largest: Ratios = {}


def with_margins(agrees: Callable[..., bool], scaled: Callable[..., tuple]) -> Callable[..., bool]:
    """Record each comparison: the smallest part of its limit with which it would still agree."""

    @functools.wraps(agrees)
    def recorded(*arguments: object, **named: object) -> bool:
        answer = agrees(*arguments, **named)
        if answer and (place := place_in_tests()):
            low, high = 0.0, 1.0
            for _ in range(0 if agrees(*scaled(0.0, *arguments, **named)) else HALVINGS):
                middle = (low + high) / 2
                low, high = (low, middle) if agrees(*scaled(middle, *arguments, **named)) else (middle, high)
            largest[place] = max(largest.get(place, 0.0), high if low or high < 1 else 0.0)
        return answer

    return recorded


def place_in_tests() -> str:
    """Return file and line of the test that compares; "" if it is none."""
    frame: FrameType | None = sys._getframe(2)
    while frame and f"{os.sep}tests{os.sep}" not in frame.f_code.co_filename:
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).relative_to(ROOT)}:{frame.f_lineno}" if frame else ""


def scaled_close(
    part: float, got: object, expected: object, tolerance: Tolerance = arithmetic.FLOAT32
) -> tuple[object, object, Tolerance]:
    limit = None if tolerance.limit is None else part * tolerance.limit
    return got, expected, Tolerance(tolerance.total, part * tolerance.slack, limit)


def scaled_last(default: float) -> Callable[..., tuple]:
    """The third argument is the limit."""

    def scaled(part: float, got: object, expected: object, limit: float = default, *others: object) -> tuple:
        return got, expected, part * limit, *others

    return scaled


def pytest_sessionfinish() -> None:
    if path := os.environ.get("COS598D_MARGINS"):
        Path(path).write_text(json.dumps(largest), encoding="utf-8")


def pytest_load_initial_conftests() -> None:
    """Before the graders import these functions."""
    arithmetic.close = with_margins(arithmetic.close, scaled_close)
    arithmetic.proportional = with_margins(arithmetic.proportional, scaled_last(1e-4))
    arithmetic.same_numbers = with_margins(arithmetic.same_numbers, scaled_last(1e-4))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="how many, counted from --first (%(default)s)")
    parser.add_argument("--first", type=int, default=1, help="the first seed (%(default)s)")
    options, others = parser.parse_known_args(argv)
    over_all = Ratios()
    for seed in range(options.first, options.first + options.seeds):
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "margins.json"
            command = ["-m", "pytest", "-q", "-p", "staff.margins", "-m", "graded", f"--seed={seed}", *others]
            environment = os.environ | {"COS598D_MARGINS": str(file)}
            done = subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True)
            if done.returncode != pytest.ExitCode.OK:
                sys.exit(f"seed {seed}:\n{done.stdout}{done.stderr}")
            ratios = json.loads(file.read_text(encoding="utf-8"))
        over_all = {place: max(over_all.get(place, 0.0), ratios.get(place, 0.0)) for place in over_all | ratios}
    for place, ratio in sorted(over_all.items(), key=lambda row: -row[1]):
        print(f"{ratio:.3f}  {place}")


if __name__ == "__main__":
    main()
