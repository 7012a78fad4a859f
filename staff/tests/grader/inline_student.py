"""What the tests of grader/ share: a student's file that is written in the test itself, or one region of the course."""

import textwrap

from course.table import load_course
from grader import ranks
from grader.grading import Grade, Session
from grader.in_rank import in_rank
from grader.wire.request import Request

HEAD = "import os, signal, subprocess, sys, threading, time\nimport torch\nimport torch.distributed as dist\n"


@in_rank(join=False)
def call(context, lesson, _inputs):
    """Call a function of the student's file, named by the argument `entry`."""
    return getattr(lesson, context.arguments["entry"])(context)


def run_entry(
    tree,
    file,
    world_size,
    entry="go",
    inputs=None,
    measures=False,
    deadline=20.0,
    storages=({},),
    full=None,
    **arguments,
):
    """Run `entry(context)` of a file on these ranks."""
    inputs, arguments = inputs or [None] * world_size, {"entry": entry} | arguments
    request = Request(inputs, file, call, arguments, deadline, measures=measures, storages=storages, full=full)
    return ranks.run(request, tree=tree)


def player(folder, world_size):
    """A function that runs `go(context)` of a student's file with a given source, which begins in line 4 there."""

    def play(source, world_size=world_size, **arguments):
        (folder / "task").mkdir(exist_ok=True)
        (folder / "task/run.py").write_text(HEAD + textwrap.dedent(source).lstrip("\n"))
        return run_entry(folder, "task/run.py", world_size, **arguments)

    return play


def joined(body):
    """A source whose `go` joins and then does `body`, from line 7 on, with the gradient `g` of two elements."""
    start = "def go(context):\n    context.join()\n    rank, n, g = context.rank, context.world_size, torch.ones(2)\n"
    return start + textwrap.indent(textwrap.dedent(body).strip(), "    ") + "\n"


def view_of(tree, region):
    """The graders' view of a tree."""
    return Grade(Session(tree, load_course(), seed=1), region, "test")
