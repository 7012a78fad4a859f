"""The timelines of the report: where the time of a step went, and a picture for each task that has one."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.errors import InputError
from common.timeline.parts import NAMES as PARTS
from common.timeline.parts import milliseconds
from common.timeline.trace import read_trace
from handin.report_pictures import Pictures
from handin.runs import Run
from handin.schema import Shape, is_number, is_text, is_whole, misfit, or_null
from handin.sections import Findings, table

# Slot -> its name in the table, and the command that makes its timeline.
SHOWN = {
    "task2a": ("2a", "make demo"),
    "task2b": ("2b", "make demo"),
    "task3": ("3", "make demo"),
    "pipeline": (
        "pipeline",
        "python -m cluster.launch --workers 2 --timeline -- pipeline/run_gpt2.py --schedule gpipe",
    ),
    "beyond": ("ZeRO-3", ""),  # a bonus: never missing
}
TIMELINE: dict[str, Shape] = {
    "run": is_text,
    "clock_error": is_number,
    "steps": [{"rank": is_whole, "step": is_whole, **dict.fromkeys((*PARTS, "hidden"), or_null(is_number))}],
}


def timelines(tree: Path, runs: Sequence[Run], findings: Findings, pictures: Pictures) -> str:
    """A table of the parts of a step for every run with a usable timeline, and the pictures."""
    rows, shown = [], []
    for slot, (name, command) in SHOWN.items():
        mine = [run for run in runs if run.slot == slot and run.first.get("timeline")]
        if slot == "beyond":
            mine = [run for run in mine if run.first["config"].get("strategy") == "zero3"]
        problems = {run.name: problem(tree / run.name, run) for run in mine}
        findings.doubt(f"{run}: {said}" for run, said in problems.items() if said)
        usable = next((run for run in mine if not problems[run.name]), None)  # your own before the demo's
        if usable:
            findings.use(usable, "timeline")
            rows += [[name, *cells, usable.setting["model"], f"`{usable.name}`"] for cells in _cells(usable)]
            picture = tree / usable.name / "timeline.png"
            shown.append(pictures.copied(picture, f"{name}: who computes, sends and waits", f"timeline_{slot}.png"))
        elif command:
            findings.missing.append((f"the timeline of {name}", command))
    if not rows:
        return "No run with --timeline.\n"
    pairs = ["".join(shown[i : i + 2]) for i in range(0, len(shown), 2)]  # one paragraph: side by side in the PDF
    head = ["task", "rank", *(f"{part} (ms)" for part in PARTS), "hidden (ms)", "model", "run"]
    return "\n".join([table(head, rows), *pairs])


def problem(folder: Path, run: Run) -> str:
    """Return in one line why the timeline of a run cannot be used; "" if it can."""
    for record in run.records:
        name = f"rank{record['rank']}.json"
        if place := misfit(record.get("timeline"), TIMELINE, "timeline"):
            return f"{name} has no usable {place}: written by another version of the scripts; run it again"
        if record["timeline"]["run"] != run.first["timeline"]["run"]:
            return f"the timeline in {name} belongs to another run than that of rank 0; run it again"
    path = folder / "timeline.json"
    try:
        trace = read_trace(path)
    except InputError as error:
        return str(error).replace(str(path), path.name)
    if trace.run != run.first["timeline"]["run"]:
        return "timeline.json belongs to another run than the records; run it again with --timeline"
    return ""


def _cells(run: Run) -> list[list[object]]:
    """The mean of the steps for every rank."""
    steps: list[dict[str, Any]] = [row for record in run.records for row in record["timeline"]["steps"]]
    found: list[list[object]] = []
    for rank in sorted({row["rank"] for row in steps}):
        mine = [row for row in steps if row["rank"] == rank]
        columns = [[row[part] for row in mine] for part in (*PARTS, "hidden")]  # None: not measured, on a GPU
        means = [None if None in column else sum(column) / len(column) for column in columns]
        found.append([rank, *(milliseconds(value, 1) for value in means)])
    return found
