"""Says how a rank has ended, from its last message and its exit code."""

import re

from grader.ranks.broker import Broker
from grader.ranks.outcome import Failure, Frame, RankResult
from grader.ranks.rank_process import RankProcess
from grader.wire.call_sites import student_file

FRAME = re.compile(r'File "([^"\n]+)", line (\d+)')  # a name ends at its quote: no text takes more than linear time
MAX_MESSAGE = 4000  # characters of an exception's message
MAX_TRACE = 20  # frames of a traceback, the innermost ones


def rank_result(process: RankProcess, broker: Broker, tree: str, unfinished: bool, in_time: bool) -> RankResult:
    """Return how a rank ended. "stuck" comes first: what it does with the error that ends its wait does not matter."""
    fault = broker.fault
    result = RankResult(process.rank, "stopped", stdout=process.stdout.text(), stderr=process.stderr.text())
    result.events = broker.events[process.rank]
    for call in result.calls:
        call.waited = call.identity not in process.never_waited
    if fault and process.rank in fault.stuck:
        result.outcome, result.call = "stuck", fault.stuck[process.rank]
    elif process.ending == "raised" and process.error:
        result.outcome = "raised" if process.error.code is None else "exited"
        result.error, result.code, result.where = process.error, process.error.code or 0, process.error.where
    elif process.ending and (fault or not unfinished):
        result.outcome, result.value = "returned", process.value
    else:
        result.where = innermost(process.stack.text(), tree)
        if not unfinished and process.code is not None:
            result.outcome, result.code = "killed" if process.code < 0 else "exited", abs(process.code)
        elif not in_time:
            result.outcome, result.call = "deadline", broker.stuck_call(process.rank)
    if result.call:
        result.where = result.call.where
    return result


def failure(error: dict | None) -> Failure | None:
    """Return a rank's exception from its message; raise some error if the message is malformed."""
    if error is None:
        return None
    frames = error["trace"][-MAX_TRACE:]
    trace = [Frame(file[:200], int(line), function[:200], text[:200]) for file, line, function, text in frames]
    code = None if error["code"] is None else int(error["code"])
    return Failure(error["type"][:200], error["message"][:MAX_MESSAGE], error["during"][:200], trace, code)


def innermost(stack: str, tree: str) -> str:
    """Return file:line of the innermost of the student's frames in a stack that faulthandler has written."""
    for filename, line in FRAME.findall(stack):
        if name := student_file(tree, filename):
            return f"{name}:{line}"
    return ""
