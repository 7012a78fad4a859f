"""What a rank does: it takes its job from the grader, runs a function of a lesson's test file, and sends its value.

The rank gets the source of that function, see grader/in_rank.py. A student's code can read all of it, so it says
nothing about right and wrong, and holds no expected value.
"""

import __future__

import bdb
import os
import random
import socket
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from grader.inside import checkout, join_group, refusals, tools
from grader.inside.context import Context
from grader.wire import values
from grader.wire.call_sites import Sites
from grader.wire.connection import Wire
from grader.wire.request import Job, RankFunction

TORCH = str(Path(torch.__file__).parent)
OF_ANOTHER_JOB = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "5"}  # where a group is joined, the group counts


def rank_main(connection: socket.socket) -> None:
    """Do all that a rank does, from the job to its last message: a value or a failure."""
    job = Job.from_message(values.receive(connection, values.to_tensor))
    _unlike_other_ranks()
    sys.path.insert(0, job.tree)
    sites = Sites(job.tree, TORCH)
    wire = Wire(connection, sites)
    join_group.install(wire, job.rank, job.world_size)
    context = Context(wire, job)
    if job.debugged:
        from grader.inside.debugger import prepare

        prepare(job.rank, job.stops, context.event)
    try:
        message = {"kind": "returned", "value": call_function(job, context)}
    except BaseException as error:  # SystemExit and KeyboardInterrupt too
        message = {"kind": "raised", "error": describe_error(error, sites, context.during)}
    never_waited = {"never_waited": list(wire.pending)}
    try:
        wire.send(message | never_waited)
    except Exception as error:  # a value that cannot be sent
        wire.send({"kind": "raised", "error": describe_error(error, sites, context.during)} | never_waited)


def _unlike_other_ranks() -> None:
    """Make a forked rank differ where separately started processes do, or the fork would hide mistakes.

    Python's and numpy's generators get a new seed (torch's starts alike in every process, so it stays), and new objects
    get other addresses, see Context.shuffle_addresses. What remains alike is the order of a set of strings.
    """
    random.seed()
    np.random.seed()


def call_function(job: Job, context: Context) -> object:
    """Load the student's file, then return what the function returns; for a generator, the list of its values.

    Without a function, only the file is loaded: to see whether it can be. The sources share one namespace, which is no
    module: no name in it can be taken for one of the student's file.
    """
    function = job.function or RankFunction("", join=False)
    names: dict[str, Any] = {"__name__": "in_rank"} | {name: getattr(tools, name) for name in tools.__all__}
    for source in function.sources:
        code = "\n" * source.before + "\n".join(source.lines)
        file = str(Path(checkout.ROOT, source.path)) + checkout.SENT_SUFFIX
        exec(compile(code, file, "exec", __future__.annotations.compiler_flag), names)  # annotations are not looked up
    if function.first:
        names[function.first](context)
    if function.join:
        os.environ.update(OF_ANOTHER_JOB)
    lesson = context.load(job.file) if job.file else None
    if function.join:
        context.join()
    value = names[function.name](context, lesson, job.inputs) if function.name else None
    return list(value) if isinstance(value, Iterator) else value


def describe_error(error: BaseException, sites: Sites, during: str) -> dict:
    """Return an exception as values: type, message, the student's lines of its traceback, the code of a SystemExit."""
    frames = traceback.extract_tb(error.__traceback__)
    trace = [(sites.students(f.filename), f.lineno or 0, f.name, f.line or "") for f in frames]
    trace = [frame for frame in trace if frame[0]]
    if isinstance(error, SyntaxError) and sites.students(error.filename or ""):
        trace.append((sites.students(error.filename or ""), error.lineno or 0, "", (error.text or "").strip()))
    if not trace:  # a line of the grader failed on what the student's code left: its path shows whose line it is
        trace = [(checkout.own_path(f.filename), f.lineno or 0, f.name, "") for f in frames]
    code = None
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
    name = type(error).__name__
    try:
        # pdb quits when it has read the end of its input.
        text = refusals.NO_DEBUGGER if isinstance(error, bdb.BdbQuit) else str(error)
    except Exception:  # of a student's own __str__
        text = "(its message cannot be printed)"
    return {"type": name, "message": text, "during": during, "trace": trace, "code": code}
