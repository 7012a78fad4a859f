"""Builds report/report.md from the records of all tasks, and the PDF from it; the student's own words are kept.

runs/, submit_figures/ -> findings, tables, figures -> report.md (with rooms for words) -> PDF
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common.course import Course
from common.paths import atomic_write
from handin import figures, sections
from handin.choice import Chosen, choose, missing_runs
from handin.gpt2 import read_gpt2
from handin.measures import doubts_about
from handin.runs import find_runs
from handin.sections import Findings
from handin.student import Student, remembered
from handin.traffic import traffic
from handin.words import is_unchanged_outside, read_words, room, seal

TITLE = "Distributed Training of Language Models"
ASKS = {
    "implementation": "What is not plain from your code? What went wrong, and how did you find it? Which machine?",
    "task1": "Is the loss what you expect of a new head with two labels? How does the metric change, against guessing?",
    "reasons": "Why do 2a, 2b and 3 differ, or why not? Calls and bytes, latency and bandwidth, overlap; cite figures.",
    "scalability": "What do your figures say about more workers, a larger model, a slower network?",
    "traffic": "Optional. How do traffic and tensor size change with the batch size? Observed against expected: why?",
    "gpt2": "How far are both speed-ups from the ideal, and where does the rest go?",
}


@dataclass(frozen=True)
class Report:
    """What was built. `kept_copy`: the earlier report, if it had been changed outside of its rooms."""

    markdown: Path
    pdf: Path
    findings: Findings
    kept_copy: Path | None


def build_report(tree: Path, course: Course, student: Student | None = None, runs: Path | None = None) -> Report:
    """Build both forms of the report in tree/report.

    Raises:
        InputError: an earlier report whose rooms are damaged: whose words are whose cannot be told then.
    """
    folder = tree / "report"
    path = folder / "report.md"
    earlier = path.read_text(encoding="utf-8") if path.exists() else ""
    words = read_words(earlier, "report/report.md")
    student = student or remembered(earlier)
    findings = Findings()
    text = seal(write_markdown(tree, course, student, runs or tree / "runs", words, findings))
    kept_copy = None
    if earlier and not is_unchanged_outside(earlier):
        kept_copy = _free_name(folder)
        path.rename(kept_copy)
    with atomic_write(path) as file:
        file.write(text)
    pdf = folder / f"{student.stem if student else 'draft'}.pdf"
    _write_pdf(text, pdf, student)
    return Report(path, pdf, findings, kept_copy)


def _free_name(folder: Path) -> Path:
    number = 1
    while (name := folder / f"report.old{number}.md").exists():
        number += 1
    return name


def _write_pdf(text: str, path: Path, student: Student | None) -> None:
    from handin.pdf import markdown_to_pdf

    content = markdown_to_pdf(text, path.parent, TITLE, student.name if student else "")
    with atomic_write(path, "wb") as file:
        file.write(content)


def write_markdown(
    tree: Path, course: Course, student: Student | None, runs: Path, words: dict[str, str], findings: Findings
) -> str:
    """The whole report as text; draws and copies its figures into report/figures on the way."""
    found, unusable = find_runs(tree, runs)
    chosen = choose(found)
    findings.doubt(unusable)
    for run in found:
        findings.doubt(f"{run.name}: {doubt}" for doubt in doubts_about(run, run in chosen.used))
    findings.missing += missing_runs(chosen, tree)
    rooms = {name: room(name, words, ask) for name, ask in ASKS.items()}
    parts = {
        "Implementation details": _implementation(tree, course, findings, rooms["implementation"]),
        "Task 1: losses and metric": _task1(tree, chosen, findings, rooms["task1"]),
        "Time per iteration of tasks 2a, 2b and 3": _times(tree, chosen, findings),
        "Reasons for the differences": rooms["reasons"],
        "Scalability": _scalability(chosen, findings, rooms["scalability"]),
        "Network traffic": traffic(tree, runs, findings) + "\n" + rooms["traffic"],
        "GPT-2: data parallel and pipeline": _gpt2(tree, runs, findings, rooms["gpt2"]),
        "Which run each number came from": sections.where_from(found, chosen.used),
    }
    left_over = {name: text for name, text in words.items() if name not in ASKS and text.strip()}
    if left_over:  # rooms that an earlier version of this command had
        parts["Further notes"] = "\n".join(room(name, words, "kept from an earlier report") for name in left_over)
    if empty := [name for name in ASKS if name != "traffic" and not words.get(name, "").strip()]:
        findings.missing.append((f"your own words: {', '.join(empty)}", "edit report/report.md"))
    body = "\n".join(f"## {head}\n\n{part}" for head, part in parts.items())
    return f"{_head(student)}\n{_unfinished(findings)}{body}\n"


def _head(student: Student | None) -> str:
    explained = (
        "<!-- Built by `python submit.py report`. Write between the lines `your words` and `end of your words`: only "
        "that is kept when the report is built again. -->\n"
    )
    if not student:
        return f"# {TITLE}\n\n{explained}"
    return f"# {TITLE}\n\n{student.name}, {student.netid}\n\n{student.comment}\n{explained}"


def _unfinished(findings: Findings) -> str:
    """What is missing and what cannot be, where nobody can overlook it; nothing in a finished report."""
    text = ""
    if findings.missing:
        lines = "\n".join(f"- {what}: `{command}`" for what, command in findings.missing)
        text += f"## Missing\n\n{lines}\n\n"
    if findings.doubts:
        lines = "\n".join(f"- {doubt}" for doubt in findings.doubts)
        text += f"## Doubtful\n\nMeasure these again, or say below why they are as they are.\n\n{lines}\n\n"
    return text


def _implementation(tree: Path, course: Course, findings: Findings, words: str) -> str:
    parts = [words]
    for task in course.tasks.values():
        if code := sections.own_lines(tree, course, task.id, findings):
            parts.append(f"### {task.title}\n\n{code}")
    return "\n".join(parts)


def _task1(tree: Path, chosen: Chosen, findings: Findings, words: str) -> str:
    one = chosen.metrics
    parts = [sections.first_losses([one] if one else [], findings), sections.metrics(one)]
    if one and one.whole_epochs < sections.EPOCHS:
        findings.doubt([f"{one.name}: {one.whole_epochs} whole epochs, the course asks for {sections.EPOCHS}"])
    if one and figures.draw_losses(tree / "report/figures/loss_task1.png", [one]):
        parts.append(_picture("loss_task1.png", f"Training loss of task 1, {one.name}"))
    return "\n".join([*parts, words])


def _times(tree: Path, chosen: Chosen, findings: Findings) -> str:
    text = (
        "Over the first 40 iterations without the first, on rank 0: mean ± standard error. `x DDP` are multiples of "
        "task 3's time; calls and megabytes are what rank 0 handed to collectives in one iteration.\n\n"
    )
    text += sections.times(chosen.timed, findings)
    if figures.draw_times(tree / "report/figures/times.png", chosen.timed):
        text += "\n" + _picture("times.png", "Mean time per iteration; the whiskers are two standard errors")
    runs = ([chosen.one] if chosen.one else []) + list(chosen.timed)
    text += "\nFirst five losses, as the mean over the workers:\n\n" + sections.first_losses(runs, findings)
    if figures.draw_losses(tree / "report/figures/losses.png", runs):
        text += "\n" + _picture("losses.png", "Training loss of all tasks")
    return text


def _scalability(chosen: Chosen, findings: Findings, words: str) -> str:
    text = (
        "Speed-up: time of one worker divided by the time of several, at the same total batch. Times that differ by "
        "less than two standard errors of their difference are inside the noise.\n\n"
    )
    return text + sections.scalability(chosen.one, chosen.scaled, findings) + "\n" + words


def _gpt2(tree: Path, runs: Path, findings: Findings, words: str) -> str:
    source, to = tree / "submit_figures", tree / "report/figures"
    pictures = figures.copy_gpt2_figures(source, to, findings)
    if figures.copy_figure(runs / "pipeline/trace.png", to / "pipeline_trace.png"):
        pictures.append(("pipeline_trace.png", "One step: what each partition did, and when"))
    text = sections.gpt2_tables(read_gpt2(source), findings)
    pairs = ["\n".join(_picture(*picture).strip() for picture in pair) + "\n" for pair in _pairs(pictures)]
    return "\n".join([text, *pairs, words])


def _pairs(pictures: Sequence[tuple[str, str]]) -> list[Sequence[tuple[str, str]]]:
    """Pictures of one paragraph stand side by side in the PDF."""
    return [pictures[i : i + 2] for i in range(0, len(pictures), 2)]


def _picture(name: str, caption: str) -> str:
    return f"![{caption}](figures/{name})\n"


def summary(report: Report, tree: Path) -> Sequence[str]:
    """What the command prints."""
    lines = [f"missing: {what}\n         {command}" for what, command in report.findings.missing]
    lines += [f"doubtful: {doubt}" for doubt in report.findings.doubts]
    if report.kept_copy:
        name = report.kept_copy.relative_to(tree)
        lines.append(f"note: the earlier report was changed outside of its rooms; it is kept as {name}")
    return [*lines, f"report: {report.markdown.relative_to(tree)} and {report.pdf.relative_to(tree)}"]
