"""Builds report/report.md from the records of all tasks, and the PDF from it; the student's own words are kept.

    runs/, submit_figures/ -> tables, figures, findings -> report.md, with the student's words -> PDF

What is missing or suspicious comes first, then the measurements and questions of each part, and the code at the end.
"""

import itertools
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common.paths import atomic_write
from course.next_step import open_regions, written
from course.table import Course
from handin import own_figures
from handin.bert import ladder, task1
from handin.figures import ReportFigures
from handin.findings import Findings
from handin.gpt2 import beyond, pipeline, scaling
from handin.pdf import markdown_to_pdf
from handin.predictions import in_lines, in_table, read_predictions
from handin.records import Run, Runs, find_runs
from handin.student import Student, remembered
from handin.traffic import traffic
from handin.words import is_unchanged_outside, read_words, section, with_fingerprint

EXPLAINED = (
    "<!-- Built by `python submit.py report`. Write between the lines `your words` and `end of your words`: only that "
    "is kept when the report is built again. -->\n\n"
)
WRITERS = {  # key of a section in report.toml -> what writes its measurements
    "task1": task1,
    "ladder": ladder,
    "traffic": traffic,
    "scaling": scaling,
    "pipeline": pipeline,
    "beyond": beyond,
    "implementation": lambda *_: "",
}


@dataclass(frozen=True)
class Question:
    """A question. A student's answer is found again by `name`; it must contain the own figures `cites`."""

    section: str
    name: str
    text: str
    points: int
    task: str = ""
    cites: Sequence[str] = ()


@dataclass(frozen=True)
class Section:
    """A section: measurements, what explains them, and below them questions."""

    key: str
    heading: str
    questions: list[Question]
    tasks: tuple[str, ...] = ()
    explained: str = ""


def sections_of(course: Course) -> list[Section]:
    """Return the sections and questions on the tasks that a course has."""
    texts = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    questions = [Question(**row) for row in texts["question"] if row.get("task", "") in {"", *course.tasks}]
    sections = [
        Section(key, questions=[question for question in questions if question.section == key], **row)
        for key, row in texts["section"].items()
    ]
    return [section for section in sections if not section.tasks or set(section.tasks) & course.tasks.keys()]


@dataclass(frozen=True)
class RunReport:
    """The report that was built. kept_copy: the earlier one, if anything was written outside of its sections."""

    markdown: Path
    pdf: Path
    findings: Findings
    runs: list[Run]  # whose numbers it has
    predicted: list[str]  # beside what was measured
    kept_copy: Path | None


def build_report(tree: Path, course: Course, student: Student | None = None, folder: Path | None = None) -> RunReport:
    """Build both forms of the report in tree/report from the runs in `folder`, by default tree/runs.

    Raises:
        InputError: the sections of an earlier report are damaged.
    """
    path = tree / "report" / "report.md"
    earlier = path.read_text(encoding="utf-8") if path.exists() else ""
    words, student = read_words(earlier, "report/report.md"), student or remembered(earlier)
    findings, runs = Findings(), find_runs(folder or tree / "runs", tree / "submit_figures")
    findings.doubts += runs.unusable
    body, empty, names = "", [], set()
    for part in sections_of(course):
        body += f"## {part.heading}\n\n{part.explained}\n\n{measurements(part, runs, findings, path.parent)}"
        for question in part.questions:
            own = words.get(question.name, "")
            body += f"**{' '.join(question.text.split())}**\n\n{_asked_for(question)}{section(question.name, own)}"
            empty += [question.name] * (not own and question.task not in course.bonus_tasks)
            names.add(question.name)
    shown = [run for run in runs.found if re.search(rf"[`(]{re.escape(run.name)}[`)]", body)]
    findings.doubts += [f"{run.name}: {problem}" for run in shown for problem in run.problems]
    predictions, figures = read_predictions(path.parent), own_figures.own_figures(runs)
    if predictions:
        body += f"## Predictions\n\n{in_table(predictions, figures)}"
    body += f"## Which run each number came from\n\n{_provenance(shown)}"
    body += f"## Appendix: code\n\n{_code(tree, course, findings)}"
    if empty:
        findings.miss(f"answers to {len(empty)} questions: {', '.join(empty)}", "edit report/report.md")
    text = with_fingerprint(
        f"# {course.title}\n\n{student.lines if student else ''}{EXPLAINED}{_unfinished(findings)}{body}"
    )
    kept_copy = None
    if earlier and not (is_unchanged_outside(earlier) and words.keys() <= names):
        copies = (path.with_name(f"report.old{number}.md") for number in itertools.count(1))
        kept_copy = path.rename(next(copy for copy in copies if not copy.exists()))
    pdf = path.with_name(f"{student.stem if student else 'draft'}.pdf")
    content = markdown_to_pdf(text, path.parent, course.title, student.name if student else "")
    for target, data in ((path, text.encode()), (pdf, content)):
        with atomic_write(target, "wb") as file:
            file.write(data)
    return RunReport(path, pdf, findings, shown, in_lines(predictions, figures), kept_copy)


