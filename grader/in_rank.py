"""Runs functions of a lesson's test file in ranks, beside a student's code.

    @in_rank
    def average(context, lesson, inputs):                  # runs in every rank, with torch
        model = ...
        lesson.average_gradients(model)                    # the student's function
        return {"grad": copy_of(model.weight.grad)}

    result = run(grade, average, [first, second])          # two ranks; each gets its own inputs and no other
    result.values[0]["grad"]                               # what rank 0 returned

A rank gets the source of this one function and of what it `uses`, and nothing else of the file, because a student's
code can read all that the rank gets. There the function finds the names of grader/inside/tools.py, torch among them.
"""

import inspect
import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from common.paths import ROOT
from grader import crashes
from grader.call_checks import why_stuck
from grader.grading import Grade
from grader.ranks.outcome import Result
from grader.verdicts import Crashed, Deadlocked, Wrong
from grader.wire.request import DEADLINE, RankFunction, Request, Source

Sources = Sequence["Callable[..., object] | type | str"]  # functions, classes, or paths of whole files


def in_rank(
    function: Callable[..., object] | None = None, *, uses: Sources = (), preload: Sequence[str] = (), first: str = "",
    join: bool = True, allows: Sequence[str] = (),
) -> Any:  # fmt: skip
    """Mark a function `(context, lesson, inputs)` as one that runs in ranks. A generator's values become a list.

    Args:
        uses: functions and classes of this file, or paths of whole files, that it needs there.
        preload: groups of grader/inside/preload.py that it imports, so that not every rank has to.
        first: name of a function `(context)` among the sources that is called before the student's file is loaded. It
            can replace what that file imports.
        join: whether the process group is joined before the function is called.
        allows: what no other rank may do: "processes" (start some), "network" (connect to itself on loopback).
    """
    if function is None:
        return partial(in_rank, uses=uses, preload=preload, first=first, join=join, allows=allows)
    sources = tuple(map(source_of, [*uses, function]))
    return RankFunction(function.__name__, sources, tuple(preload), first, join, tuple(allows))


def source_of(item: Callable[..., object] | type | str) -> Source:
    """Return the source of a function, a class or a file, with the place that tracebacks show."""
    if isinstance(item, str):
        return Source(item, 0, (ROOT / item).read_text(encoding="utf-8").split("\n"))
    lines, number = inspect.getsourcelines(item)
    begin = next(i for i, line in enumerate(lines) if line.lstrip().startswith(("def ", "class ")))
    file = Path(inspect.getfile(item))
    path = (file.relative_to(ROOT) if file.is_relative_to(ROOT) else file).as_posix()
    return Source(path, number - 1 + begin, textwrap.dedent("".join(lines[begin:])).split("\n"))


def run(
    grade: Grade, function: RankFunction, inputs: Sequence[object], hints: Mapping[str, str] | None = None,
    why_stuck: Callable[[Result], str] = why_stuck, where: str = "", **arguments: Any,
) -> Result:  # fmt: skip
    """Run a function on as many ranks as there are inputs. Raises the verdict if it does not return on every rank.

    Args:
        hints: words in an error message of torch or Python -> what they mean in this run; see crashes.py.
        why_stuck: says why the ranks wait for each other, "" if it cannot.
        where: begins the verdict, of a test with several runs.
    """
    result = run_to_any_end(grade, function, inputs, **arguments)
    if verdict := grade.verdict(result):
        if isinstance(verdict, Deadlocked):
            verdict.cause = why_stuck(result) or verdict.cause
        if isinstance(verdict, Crashed | Wrong):
            verdict.cause = crashes.find(str(verdict), hints or {}) or verdict.cause
        if verdict.cause:
            verdict.kind, verdict.cause = verdict.kind or verdict.cause, f"{where}{verdict.cause}"
        else:
            verdict.observed = f"{where}{verdict.observed}"
        raise verdict
    return result


def run_to_any_end(
    grade: Grade, function: RankFunction, inputs: Sequence[object], *, file: str = "", payloads: bool = True,
    measures: bool = False, deadline: float = DEADLINE, storages: Sequence[Mapping[str, bytes]] = (),
    full: tuple[int, int] | None = None, **arguments: object,
) -> Result:  # fmt: skip
    """Run a function on the region's file, or another one of the student's, and return the result however it ended.

    For the options see Request.
    """
    request = Request(
        inputs, file or grade.file, function, arguments, deadline, payloads, measures, storages=storages, full=full
    )
    return grade.result_of(request)


def run_alone(grade: Grade, function: RankFunction, inputs: Sequence[object], **arguments: object) -> list[Any]:
    """Return the values of a function in ranks that load no student's file: they may compute what is right."""
    request = Request(inputs, function=function, arguments=arguments)
    return list(grade.session.result_of(request, grade.region).values)
