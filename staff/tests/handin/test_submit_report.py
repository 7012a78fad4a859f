"""submit.py report: tiny real runs of all tasks become tables, figures and findings; the student's words stay."""

import json
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median

import pytest
from fpdf import FPDF
from matplotlib import font_manager
from PIL import Image

from cluster.demo import ladder, two_workers
from common.errors import InputError
from course.table import load_course
from handin import pdf
from handin.pdf import markdown_to_pdf
from handin.records import find_runs
from handin.report import build_report, sections_of

pytestmark = pytest.mark.medium
COURSE = load_course()
WORDS = "Müller's σ² ≤ ∞ is **large**:\n\n- `a | b`\n  1. nested\n\n| N |\n|---|\n| 4 |\n\n```\n    indented\n```"


@pytest.fixture
def tree(student, tmp_path) -> Path:
    """A copy of what the runs have left, which may be changed."""
    for folder in ("runs", "submit_figures"):
        shutil.copytree(student / folder, tmp_path / folder)
    return tmp_path


def read(tree: Path, name: str) -> dict:
    return json.loads((tree / name).read_text())


def cell(text: str, run: str, column: str) -> str:
    """The cell of the first table that has this column and a row for this run."""
    head: list[str] = []
    for line in text.splitlines():
        cells = [part.strip() for part in line.strip("|").split(" | ")]
        head = cells if "run" in cells else head
        if column in head and cells[-1] == f"`{run}`":
            return cells[head.index(column)]
    raise AssertionError(f"no {column} of {run}")


def test_every_figure_is_that_of_the_records(tree):
    text = build_report(tree, COURSE).markdown.read_text()

    one, first, ddp, gpt2, piped, bonus, four = (
        read(tree, f"runs/{run}/rank0.json") for run in (
            "task1_single", "task2b_allreduce", "task3_ddp", "pipeline_model_parallel", "pipeline", "beyond_overlap",
            "task4_traffic",
        )
    )  # fmt: skip
    second = read(tree, "runs/task2b_allreduce/rank1.json")
    mean = [fmean(step["seconds"] for step in record["iterations"][1:]) for record in (one, first, ddp)]
    whole = [sum(step["seconds"] for step in record["iterations"]) for record in (gpt2, piped)]
    loss = fmean(record["iterations"][2]["loss"] for record in (first, second))
    spent = fmean(step["phases"]["communication"] for step in first["iterations"][1:])
    waiting = fmean(step["waiting"] for step in first["timeline"]["steps"])
    sent = sum(window["sent"] for window in read(tree, "runs/task4_traffic/traffic_0.json")["windows"])
    expected = {
        ("task2b_allreduce", "iteration 3"): f"{loss:.6f}",
        ("task2b_allreduce", "s per iteration"): f"{mean[1]:.4f}",
        ("task3_ddp", "speed-up"): f"{mean[0] / mean[2]:.2f}",
        ("task2b_allreduce", "seconds"): f"{spent:.4f}",
        ("task2a_gather_scatter", "calls"): "41 gather, 41 scatter",
        ("task2b_allreduce", "MB"): f"{first['parameters'] * 4 / 1e6:.2f}",
        ("task4_traffic", "observed"): f"{sent / 6 * four['steps_per_epoch'] / 1e6:.2f}",
        ("pipeline", "M"): "4",
        ("pipeline", "bound"): "1.60",
        ("pipeline", "speed-up"): f"{whole[0] / whole[1]:.2f}",
        ("pipeline", "tokens per s"): f"{4 * 8 * 64 / whole[1]:.0f}",
        ("beyond_overlap", "strategy"): "overlap, buckets of 0.5 MiB",
        ("beyond_overlap", "kept"): f"{bonus['memory']['persistent_bytes'] / 1e6:.4g}",
        ("beyond_overlap", "messages"): f"{bonus['communication']['messages']:.4g}",
    }
    assert {key: cell(text, *key) for key in expected} == expected
    in_an_iteration = bonus["communication"]["bytes"]
    assert in_an_iteration == pytest.approx(4 * bonus["parameters"], rel=1e-3)  # each gradient once, and the order
    compared = read(tree, "submit_figures/pipeline_metrics.json")["pipeline_parallel"]
    assert compared["tokens_per_second"]["mean"] == pytest.approx(4 * 8 * 64 / whole[1])
    row = read(tree, "submit_figures/data_parallel_1.json")
    assert re.search(rf"rank 0 .* {waiting * 1e3:.2f} ", text)
    assert f"| 1 | 1 | 8 | {row['training_time']:.3f} | {row['tokens_per_second']:.0f} |" in text
    figures = re.findall(r"\]\((figures/\w+\.png)\)", text)
    assert len(figures) == 10 and all((tree / "report" / name).stat().st_size > 5000 for name in figures)