def _asked_for(question: Question) -> str:
    """Return the line below a question: its points, and which own figures its answer must contain."""
    cites = "; your figures: " + ", ".join(map(own_figures.describe, question.cites)) if question.cites else ""
    return f"*{question.points} points{cites}*\n\n"


def measurements(part: Section, runs: Runs, findings: Findings, folder: Path) -> str:
    """Return the tables and figures of a section, from the records alone."""
    try:
        return WRITERS[part.key](runs, findings, ReportFigures(folder / "figures"))
    except Exception as error:  # whatever is in records of another version, or in the student's expected.py
        findings.doubt(f"{part.heading}: a record, or a file of yours that reads it, cannot be used ({error!r})")
        return "A record of these runs cannot be used.\n\n"


def _unfinished(findings: Findings) -> str:
    """Return what is missing or suspicious, for the top of the report; nothing if it is finished."""
    missing = "".join(f"- {what}: `{command}`\n" for what, command in findings.missing)
    doubts = "".join(f"- {doubt}\n" for doubt in findings.doubts)
    text = f"## Missing\n\n{missing}\n" if missing else ""
    return text + (f"## Suspicious\n\nMeasure these again, or explain them below.\n\n{doubts}\n" if doubts else "")


def _provenance(shown: list[Run]) -> str:
    """Return how each run was made."""
    lines = []
    for run in shown:
        of, ranks = run.setting, f"{len(run.records)} of {run.workers} rank{'s' if run.workers > 1 else ''}"
        work = f"{of['model']} on {of['data']}, batch {of['total batch']}, seed {of['seed']}"
        place = f"{of['machine']}, {of['device']}, torch {of['torch']}"
        lines.append(f"- `{run.name}`: {ranks}, {len(run.seconds)} iterations; {work}; {place}\n")
    return f"{''.join(lines)}\n" if lines else "No run.\n\n"


def _code(tree: Path, course: Course, findings: Findings) -> str:
    """Return the student's lines of every region, from the file in which the region first appears."""
    bodies, still_open, text = written(course, tree), open_regions(course, tree), ""
    for task in course.tasks.values():
        rows = [row for row in course.regions.values() if row.task == task.id]
        solved = [row for row in rows if row.id in bodies and row.id not in still_open]
        is_bonus = task.id in course.bonus_tasks
        text += f"### {task.title}{' (bonus)' if is_bonus else ''}\n\n" if solved or not is_bonus else ""
        for row in solved:
            lines = "\n\n".join(body.strip("\n") for body in bodies[row.id])
            fence = "````" if "```" in lines else "```"
            title = row.title.replace("_", "\\_")  # Markdown would take __init__ for bold
            text += f"#### {row.id} {title} ({row.file})\n\n{fence}python\n{lines}\n{fence}\n\n"
        if unsolved := [row.id for row in rows if row not in solved and not row.bonus]:
            text += f"Not solved: {', '.join(unsolved)}.\n\n"
            findings.miss(f"regions {', '.join(unsolved)} are not solved", f"pytest --hint {unsolved[0]}")
    return text


def summary(report: RunReport, tree: Path) -> list[str]:
    """Return what the command prints."""
    lines = [f"missing: {what}\n         {command}" for what, command in report.findings.missing]
    lines += [f"suspicious: {doubt}" for doubt in report.findings.doubts]
    lines += report.predicted
    if report.kept_copy:
        name = report.kept_copy.relative_to(tree)
        lines.append(f"note: the earlier report was changed outside of its sections; it is kept as {name}")
    return [*lines, f"report: {report.markdown.relative_to(tree)} and {report.pdf.relative_to(tree)}"]
