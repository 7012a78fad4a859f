"""The probe that runs a function of a lesson's test file, whose source the rank gets; see grader/in_rank.py."""

import __future__

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from grader.inside import tools
from grader.inside.context import Context
from grader.inside.find import ROOT, SENT_SUFFIX


def run_source(context: Context) -> Any:
    """Return what the function returns; for a generator, the list of its values.

    The sources share one namespace, which is no module: no name in it can be taken for one of the student's file.
    """
    arguments = context.arguments
    names: dict[str, Any] = {"__name__": "in_rank"} | {name: getattr(tools, name) for name in tools.__all__}
    for source in arguments["sources"]:
        code = "\n" * source["before"] + "\n".join(source["lines"])
        file = str(Path(ROOT, source["path"])) + SENT_SUFFIX
        exec(compile(code, file, "exec", __future__.annotations.compiler_flag), names)  # annotations are not looked up
    if arguments["first"]:
        names[arguments["first"]](context)
    lesson = context.load(arguments["file"]) if arguments["file"] else None
    inputs = arguments["own_inputs"]
    if arguments["join"]:
        context.join()
    value = names[arguments["function"]](context, lesson, inputs)
    return list(value) if isinstance(value, Iterator) else value