def test_of_two_runs_that_are_long_enough_the_one_in_its_own_folder_counts(tree):
    runs = tree / "runs"
    shutil.copytree(runs / "task3_ddp", runs / "again")
    for name, iterations in (("task3_ddp", 40), ("again", 48)):
        for file in (runs / name).glob("rank*.json"):
            record = json.loads(file.read_text())
            file.write_text(json.dumps(record | {"iterations": (record["iterations"] * 8)[:iterations]}))

    assert [run.name for run in find_runs(runs, tree).of("task3")] == ["task3_ddp", "again"]


def test_the_demo_shows_mean_losses_the_bytes_of_root_and_others_and_the_speed_of_all(tree, monkeypatch):
    monkeypatch.setattr(ladder, "FOLDER", tree / "runs")
    first, second = (read(tree, f"runs/task2a_gather_scatter/rank{rank}.json") for rank in range(2))
    both = read(tree, "runs/beyond_overlap/rank0.json")

    row = ladder.read_row("task2a_gather_scatter", "2a", 2)

    losses = ([step["loss"] for step in record["iterations"]] for record in (first, second))
    assert row.losses == pytest.approx([fmean(pair) for pair in zip(*losses, strict=True)])
    size = 4 * first["parameters"]  # gather passes it on every rank; the root scatters one to each
    assert (row.bytes_of_first, row.bytes_of_others) == (3 * size, size)
    seconds = median(step["seconds"] for step in both["iterations"][1:])
    assert two_workers.speed("GPT-2", [both]).tokens_per_second == pytest.approx(8 * 64 / seconds)


def test_words_below_every_question_survive_and_measurements_come_before_code(student):
    def submit(*words: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            [sys.executable, "submit.py", "report", *words], cwd=student, capture_output=True, text=True
        )

    path = student / "report/report.md"
    first = submit("--netid", "ab1234", "--name", "Zo\u00eb \u0141ukasz")
    assert first.returncode == 0, first.stderr
    questions = [question for section in sections_of(COURSE) for question in section.questions]
    assert f"answers to {sum(q.task != 'b' for q in questions)} questions: 1_guessing, " in first.stdout
    text = path.read_text()
    for question in questions:
        begin, words = f"words: {question.name} -->\n", WORDS if question.name == "2a_bytes" else "Mine."
        assert text.index(f"**{' '.join(question.text.split())}**\n") < text.index(begin)
        text = text.replace(begin, f"{begin}{words}\n", 1)
    path.write_text(text)

    done = submit()
    built = {file.name: file.read_bytes() for file in path.parent.glob("*.*")}
    submit()

    assert {file.name: file.read_bytes() for file in path.parent.glob("*.*")} == built
    assert built.keys() == {"report.md", "ab1234_Zo\u00eb_\u0141ukasz.pdf"} and "answers to" not in done.stdout
    text = built["report.md"].decode()
    assert text.count("Mine.") == len(questions) - 1 and WORDS in text
    heads = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert heads[0] == "Missing" and heads.index("Task 1: one worker") < heads.index("Appendix: code") == len(heads) - 1
    assert "#### 1.2 backward (task1_single/run_glue.py)\n\n```python\nloss.backward()\n```" in text
    assert "not solved" not in text and "cannot tell which lines" not in text


@pytest.mark.parametrize(
    "old, new, damaged",
    [
        ("<!-- end of your words: 2a_bytes -->", "", "2a_bytes"),
        ("<!-- your words: 2a_bytes -->", "", "2a_bytes"),
        ("<!-- your words: 2a_bytes -->", "<!-- your words: 1_guessing -->", "1_guessing"),
        ("words: 2a_bytes", "words: of_last_year", ""),
        ("## GPT-2: pipeline", "Mine, in the wrong place.", ""),
    ],
)
def test_no_word_is_lost_where_a_report_was_changed_outside_of_its_sections(tmp_path, old, new, damaged):
    path = build_report(tmp_path, COURSE).markdown
    path.write_text(before := path.read_text().replace(old, new))

    if damaged:
        with pytest.raises(InputError, match=rf"report/report.md:\d+: .*{damaged}"):
            build_report(tmp_path, COURSE)
        assert path.read_text() == before
    else:
        kept = build_report(tmp_path, COURSE).kept_copy
        assert kept and kept.read_text() == before


def each_step(key: str, new: Callable[[float], float]) -> Callable[[dict], object]:
    return lambda of: [step.update({key: new(step[key])}) for step in of["iterations"]]


