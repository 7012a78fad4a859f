"""What a user sees of an error: one line for wrong input and an unsolved region, the whole of any other."""

import pytest

from staff.tests.cluster.started_processes import run

PROGRAM = """
from common.errors import InputError, OtherRankError, exit_on_input_error
def main():
    raise {}
exit_on_input_error(main)
"""
OPEN = (
    "error: region 2a.3 is not written yet, <string>:4: NotImplementedError: TODO 2a.3: gather; see README.md; "
    "run `python -m pytest --hint 2a.3` for a hint"
)


@pytest.mark.parametrize(("error", "code", "last"), [
    ("InputError('--x: expected 1,\\n got 2')", 2, "error: --x: expected 1, got 2"),
    ("OtherRankError('rank 0 says: no')", 3, "error: rank 0 says: no"),
    ("NotImplementedError('TODO 2a.3: gather; see README.md')", 1, OPEN),
    ("NotImplementedError('no such kernel')", 1, "NotImplementedError: no such kernel"),  # and its traceback
    ("ValueError('3')", 1, "ValueError: 3"),
])  # fmt: skip
def test_wrong_input_and_an_open_region_are_one_line_and_every_other_error_is_seen_whole(error, code, last):
    done = run("-c", PROGRAM.format(error))

    lines = done.stderr.splitlines()
    assert (done.returncode, lines[-1]) == (code, last)
    assert len(lines) == 1 if last.startswith("error: ") else lines[0].startswith("Traceback")
