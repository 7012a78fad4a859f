"""What the tests of grader/ share: running a student's file that is written in the test itself."""

import textwrap
import time

from grader import ranks

HEAD = "import os, signal, subprocess, sys, threading, time\nimport torch\nimport torch.distributed as dist\n"


def player(folder, world_size):
    """A function that runs `go(context)` of a student's file with a given source, which begins in line 4 there."""

    def play(source, world_size=world_size, function="go", deadline=20.0, keep_payloads=False, **arguments):
        (folder / "task").mkdir(exist_ok=True)
        (folder / "task/run.py").write_text(HEAD + textwrap.dedent(source).lstrip("\n"))
        arguments |= {"file": "task/run.py", "function": function}
        options = {"deadline": deadline, "tree": folder, "keep_payloads": keep_payloads}
        return ranks.run("grader.inside.context:call", world_size, arguments, **options)

    return play


def wait_until(condition, seconds=20):
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "it did not happen"
        time.sleep(0.01)
