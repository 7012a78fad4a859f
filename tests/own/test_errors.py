"""What a user sees of an error: one line for wrong input and an unsolved region, the whole of any other."""

import pytest

from cluster import hello
from tests.own.started_processes import run

PROGRAM = (
    "from common.errors import InputError, exit_on_input_error\ndef main():\n    raise {}\nexit_on_input_error(main)\n"
)


@pytest.mark.parametrize(
    "error, code, line",
    [
        ("InputError('--x: expected 1,\\n got 2')", 2, "error: --x: expected 1, got 2"),
        (
            "NotImplementedError('TODO 2a.3: gather; see README.md')",
            1,
            "error: region 2a.3 is not written yet, <string>:3: NotImplementedError: TODO 2a.3: gather; see README.md; "
            "run `python -m pytest --hint 2a.3` for a hint",
        ),
    ],
)
def test_wrong_input_and_an_open_region_are_one_line(error, code, line):
    done = run("-c", PROGRAM.format(error))

    assert (done.returncode, done.stderr.strip()) == (code, line)


@pytest.mark.parametrize("error", ["NotImplementedError('no such kernel')", "ValueError('3')"])
def test_every_other_error_is_seen_whole(error):
    done = run("-c", PROGRAM.format(error))

    assert done.returncode == 1
    assert done.stderr.startswith("Traceback")
    assert error.replace("('", ": ").replace("')", "") in done.stderr


def test_an_open_hello_says_where_to_solve_its_region_and_what_copies_it(monkeypatch):
    def open_region(config):
        raise NotImplementedError("TODO 2a.1: join; see README.md")

    monkeypatch.setattr(hello, "join", open_region)

    with pytest.raises(NotImplementedError, match=r"TODO 2a\.1: join.*task2a_gather_scatter/run_glue\.py.*carry"):
        hello.join_or_explain(None)
