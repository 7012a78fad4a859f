"""Builds report/report.md from the records of all tasks, and the PDF from it; the student's own words are kept.

runs/, submit_figures/ -> findings, tables, figures -> report.md (with sections for the student's words) -> PDF
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common.paths import atomic_write
from course.table import Course
from handin import sections
from handin.gpt2_runs import made_figures, read_gpt2
from handin.measures import Chosen, choose, doubts_about, missing_runs
from handin.report_pictures import Pictures
from handin.runs import Run, find_runs
from handin.sections import Findings
from handin.student import Student, remembered
from handin.task4 import traffic
from handin.task_tables import exposed, micro_batches, shares, timelines
from handin.words import is_unchanged_outside, read_words, section, with_fingerprint

TITLE = "Distributed Training of Language Models"
ASKS = {
    "implementation": "What is not obvious from your code? What went wrong, and how did you find it? Which machine?",
    "task1": "Is the loss what you expect of a new head with two labels? How does the metric change, and how does it "
    "compare with guessing? Why is the first iteration left out of the mean? From --profile: which tensors hold most "
    "of the parameters, and how many bytes of gradients does one step produce?",
    "task2a": "Why do rank 0 and rank 1 differ? How many bytes does each send and receive in one iteration? What "
    "happens with 16 workers?",
    "reasons": "Why do 2a, 2b and 3 differ, or why not? Calls and bytes, latency and bandwidth, overlap; cite figures. "
    "Why can task 3's script not measure the communication around `backward`?",
    "timelines": "In the picture of 2a: which rank do the others wait for, and what does rank 0 do in the meantime? "
    "2b: which rank arrives last, and what does that cost the others? 3: which bucket cannot be hidden, and why? "
    "Pipeline: how large is the bubble, compared with (K-1)/(M+K-1)? ZeRO-3 (bonus): which gathers are hidden, and by "
    "what?",
    "scalability": "What do your figures say about more workers, a larger model, a slower network?",
    "traffic": "Which tensors are sent in one iteration: shapes, dtype, bytes, and which few hold most of them? What "
    "changes with the batch size and what does not, and why? Why is the ratio larger for the tiny model than for "
    "BERT-base? What changes with bf16? How many bytes does each of 4 workers send in an epoch of RTE with BERT-base, "
    "and what is the shortest time in which this can be sent at 1 Gbit/s? What does your prediction of the "
    "communication leave out, and which part of the difference would remain if all gradients travelled as one tensor?",
    "gpt2": "How far are both speed-ups from the ideal, and what limits them? Two workers on two cores: compare them "
    "with one worker on one thread, and with one worker that uses all cores. Do the same for the pipeline: compare it "
    "with model_parallel, and with the uncut model on all cores (mode none). When do more workers pay on one machine?",
    "pipeline": "What is the largest speed-up for your numbers of partitions and micro-batches, and what else limits "
    "the speed-up? Why does it stop growing? Why must all tasks of a clock cycle be in the queues before the first "
    "result is taken out?",
    "beyond": "Bonus. Why is the exposed communication never zero? Which bucket size was best, and what limits it on "
    "either side? Two ranks send the same two buckets in different orders: what happens if they have the same size, "
    "and what if they do not? Do the bytes kept and sent by DDP, zero1, zero2 and zero3 agree with the table in the "
    "README? When is the step of zero3 almost as fast as that of zero2, and when is it not? For tensor "
    "and 1f1b each: which part of the bytes grows with the batch, and which depends only on the model? Why do tensor "
    "groups stay on one machine?",
}
BONUS = "beyond"  # a section that may stay empty


@dataclass(frozen=True)
class Report:
    """The report that was built. `kept_copy`: the earlier report, if it was changed outside its sections."""

    markdown: Path
    pdf: Path
    findings: Findings
    kept_copy: Path | None


def build_report(tree: Path, course: Course, student: Student | None = None, runs: Path | None = None) -> Report:
    """Build both forms of the report in tree/report.

    Raises:
        InputError: the sections of an earlier report are damaged.
    """
    folder = tree / "report"
    path = folder / "report.md"
    earlier = path.read_text(encoding="utf-8") if path.exists() else ""
    words = read_words(earlier, "report/report.md")
    student = student or remembered(earlier)
    findings = Findings()
    pictures = Pictures(folder / "figures")
    text = with_fingerprint(write_markdown(tree, course, student, runs or tree / "runs", words, findings, pictures))
    pictures.draw()
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
    tree: Path,
    course: Course,
    student: Student | None,
    runs: Path,
    words: dict[str, str],
    findings: Findings,
    pictures: Pictures,
) -> str:
    """The whole report as text. Nothing is written: `findings` and `pictures` take what comes up on the way."""
    usable, unusable = find_runs(tree, runs)
    demo, _ = find_runs(tree, runs / "demo")  # used only for timelines
    demo = [run for run in demo if run.first.get("timeline")]
    chosen = choose(usable)
    findings.doubt(unusable)
    stopped = sections.stopped_runs(tree, runs)
    findings.doubt(f"{run}: the newest run was stopped: {content['conclusion']}" for run, content in stopped.items())
    for run in usable:
        findings.doubt(f"{run.name}: {doubt}" for doubt in doubts_about(run, run in chosen.measured))
    findings.missing += missing_runs(chosen, tree)
    own = {name: section(name, words, ask) for name, ask in ASKS.items()}
    parts = {
        "Implementation details": _implementation(tree, course, findings, own["implementation"]),
        "Task 1: losses and metric": _task1(chosen, findings, pictures, own["task1"]),
        "Time per iteration of tasks 2a, 2b and 3": _times(chosen, findings, pictures),
        "Communication of tasks 2a and 2b": shares(chosen.timed, findings) + "\n" + own["task2a"],
        "Reasons for the differences": own["reasons"],
        "Who computes, who sends, who waits": timelines(tree, [*usable, *demo], findings, pictures)
        + f"\n{own['timelines']}",
        "Scalability": sections.scalability(chosen.one, chosen.scaled, findings) + "\n" + own["scalability"],
        "Network traffic": traffic(tree, chosen.traffic, runs, findings, pictures) + "\n" + own["traffic"],
        "GPT-2: data parallel and pipeline": _gpt2(tree, runs, usable, findings, pictures, own["gpt2"]),
        "Pipeline: numbers of micro-batches": micro_batches(usable, findings) + "\n" + own["pipeline"],
        "Beyond DDP (bonus)": exposed(usable, findings) + "\n" + own["beyond"],
        "Which run each number came from": sections.where_from([*usable, *demo], findings)
        + sections.stopped_tables(stopped),
    }
    if empty := [name for name in ASKS if name != BONUS and not words.get(name, "").strip()]:
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
    """Return what is missing or suspicious, for the top of the report; nothing if it is finished."""
    text = ""
    if findings.missing:
        lines = "\n".join(f"- {what}: `{command}`" for what, command in findings.missing)
        text += f"## Missing\n\n{lines}\n\n"
    if findings.doubts:
        lines = "\n".join(f"- {doubt}" for doubt in findings.doubts)
        text += f"## Suspicious\n\nMeasure these again, or explain them below.\n\n{lines}\n\n"
    return text


def _implementation(tree: Path, course: Course, findings: Findings, words: str) -> str:
    parts = [words]
    for task in course.tasks.values():
        if code := sections.own_lines(tree, course, task.id, findings):
            parts.append(f"### {task.title}{' (bonus)' if task.bonus else ''}\n\n{code}")
    return "\n".join(parts)


def _task1(chosen: Chosen, findings: Findings, pictures: Pictures, words: str) -> str:
    one = [chosen.metrics] if chosen.metrics else []
    parts = [
        sections.first_losses(one, findings),
        sections.metrics(chosen.metrics, findings),
        pictures.losses("loss_task1.png", "Training loss of task 1", one),
    ]
    return "\n".join([*parts, words])


def _times(chosen: Chosen, findings: Findings, pictures: Pictures) -> str:
    runs = ([chosen.one] if chosen.one else []) + list(chosen.timed)
    counted = sections.counted(chosen.timed)
    parts = [
        (f"Iterations {counted} on rank 0: mean ± standard error. " if counted else "")
        + "`time / DDP` is the time divided by task 3's. Calls are "
        "those of collectives in one iteration; megabytes are the tensors that rank 0 passed to these calls.\n",
        sections.times(chosen.timed, findings),
        pictures.times("times.png", "Mean time per iteration; error bars show two standard errors", chosen.timed),
        "First five losses, as the mean over the workers:\n",
        sections.first_losses(runs, findings),
        pictures.losses("losses.png", "Training loss of all tasks", runs),
    ]
    return "\n".join(parts)


def _gpt2(tree: Path, runs: Path, usable: Sequence[Run], findings: Findings, pictures: Pictures, words: str) -> str:
    source = tree / "submit_figures"
    on_cpu = not any(run.slot == "pipeline" and run.setting["device"] == "cuda" for run in usable)
    gpt2 = read_gpt2(source, on_cpu)
    plots = pictures.of_gpt2(source, findings)
    pairs = ["".join(plots[i : i + 2]) for i in range(0, len(plots), 2)]  # one paragraph: side by side in the PDF
    trace = pictures.copied(
        _pipeline_run(runs) / "trace.png", "One step: each partition over time", "pipeline_trace.png"
    )
    for run in usable:
        if run.slot in ("task2b_gpt2", "pipeline") and made_figures(run, gpt2):
            findings.use(run, "GPT-2 figures")
    return "\n".join([sections.gpt2_tables(gpt2, findings), *pairs, trace, words])


def _pipeline_run(runs: Path) -> Path:
    """Return the folder with the newest run of the pipeline that has a record and a trace: not of one that crashed."""
    folders = [runs / "pipeline", runs / "pipeline.kept"]
    whole = (path for path in folders if (path / "trace.png").is_file() and (path / "rank0.json").is_file())
    return next(whole, folders[0])


def summary(report: Report, tree: Path) -> Sequence[str]:
    """Return what the command prints."""
    lines = [f"missing: {what}\n         {command}" for what, command in report.findings.missing]
    lines += [f"suspicious: {doubt}" for doubt in report.findings.doubts]
    if report.kept_copy:
        name = report.kept_copy.relative_to(tree)
        lines.append(f"note: the earlier report was changed outside of its sections; it is kept as {name}")
    return [*lines, f"report: {report.markdown.relative_to(tree)} and {report.pdf.relative_to(tree)}"]