def faster(of: dict) -> None:
    each_step("seconds", lambda time: time / 1000)(of)


def steady(of: dict) -> None:
    """Forty iterations of the same length."""
    of["iterations"] = [of["iterations"][0] | {"seconds": 0.1 + i % 2 / 1e6} for i in range(40)]


def busy(of: dict) -> None:
    of["processor"].update(seconds=2, machine=of["processor"]["own"] * 2 + 4)


def config(**flags: object) -> Callable[[dict], object]:
    return lambda of: of["config"].update(flags)


FAULTS: list[dict[str, tuple[Callable[[dict], object] | None, str]]] = [
    {  # file of a real run: how it is changed (None: removed), and what is said of it
        "runs/task1_single/rank0.json": (
            lambda of: of.update(evaluations=[{"epoch": i, "metrics": {"acc": 0.5}} for i in (1, 2)]),
            "task1_single: the metric never changes"),
        "runs/task2a_gather_scatter/rank*.json": (config(seed=7), "task2a_gather_scatter .* compared: seed 42 vs. 7"),
        "runs/task2b_allreduce/rank1.json": (None, "task2b_allreduce: without rank1.json of 2 workers"),
        "runs/task2b_allreduce/timeline.json": (None, "timeline.json: no such file"),
        "runs/task3_ddp/rank*.json": (faster, r"speed-up of task3_ddp over task1_single is \d+.*, above the .*, [12]:"),
        "runs/task4_traffic/traffic_0.json": (
            lambda of: [window.update(sent=2 * window["sent"]) for window in of["windows"]],
            r"task4_traffic: the observed traffic is [\d.]+ times the expected"),
        "runs/pipeline/rank0.json": (faster, "speed-up of pipeline over model_parallel is .*, above the bound, 1.6"),
        "submit_figures/data_parallel_1.json": (lambda of: of.pop("threads"), "data_parallel_1.json is damaged"),
    },
    {
        "runs/task1_single/rank0.json": (steady, ""),
        "runs/task2a_gather_scatter/rank*.json": (
            each_step("loss", lambda loss: loss + 1), "losses of task1_single and task2a_gather_scatter differ"),
        "runs/task2b_allreduce/rank1.json": (config(seed=3), "is from a different run than rank0.json: seed 42 vs. 3"),
        "runs/task3_ddp/rank*.json": (steady, "speed-up of task3_ddp over task1_single is 1.00, within the noise"),
        "runs/task4_traffic/traffic_0.json": (None, "task4_traffic: expected traffic_0.json"),
        "runs/pipeline/rank0.json": (config(batch_size=16), "pipeline over .* compared: total batch 8 vs. 16"),
        "runs/beyond_overlap/rank0.json": (lambda of: of["host"].clear(), "beyond_overlap: rank0.json is damaged"),
    },
    {
        "runs/task2b_allreduce/rank*.json": (busy, "task2b_allreduce: disturbed: other programs used"),
        "runs/task3_ddp/rank*.json": (
            lambda of: of["host"].update(name="of-ada"), f"task3_ddp .*: machine {socket.gethostname()} vs. of-ada"),
        "runs/task2a_gather_scatter/rank0.json": (
            each_step("loss", lambda _: float("nan")), "a loss of rank 0 is not a number"),
        "runs/pipeline/rank0.json": (lambda of: of["config"].pop("n_chunk"), "GPT-2: pipeline: a record, .*n_chunk"),
    },
]  # fmt: skip


@pytest.mark.parametrize("faults", FAULTS)
def test_what_cannot_be_believed_is_named(tree, faults):
    for name, (edit, _) in faults.items():
        for path in tree.glob(name):
            content = read(tree, path)
            path.unlink()
            if edit:
                edit(content)
                path.write_text(json.dumps(content))

    doubts = "\n".join(build_report(tree, COURSE).findings.doubts)

    assert [expected for _, expected in faults.values() if not re.search(expected, doubts)] == [], doubts


