"""staff.rubric: sheets for real archives, what does not fit in altered ones, and points that come back."""

import csv
import json
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from common.paths import ROOT
from common.record import with_fingerprint
from course.table import load_course
from course.zip_files import write_zip
from handin.own_figures import own_figures
from handin.records import find_runs
from handin.report import sections_of
from staff.grade import result_store
from staff.reports.sheet import rubric
from staff.tests.handouts import open_handout
from staff.tests.rows import entry, row

pytestmark = pytest.mark.medium
COURSE = load_course()
QUESTIONS = [question for section in sections_of(COURSE) for question in section.questions]
Files = dict[str, bytes]


def command(*words: object, folder: Path = ROOT, module: str = "staff.rubric") -> subprocess.CompletedProcess:
    start = ["-m", module] if module else []
    return subprocess.run(
        [sys.executable, *start, *map(str, words)], cwd=folder, capture_output=True, text=True, timeout=300
    )


@pytest.fixture(scope="module")
def archive(student, tmp_path_factory) -> Files:
    """The files of an archive whose report has the good answer to each question."""
    tree = tmp_path_factory.mktemp("packed") / "tree"
    shutil.copytree(student, tree)
    who = ("--netid", "ab12", "--name", "Ada Byron")
    assert command("submit.py", "report", *who, folder=tree, module="").returncode == 0
    text = (tree / "report/report.md").read_text()
    (tree / "report/report.md").write_text(answered(text, own(tree), lambda name: rubric()[name].good))
    done = command("submit.py", "pack", *who, "--no-grading", "--out", "a.zip", folder=tree, module="")
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(tree / "a.zip") as packed:
        return {name: packed.read(name) for name in packed.namelist()}


class Figures(dict[str, float]):
    def __missing__(self, name: str) -> float:
        return 0.0


def own(tree: Path) -> Figures:
    return Figures(
        {name: of.value for name, of in own_figures(find_runs(tree / "runs", tree / "submit_figures")).items()}
    )


def answered(report: str, figures: Figures, answer: Callable[[str], str]) -> str:
    for question in QUESTIONS:
        begin, end = (f"<!-- {words}your words: {question.name} -->" for words in ("", "end of "))
        between = f"{begin}\n\n{answer(question.name).format_map(figures)}\n\n{end}"
        report = re.sub(rf"{begin}.*?{end}", lambda _, text=between: text, report, flags=re.DOTALL)  # type: ignore[misc]
    return report


def sheets(tmp_path: Path, **archives: Files) -> dict[str, str]:
    for name, files in archives.items():
        write_zip(files, tmp_path / f"{name}.zip")
    done = command(*(tmp_path / f"{name}.zip" for name in archives), "--out", tmp_path / "sheets")
    assert done.returncode == 0, done.stderr
    return {name: (tmp_path / f"sheets/{name}.md").read_text() for name in archives}


def test_every_question_has_a_row_of_the_rubric_and_none_of_its_texts_is_in_the_handout():
    shipped = b"\n".join(open_handout().files.values()).decode(errors="replace")

    assert rubric().keys() == {question.name for question in QUESTIONS} and len(QUESTIONS) <= 15
    assert [q.name for q in QUESTIONS if len(rubric()[q.name].full) != q.points] == []
    assert not [name for name in open_handout().files if name.startswith("staff/")]
    texts = [text for of in rubric().values() for text in (*of.full, of.good, of.weak, of.wrong)]
    assert [text for text in texts if text in shipped] == []


def test_what_the_source_courses_ask_for_is_mapped_to_questions_that_exist():
    mapped = set(re.findall(r"`(\w+)`", (ROOT / "staff/answers/README.md").read_text().partition("What the source")[2]))

    assert {question.name for question in QUESTIONS} - mapped <= {"1_gradients", "2a_bytes"}
    assert mapped <= {question.name for question in QUESTIONS}


def test_the_handout_has_rules_for_assistants_and_staff_have_a_question_for_every_region():
    text = (ROOT / "staff/assistants.md").read_text()

    asked_about = set(re.findall(r"^\| (\w+\.\d+) \|", text, re.MULTILINE))
    assert asked_about == {id for id, region in COURSE.regions.items() if not region.bonus}
    assert len(text.split()) <= 1200 and "AGENTS.md" in open_handout().files


def test_an_honest_archive_has_nothing_to_mark_and_its_figures_agree(archive, tmp_path):
    text = sheets(tmp_path, ada=archive)["ada"]

    assert "## What does not fit\n\n- nothing was found" in text
    lines = re.findall(r"^- (.*): (?:.*); the answer says (.*): agrees", text, re.MULTILINE)
    wanted = sum(len(question.cites) for question in QUESTIONS)
    assert len(lines) + text.count("**no record**") == wanted and len(lines) > wanted / 2
    assert "also in" not in text and text.count("- [ ] ") == sum(question.points for question in QUESTIONS)


def edit(name: str, change: Callable[[dict], object], refresh: bool = False) -> Callable[[Files], None]:
    def apply(files: Files) -> None:
        record = json.loads(files[name])
        change(record)
        files[name] = json.dumps(with_fingerprint(record) if refresh else record).encode()

    return apply


def taking(seconds: float) -> Callable[[dict], None]:
    def change(record: dict) -> None:
        for step in record["iterations"]:
            step["seconds"] = seconds

    return change


