"""Two results of benchmark.compare side by side: two versions, two machines, or before and after a change."""

import json
import statistics
from pathlib import Path

from benchmark.measure.intervals import Interval, interval_text, ratio
from benchmark.measure.output import Json, text_table
from common.errors import InputError

WHERE_ONLY = {"output_dir", "overwrite_output_dir", "master_ip", "master_port"}  # where a command ran, not what it did


def read_result(path: Path) -> Json:
    """Return a comparison.json. Raises InputError if the file is none."""
    try:
        result = json.loads(path.read_text())
        assert result["steps_ms"] and result["settings"] and result["environment"]
    except (OSError, ValueError, KeyError, TypeError, AssertionError) as error:
        raise InputError(f"expected a comparison.json of benchmark.compare, got {path} ({error!r:.80})") from None
    return result  # type: ignore[no-any-return]


def differences(left: Json, right: Json) -> str:
    """Name what differs between two tables of names and values."""
    return "; ".join(f"{name} {left.get(name)} and {right.get(name)}" for name in left if left[name] != right.get(name))


def in_words(estimate: Interval) -> str:
    """Say what the ratio of the second result's time to the first one's means."""
    _, low, high = estimate
    if low is None or high is None:
        return "too few rounds to say"
    if low <= 1 <= high:
        return "no difference that these rounds show"
    return "B is faster" if high < 1 else "B is slower"


def compare_results(first: Path, second: Path) -> str:
    """Return a table of the second result over the first, and as its last line the figures in JSON.

    Raises InputError if their settings differ, or if they have no strategy in common.
    """
    left, right = read_result(first), read_result(second)
    settings = [{k: v for k, v in result["settings"].items() if k not in WHERE_ONLY} for result in (left, right)]
    if different := differences(*settings):
        raise InputError(f"the two results were measured with different settings: {different}")
    pairs = {label: (times, right["steps_ms"].get(label)) for label, times in left["steps_ms"].items()}
    if not any(times for _, times in pairs.values()):
        raise InputError(f"the results have no strategy in common: {', '.join(pairs)}; {', '.join(right['steps_ms'])}")
    environments = [result["environment"] | result["environment"].pop("versions") for result in (left, right)]
    lines, rows = [["strategy", "A, ms", "B, ms", "B / A [95 %]", ""]], []
    for label, (before, after) in pairs.items():
        if after:
            estimate = ratio(after, before, paired=False)
            medians = (f"{statistics.median(times):.1f}" for times in (before, after))
            lines.append([label, *medians, interval_text(*estimate), in_words(estimate)])
            rows.append(
                {"strategy": label, "ratio": estimate[0], "ratio_95": estimate[1:], "verdict": in_words(estimate)}
            )
    head = [f"A {first}", f"B {second}", f"A and B differ in: {differences(*environments)}"]
    return "\n".join([*head, text_table(lines), json.dumps({"rows": rows})])
