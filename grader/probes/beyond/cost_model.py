"""Runs the functions of the cost model on given cases, in one process."""

from typing import Any

from grader.inside.context import Context
from grader.wire.values import Fields

PARTS = ("total", "exposed", "hidden")


def averages(context: Context) -> list[float | str]:
    """Seconds of one way to average. Arguments: file, function, cases (size, workers, latency, bandwidth)."""
    a = context.arguments
    model = context.load(a["file"])
    function = getattr(model, a["function"])
    cases = [(size, workers, model.Link(latency, bandwidth)) for size, workers, latency, bandwidth in a["cases"]]
    return [number(function(*case)) for case in cases]


def steps(context: Context) -> list[Fields]:
    """step_time in each case. Arguments: file, cases (forward, backward, optimizer, [(ready, communication), ...]).

    Returns `times` (total, exposed, hidden), or any other result as `other`; `kept`: the list of buckets is unchanged.
    """
    model = context.load(context.arguments["file"])
    found: list[Fields] = []
    for forward, backward, optimizer, pairs in context.arguments["cases"]:
        buckets = [model.TimedBucket(ready, communication) for ready, communication in pairs]
        given = list(buckets)
        step = model.step_time(forward, backward, optimizer, buckets)
        if all(hasattr(step, name) for name in PARTS):
            found.append({"times": [number(getattr(step, name)) for name in PARTS], "kept": buckets == given})
        else:
            found.append({"other": repr(step)[:80], "kept": True})
    return found


def number(value: Any) -> float | str:
    """The value as a float; how it looks if it is no number."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return repr(value)[:80]