def faster(record: dict) -> None:
    for step in record["iterations"]:
        step["seconds"] /= 1000


ALTERED: list[tuple[Callable[[Files], object], str]] = [
    (edit("runs/task3_ddp/rank1.json", faster), r"task3_ddp: rank1.json was edited after the run"),
    (edit("runs/task3_ddp/rank0.json", faster, True), r"the report says \| 3 DDP .*; the records give \| 3 DDP "),
    (edit("runs/task3_ddp/rank0.json", faster, True), r"impossible, unless .*: task3_ddp is [\d.]+ times as fast"),
    (edit("runs/task1_single/rank0.json", lambda of: of["processor"].update(own=1e6), True), "impossible: task1"),
    (lambda files: [files.pop(f"runs/task2b_allreduce/rank{r}.json") for r in (0, 1)],
     "missing: .* of the run task2b_allreduce"),
    (lambda files: files.update({"task3/run_glue.py": files["task3/run_glue.py"] + b"\n# later\n"}),
     "task3_ddp: made with another task3_ddp/run_glue.py than the one in the archive: it is that of ada"),
    (lambda files: files.update({"report.md": files["report.md"].replace(b"## GPT-2", b"Mine.\n\n## GPT-2")}),
     "report.md was edited outside"),
    (lambda files: files.pop("report.md"), "no report.md in it"),
]  # fmt: skip


def test_what_does_not_fit_is_said_and_so_is_whose_records_and_words_they_are(archive, tmp_path):
    altered = {f"bob{i}": dict(archive) for i in range(len(ALTERED))}
    for (alter, _), files in zip(ALTERED, altered.values(), strict=True):
        alter(files)

    texts = sheets(tmp_path, ada=archive, **altered)

    marked = {name: text.partition("## 1_")[0] for name, text in texts.items()}
    assert [said for (_, said), name in zip(ALTERED, altered, strict=True) if not re.search(said, marked[name])] == []
    assert "rank0.json has the same times as a record of" in marked["ada"]
    assert "**much of it is also in: bob0, bob1" in texts["ada"]


def test_figures_of_somebody_elses_records_are_said_to_be_theirs(archive, tmp_path):
    told = answered(archive["report.md"].decode(), Figures({"2b_seconds": 0.1234}), lambda name: rubric()[name].good)
    ada, bob = ({**archive, "report.md": told.encode()} for _ in range(2))
    for seconds, files in ((0.1234, ada), (0.2345, bob)):
        for name in [name for name in files if name.startswith("runs/task2b_allreduce/rank")]:
            edit(name, taking(seconds), refresh=True)(files)

    texts = sheets(tmp_path, ada=ada, bob=bob)

    of_2b = {
        name: next(line for line in text.splitlines() if line.startswith("- time of an iteration of 2b"))
        for name, text in texts.items()
    }
    assert of_2b["ada"].endswith("0.1234 s; the answer says 0.1234: agrees")
    assert "**not in the answer**" in of_2b["bob"] and of_2b["bob"].endswith("; **one is that of ada**")


def test_foreign_figures_and_empty_answers_are_marked_and_points_come_back_into_the_grade_book(archive, tmp_path):
    text = archive["report.md"].decode()
    foreign = answered(text, Figures(), lambda name: rubric()[name].good)
    empty = answered(text, Figures(), lambda name: "")
    texts = sheets(
        tmp_path,
        ada=archive,
        bob={**archive, "report.md": foreign.encode()},
        eve={**archive, "report.md": empty.encode()},
    )
    assert texts["bob"].count("**not in the answer**") > 10 and texts["eve"].count("**empty: 0 points**") == len(
        QUESTIONS
    )

    table, graded = tmp_path / "sheets/points.csv", tmp_path / "graded"
    for name in texts:
        of = row(entry("1.1", "passed"), name=name, unreadable=False, wall_s=1.0, peak_pss_mb=1)
        result_store.keep(graded, of, of.report, "")
    head, *rows = csv.reader(table.read_text().splitlines())
    filled = [[name, *(cell or "2" for cell in cells)] for name, *cells in rows]
    table.write_text("\n".join(",".join(line) for line in [head, *filled]))
    (graded / "roster.csv").write_text("id\nada\nbob\neve\nnobody\n")
    assert command("--enter", table, "--out", graded).returncode == 0

    book = {of["submission"]: of for of in csv.DictReader((graded / "gradebook.csv").read_text().splitlines())}
    most = sum(question.points for question in QUESTIONS)
    assert {name: (float(of["report"]), float(of["max_report"])) for name, of in book.items()} == {
        "ada": (2.0 * len(QUESTIONS), most), "bob": (2.0 * len(QUESTIONS), most), "eve": (0.0, most),
    }  # fmt: skip
    (tmp_path / "moodle.csv").write_text(f"Participant ID,Grade,Maximum Grade\nada,,{most}\neve,,{most}\n")
    exported = command("moodle", graded, tmp_path / "moodle.csv", "--report", module="staff.export")
    assert exported.stdout.splitlines()[1:] == [f"ada,{2 * len(QUESTIONS)},{most}", f"eve,0,{most}"], exported.stderr
    table.write_text(table.read_text().replace("ada,2", "ada,9", 1))
    assert "expected points from 0 to 2, got '9'" in command("--enter", table, "--out", graded).stderr
