"""What a graded test found where it did not pass: seven exceptions with the same fields.

A verdict is made where the cause is known, and travels as fields, through report.json too. It becomes text only where
somebody reads it: see messages.py.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from course.table import NOT_GRADED_HERE
from grader import crashes
from grader.ranks.calls import SILENTLY_WRONG
from grader.ranks.outcome import Frame, Result
from grader.ranks.phrases import rank_names

_TODO = re.compile(r"\bTODO\b(?:\([a-z0-9]+\))?(?: ([0-9a-z]+\.[0-9]+))?")
ANY_REGION = "any"
MAX_STDERR = 600  # characters of a crashed rank's last words
GRADER_FAILED = "the grader failed"  # the kind of a verdict that is no student's fault


@dataclass(eq=False)
class Verdict(Exception):  # noqa: N818 (not all of them are errors)
    """What a graded test found.

    Args:
        cause: one sentence that says what to change; "" where that is not known.
        observed: what was seen, in one or more lines; it does not repeat the cause.
        kind: what verdicts about one mistake have in common. The cause by default: it needs one of its own if it holds
            numbers of one run, such as ranks or sizes.
        seed: what the inputs were drawn with; None where none were drawn.
        first: a region that must come first: nobody can judge this one before it passes.
    """

    cause: str = ""
    observed: str = ""
    kind: str = ""
    seed: int | None = None
    first: str = ""

    status: ClassVar[str] = ""

    def __str__(self) -> str:
        return "\n".join(filter(None, (self.cause, self.observed)))


class Wrong(Verdict):
    status = "wrong"


class NotAttempted(Verdict):
    status = "not attempted"


class Crashed(Verdict):
    status = "crashed"


class Deadlocked(Verdict):
    status = "deadlocked"


class TimedOut(Verdict):
    status = "timed out"


class Skipped(Verdict):
    status = "skipped"


class NotGradedHere(Verdict):
    status = NOT_GRADED_HERE


def needs_a_network() -> NotGradedHere:
    return NotGradedHere(
        "this test needs a network that contains nothing else, and this machine cannot create one, so it was not run; "
        "ask the course staff where its points are graded"
    )


def verdict_of(result: Result, region: str, known: Mapping[str, str] | None = None) -> Verdict | None:
    """Judge a run that did not return on every rank, or left a message; None if neither. `known`: see crashes.py."""
    if result.outcome == "returned":
        return lost_message(result)
    todo = missing_region(result)
    if todo:
        return not_attempted(region) if todo in (region, ANY_REGION) else builds_on(todo)
    kinds = {"mismatch": Wrong, "deadlock": Deadlocked, "deadline": TimedOut}
    kind = kinds.get(result.outcome, Crashed)
    if any(rank.error and rank.error.type == SILENTLY_WRONG for rank in result.ranks):
        kind = Wrong  # outside of here this call would have gone through, with a wrong result
    observed = result.story() + _details(result)
    if kind is Deadlocked:
        cause, same = conclusion(result)
        return Deadlocked(cause, observed, same)
    return kind(crashes.cause_of(observed, known or {}) if kind is Crashed else "", observed)


def not_attempted(region: str) -> NotAttempted:
    return NotAttempted(f"region {region} is not written yet; run `python -m pytest --hint {region}` for a hint")


def part_unwritten(region: str, file: str, lines: Sequence[int], parts: int) -> Crashed:
    places = ", ".join(f"{file}:{line}" for line in lines)
    verb = "is" if len(lines) == 1 else "are"
    cause = f"region {region} has {parts} parts, and {len(lines)} of them {verb} not written yet"
    return Crashed(f"{cause}: {places}", kind=cause)


def placeholder_left(region: str, file: str) -> Crashed:
    return Crashed(
        f'your lines for region {region} are in {file}, but its line `raise NotImplementedError("TODO {region}: ...")` '
        "is still there, and was reached: delete it"
    )


def builds_on(region: str) -> Skipped:
    """Return the verdict of a test that could not run: a region that it builds on is not written in a file it runs."""
    return Skipped(first=region)


def missing_region(result: Result) -> str:
    """Return the region whose placeholder a rank has reached; ANY_REGION if it names none; "" if no rank has."""
    for rank in result.ranks:
        if rank.error and rank.error.type == "NotImplementedError" and (match := _TODO.search(rank.error.message)):
            return match[1] or ANY_REGION
    return ""


def conclusion(result: Result) -> tuple[str, str]:
    """Say what the facts of a deadlock in collectives mean, with ranks and without; "" if they are clear enough."""
    stuck = dict(sorted(result.fault.stuck.items())) if result.fault else {}
    returned = [rank.rank for rank in result.ranks if rank.outcome == "returned"]
    for call in (call for call in stuck.values() if not call.point_to_point):
        names: dict[str, list[int]] = {}
        for rank, other in stuck.items():
            if (other.group, other.number) == (call.group, call.number) and not other.point_to_point:
                names.setdefault(other.name, []).append(rank)
        calls = [f"{rank_names(ranks)} call{'s' if len(ranks) == 1 else ''} {name}" for name, ranks in names.items()]
        if len(calls) > 1:
            same = "all ranks must make the same calls in the same order"
            return f"{calls[0]} where {calls[1]}: {same}", f"{same}: {' and '.join(names)}"
        if missing := [rank for rank in returned if rank in call.members]:
            never_call = "never calls" if len(missing) == 1 else "never call"
            same = "all ranks must make the same calls"
            return f"{calls[0]}, but {rank_names(missing)} {never_call} it: {same}", f"{same}: {call.name}"
    return "", ""


def lost_message(result: Result) -> Wrong | None:
    """Return which message nobody has waited for, if there is one. Its values arrive here; with gloo, not always."""
    for rank in result.ranks:
        for call in rank.calls:
            if call.name == "send" and not call.waited:
                advice = "gloo may lose it, and then the program hangs; keep what isend returns, and call its wait()"
                message = f"message #{call.number} to rank {call.root} ({call.where})"
                return Wrong(f"rank {rank.rank} never waits for {message}: {advice}", kind=advice)
    return None


def _details(result: Result) -> str:
    """Return the student's lines of a crash; if there are none, the last that a rank printed before it died."""
    for rank in result.ranks:
        frames = [frame for frame in rank.error.trace if frame.text] if rank.error else []  # the grader's have no text
        if frames:
            return "\n" + "\n".join(_line(frame) for frame in frames[-3:])
    for rank in result.ranks:
        if rank.outcome in ("killed", "exited") and rank.stderr.strip():
            return "\n" + last_words(rank.stderr)
    return ""


def last_words(stderr: str) -> str:
    """Return the end of a script's stderr, without progress bars and warnings, which differ from run to run."""
    lines = [line.rstrip() for line in re.split(r"[\r\n]+", stderr)]
    return "\n".join(line for line in lines if line and not re.search(r"it/s|s/it|\x1b|^\[W\d", line))[-MAX_STDERR:]


def _line(frame: Frame) -> str:
    return f"  {frame.file}:{frame.line}  {frame.text}"