def test_what_is_missing_comes_with_a_command_that_makes_it_like_the_other_runs(tree):
    for path in [*tree.glob("runs/task1*/rank*.json"), *tree.glob("runs/task2?_*/rank*.json")]:
        content = read(tree, path)
        content["config"] |= {"seed": 7} | ({"data_dir": "/elsewhere/RTE"} if "task_name" in content["config"] else {})
        path.write_text(json.dumps(content))
    shutil.rmtree(tree / "runs/pipeline")
    (tree / "runs/task3_ddp").rename(tree / "runs/task3_ddp.kept")
    (tree / "runs/task3_ddp").mkdir()  # by a run that crashed

    report = build_report(tree, COURSE)
    assert cell(report.markdown.read_text(), "task3_ddp.kept", "workers") == "2"
    assert "task3_ddp: no record in it (the run was interrupted or is still running)" in report.findings.doubts
    shutil.rmtree(tree / "runs/task3_ddp.kept")
    missing = dict(build_report(tree, COURSE).findings.missing)

    flags = "--data_dir /elsewhere/RTE --task_name rte --max_seq_length 32 --learning_rate 0.001 --num_train_epochs 8"
    assert missing["40 iterations of 3 DDP"] == (
        f"python -m cluster.launch --workers 4 -- task3_ddp/run_glue.py --max_steps 40 {flags} --seed 7 --dropout 0.0"
    )
    assert missing["task 1 over 3 epochs (task1_single has only 0)"].endswith(" --output_dir runs/task1_epochs")
    assert "--per_gpu_train_batch_size 8 --output_dir runs/task4_32" in missing["task 4 with 32"]
    assert missing["GPT-2 in mode pipeline_parallel with 8 micro-batches"].endswith("--output_dir runs/pipeline_m8")
    assert missing["the timeline of 3 DDP"] == "make demo"


def test_a_course_without_a_task_asks_for_nothing_of_it(tmp_path):
    tasks = {name: task for name, task in COURSE.tasks.items() if name not in ("4", "p", "b")}

    text = build_report(tmp_path, replace(COURSE, tasks=tasks)).markdown.read_text()

    assert "GPT-2: data parallel" in text and not re.search(
        r"Task 4|task4|[Pp]ipeline|beyond|4_bytes|micro-batch", text
    )


def test_words_below_a_question_that_the_course_has_dropped_are_kept_in_a_copy(tmp_path):
    report, question = build_report(tmp_path, COURSE).markdown, "words: 4_traffic -->\n"
    report.write_text(report.read_text().replace(question, f"{question}Mine.\n", 1))

    without_traffic = {name: task for name, task in COURSE.tasks.items() if name != "4"}
    kept = build_report(tmp_path, replace(COURSE, tasks=without_traffic)).kept_copy

    assert kept and "Mine." in kept.read_text() and "Mine." not in report.read_text()


def test_whatever_a_student_writes_becomes_pages_and_the_same_text_the_same_bytes(tmp_path):
    folder = tmp_path / "report"
    folder.mkdir()
    (folder / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\nbroken")
    Image.new("RGB", (9, 9)).save(tmp_path / "outside.png")
    Image.new("RGB", (3000, 200), "red").save(folder / "wide.png")
    Image.new("RGB", (20, 9000), "blue").save(folder / "tall.png")
    names = ("none.png", "../outside.png", "broken.png", ".", "https://example.org/x.png", "wide.png", "tall.png")
    unusual = [
        *(f"![a]({name})" for name in names),
        f"{WORDS}\n\n<b>HTML</b>, \u03a9 \u2192 \u0142\\\n> quoted\n> - item\n\n1. \n2. \n\n---\n<!-- unseen -->",
        f"{'x' * 5000}\n\n`{'y' * 3000}`\n\n# {'long heading ' * 60}\n\n\x00\x07 control \u202e characters",
        f"| a |\n|---|\n| {'word ' * 2000} |\n\n| |\n|---|\n| |",  # a row that is higher than a page
        f"{'| column ' * 40}|\n{'|---' * 40}|\n{'| cell ' * 40}|\n\n| a | b |\n|---|---|\n| 1 |",
        "```\n" + "\t" * 50 + "x\n```\n\n" + "".join("  " * i + "- item\n" for i in range(40)),
    ]

    pdfs = {markdown_to_pdf("\n\n".join(unusual), folder, "T", "Jos\u00e9") for _ in range(2)}

    assert len(pdfs) == 1 and len(re.findall(rb"/Subtype /Image", pdfs.pop())) == 2


def test_letters_that_our_fonts_lack_come_from_fonts_of_the_system_and_the_rest_is_named(monkeypatch):
    other = pdf.FONTS / "STIXGeneral.ttf"
    letter = min(pdf._letters_of(other) - pdf._letters_of(pdf.FONTS / "DejaVuSans.ttf"))
    monkeypatch.setattr(font_manager, "findSystemFonts", lambda: [str(other)])
    pages = FPDF()

    missing = pdf.add_fonts_for(f"a \u05d0 {letter} \u5f20", pages)

    assert missing == {"\u5f20"} and len(pages.fonts) == 1
    pages.fonts["other0"].ttfont.close()
    assert markdown_to_pdf("# \u5f20 \u4f1f, \u05e9\u05dc\u05d5\u05dd", Path(), "T", "\u5f20")
