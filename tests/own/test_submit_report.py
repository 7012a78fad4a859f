"""submit.py report: tiny real runs of all tasks become tables, figures and findings; the student's words stay."""

import json
import os
import re
import shutil
import socket
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from cluster.launch import free_port
from common.errors import InputError
from common.paths import ROOT
from handin.pdf import markdown_to_pdf
from handin.questions import questions_of
from handin.report import build_report
from tests.own.student_tree import COURSE, make_tree, submit
from tests.own.warm import ENVIRONMENT, Script

pytestmark = pytest.mark.medium
BERT = "--dropout 0 --max_steps 6 --per_gpu_train_batch_size"
GPT2 = "--dropout 0 --max_steps 4 --batch_size 8"
RUNS = [  # script, workers, flags
    ("task1_single/run_glue.py", 1, f"{BERT} 8"),
    ("task2a_gather_scatter/run_glue.py", 2, f"{BERT} 4"),
    ("task2b_allreduce/run_glue.py", 2, f"{BERT} 4 --timeline 2"),
    ("task3_ddp/run_glue.py", 2, f"{BERT} 4"),
    ("task4_traffic/run_glue.py", 2, f"{BERT} 4 --output_dir runs/task4_8"),
    ("pipeline/run_gpt2.py", 1, f"{GPT2} --model_parallel_mode model_parallel"),
    ("pipeline/run_gpt2.py", 1, f"{GPT2} --model_parallel_mode pipeline_parallel"),
    ("beyond/run_gpt2.py", 2, f"{GPT2} --strategy overlap --bucket_mb 0.5"),
]
PIPELINE = ("pipeline", "pipeline_model_parallel")
WORDS = """Müller's σ² ≤ ∞ is **large**:

- rank 0: `a | b`
  1. nested

| N | bytes |
|---|---|
| 4 | 2 (N-1)/N S |

```python
    indented
```"""


@pytest.fixture(scope="module")
def student(tmp_path_factory) -> Path:
    """A student's folder in which every region is solved and every script has run."""
    tree = make_tree(tmp_path_factory.mktemp("student"), solved=True)
    environment = ENVIRONMENT | {"COS598D_CACHE": os.environ.get("COS598D_CACHE", str(ROOT / ".cache"))}
    for script, workers, flags in RUNS:
        words = flags.replace("runs/", f"{tree}/runs/").split()
        words += ["--master_port", str(free_port()), "--master_ip", "127.0.0.1", "--world_size", str(workers)]
        log = tree / f"{Path(script).parent}.log"
        ranks = [Script(tree / script, [*words, "--local_rank", rank], log, environment) for rank in range(workers)]
        assert [rank.wait(timeout=300) for rank in ranks] == [0] * workers, log.read_text()
    alone = [
        sys.executable,
        "task2b_allreduce/run_gpt2.py",
        *GPT2.split(),
        "--world_size",
        "1",
    ]  # starts its own worker
    subprocess.run(alone, cwd=tree, env=os.environ | environment, check=True, capture_output=True)
    return tree


@pytest.fixture
def tree(student, tmp_path) -> Path:
    """A copy of what the runs have left, which may be changed."""
    for folder in ("runs", "submit_figures"):
        shutil.copytree(student / folder, tmp_path / folder)
    return tmp_path


def record(tree: Path, run: str, rank: int = 0) -> dict:
    return json.loads((tree / f"runs/{run}/rank{rank}.json").read_text())


def change(tree: Path, name: str, edit: Callable[[dict], object]) -> None:
    """Change the JSON files of a name, such as task1_single/rank*.json."""
    for path in tree.glob(name):
        content = json.loads(path.read_text())
        edit(content)
        path.write_text(json.dumps(content))


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
    report = build_report(tree, COURSE)
    text = report.markdown.read_text()

    ranks = [record(tree, "task2b_allreduce", rank) for rank in range(2)]
    pairs = zip(ranks[0]["iterations"], ranks[1]["iterations"], strict=True)
    losses = [statistics.fmean(step["loss"] for step in pair) for pair in pairs]
    mean = {}
    for run in ("task1_single", "task2a_gather_scatter", "task2b_allreduce", "task3_ddp"):
        mean[run] = statistics.fmean(step["seconds"] for step in record(tree, run)["iterations"][1:])
        assert cell(text, run, "s per iteration").startswith(f"{mean[run]:.4f}")
    assert cell(text, "task2b_allreduce", "iteration 3") == f"{losses[2]:.6f}"
    assert cell(text, "task3_ddp", "speed-up") == f"{mean['task1_single'] / mean['task3_ddp']:.2f}"
    assert (
        cell(text, "task2a_gather_scatter", "time / DDP") == f"{mean['task2a_gather_scatter'] / mean['task3_ddp']:.2f}"
    )
    assert cell(text, "task2a_gather_scatter", "calls") == "41 gather, 41 scatter"
    assert cell(text, "task2b_allreduce", "MB") == f"{ranks[0]['parameters'] * 4 / 1e6:.2f}"
    spent = [step["phases"]["communication"] for step in ranks[0]["iterations"][1:]]
    assert cell(text, "task2b_allreduce", "seconds") == f"{statistics.fmean(spent):.4f}"
    waiting = statistics.fmean(step["waiting"] for step in ranks[0]["timeline"]["steps"])
    assert cell(text, "task2b_allreduce", "waiting") == f"{waiting * 1e3:.1f}"
    seconds = {run: sum(step["seconds"] for step in record(tree, run)["iterations"]) for run in PIPELINE}
    assert cell(text, "pipeline", "speed-up") == f"{seconds['pipeline_model_parallel'] / seconds['pipeline']:.2f}"
    assert (cell(text, "pipeline", "M"), cell(text, "pipeline", "bound")) == ("4", "1.60")
    assert cell(text, "pipeline", "tokens per s") == f"{4 * 8 * 64 / seconds['pipeline']:.0f}"
    windows = json.loads((tree / "runs/task4_8/traffic_0.json").read_text())["windows"]
    sent = sum(w["sent"] for w in windows) / 6 * record(tree, "task4_8")["steps_per_epoch"]
    assert cell(text, "task4_8", "observed") == f"{sent / 1e6:.2f}"
    of = record(tree, "beyond_overlap")
    assert cell(text, "beyond_overlap", "strategy") == "overlap, buckets of 0.5 MiB"
    assert cell(text, "beyond_overlap", "kept") == f"{of['memory']['persistent_bytes'] / 1e6:.3f}"
    assert float(cell(text, "beyond_overlap", "messages")) == pytest.approx(of["communication"]["messages"], rel=1e-3)
    row = json.loads((tree / "submit_figures/data_parallel_1.json").read_text())
    assert f"| 1 | 1 | 8 | {row['training_time']:.3f} | {row['tokens_per_second']:.0f} |" in text
    figures = re.findall(r"\]\((figures/\w+\.png)\)", text)
    assert len(figures) == 9 and all((tree / "report" / name).stat().st_size > 5000 for name in figures)


def test_words_below_every_question_survive_and_measurements_come_before_code(student):
    path = student / "report/report.md"
    first = submit(student, "report", "--netid", "ab1234", "--name", "Zoë Łukasz")
    assert first.returncode == 0, first.stderr
    questions = questions_of(COURSE)
    assert f"answers to {sum(q.task != 'b' for q in questions)} questions: 1_first_loss, " in first.stdout
    text = path.read_text()
    for question in questions:
        assert text.index(f"**{question.text}**\n") < text.index(f"<!-- your words: {question.name} -->")
        words = WORDS if question.name == "2a_bytes" else "Mine."
        text = text.replace(f"words: {question.name} -->\n", f"words: {question.name} -->\n{words}\n", 1)
    path.write_text(text)

    done = submit(student, "report")
    built = {file.name: file.read_bytes() for file in path.parent.glob("*.*")}
    submit(student, "report")

    assert {file.name: file.read_bytes() for file in path.parent.glob("*.*")} == built
    assert built.keys() == {"report.md", "ab1234_Zoë_Łukasz.pdf"} and "answers to" not in done.stdout
    text = built["report.md"].decode()
    assert text.count("Mine.") == len(questions) - 1 and WORDS in text
    heads = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert heads[0] == "Missing" and heads.index("Task 1: one worker") < heads.index("Appendix: code") == len(heads) - 1
    assert "#### 1.2 backward (task1_single/run_glue.py)\n\n```python\nloss.backward()\n```" in text
    assert "not solved" not in text and "cannot tell which lines" not in text
    assert len(re.findall(rb"/Type /Page\b", built["ab1234_Zoë_Łukasz.pdf"])) > 15


@pytest.mark.parametrize(
    "old, new, name",
    [
        ("<!-- end of your words: 2a_bytes -->", "", "2a_bytes"),
        ("<!-- your words: 2a_bytes -->", "", "2a_bytes"),
        ("<!-- your words: 2a_bytes -->", "<!-- your words: 1_metric -->", "1_metric"),
    ],
)
def test_a_damaged_section_stops_the_build_and_nothing_is_overwritten(tmp_path, old, new, name):
    path = build_report(tmp_path, COURSE).markdown
    path.write_text(before := path.read_text().replace(old, new))

    with pytest.raises(InputError, match=rf"report/report.md:\d+: .*{name}"):
        build_report(tmp_path, COURSE)

    assert path.read_text() == before


@pytest.mark.parametrize(
    "old, new", [("words: 2a_bytes", "words: of_last_year"), ("## GPT-2: pipeline", "Mine, in the wrong place.")]
)
def test_a_report_that_was_changed_outside_of_its_sections_is_kept(tmp_path, old, new):
    path = build_report(tmp_path, COURSE).markdown
    path.write_text(before := path.read_text().replace(old, new))

    report = build_report(tmp_path, COURSE)

    assert report.kept_copy and report.kept_copy.read_text() == before and new not in path.read_text()


def each_step(key: str, new: Callable[[float], float]) -> Callable[[dict], object]:
    """An edit of a record: its losses or its seconds."""
    return lambda content: [step.update({key: new(step[key])}) for step in content["iterations"]]


def steady(content: dict) -> None:
    """Forty iterations of the same length."""
    content["iterations"] = [content["iterations"][0] | {"seconds": 0.1 + i % 2 / 1e6} for i in range(40)]


def config(**changes: object) -> Callable[[dict], object]:
    return lambda content: content["config"].update(changes)


FAULTS: list[dict[str, tuple[Callable[[dict], object] | None, str]]] = [
    {  # file: how it is changed (None: removed), and what is said of it
        "runs/task1_single/rank0.json": (
            lambda of: of.update(evaluations=[{"epoch": i, "metrics": {"acc": 0.5}} for i in (1, 2)]),
            "task1_single: the metric never changes",
        ),
        "runs/task2a_gather_scatter/rank*.json": (
            config(seed=7), "speed-up of task2a_gather_scatter over task1_single cannot be compared: seed 42 vs. 7"),
        "runs/task2b_allreduce/rank1.json": (None, "task2b_allreduce: without rank1.json of 2 workers"),
        "runs/task2b_allreduce/timeline.json": (None, "timeline.json: no such file"),
        "runs/task3_ddp/rank*.json": (
            each_step("seconds", lambda time: time / 1000), r"task3_ddp over task1_single is .*, above the .*, [12]:"),
        "runs/task4_8/traffic_0.json": (
            lambda of: [window.update(sent=2 * window["sent"]) for window in of["windows"]],
            "task4_8: the observed traffic is [12].* times the expected"),
        "runs/pipeline/rank0.json": (
            each_step("seconds", lambda time: time / 1000), "pipeline over model_parallel is .*, above the bound, 1.6"),
        "submit_figures/data_parallel_1.json": (lambda of: of.pop("threads"), "data_parallel_1.json is damaged"),
    },
    {
        "runs/task1_single/rank0.json": (steady, ""),
        "runs/task2a_gather_scatter/rank*.json": (
            each_step("loss", lambda loss: loss + 1), "losses of task1_single and task2a_gather_scatter differ"),
        "runs/task2b_allreduce/rank1.json": (config(seed=3), "is from a different run than rank0.json: seed 42 vs. 3"),
        "runs/task3_ddp/rank*.json": (steady, "speed-up of task3_ddp over task1_single is 1.00, within the noise"),
        "runs/task4_8/traffic_0.json": (None, "task4_8: expected traffic_0.json"),
        "runs/pipeline/rank0.json": (
            config(batch_size=16), "pipeline over model_parallel cannot be compared: total batch 8 vs. 16"),
        "runs/beyond_overlap/rank0.json": (lambda of: of["host"].clear(), "beyond_overlap: rank0.json is damaged"),
    },
    {
        "runs/task2b_allreduce/rank*.json": (
            lambda of: of["processor"].update(seconds=2, machine=of["processor"]["own"] * 2 + 4), "disturbed: other"),
        "runs/task3_ddp/rank*.json": (
            lambda of: of["host"].update(name="of-ada"), f"task3_ddp .*: machine {socket.gethostname()} vs. of-ada"),
        "runs/task2a_gather_scatter/rank0.json": (
            each_step("loss", lambda _: float("nan")), "the loss of rank 0 in iteration 1 is not a number"),
        "runs/pipeline_model_parallel/rank0.json": (None, ""),
        "runs/pipeline/rank0.json": (lambda of: of["config"].pop("n_chunk"), "GPT-2: pipeline: .* another version"),
    },
]  # fmt: skip


@pytest.mark.parametrize("faults", FAULTS)
def test_what_cannot_be_believed_is_named(tree, faults):
    for name, (edit, _) in faults.items():
        assert list(tree.glob(name))
        if edit:
            change(tree, name, edit)
        else:
            (tree / name).unlink()

    doubts = "\n".join(build_report(tree, COURSE).findings.doubts)

    assert [expected for _, expected in faults.values() if not re.search(expected, doubts)] == [], doubts


def test_what_is_missing_comes_with_a_command_that_makes_it_like_the_other_runs(tree):
    for run in ("task1_single", "task2a_gather_scatter", "task2b_allreduce"):
        change(tree, f"runs/{run}/rank*.json", config(seed=7, data_dir="/elsewhere/RTE"))
    shutil.rmtree(tree / "runs/pipeline")
    (tree / "runs/task3_ddp").rename(tree / "runs/aside")
    (tree / "runs/task3_ddp").mkdir()
    (tree / "runs/aside").rename(tree / "runs/task3_ddp/earlier")

    report = build_report(tree, COURSE)
    text = report.markdown.read_text()
    shutil.rmtree(tree / "runs/task3_ddp")
    without = dict(build_report(tree, COURSE).findings.missing)

    assert "task3_ddp: no record in it (the run was interrupted or is still running)" in report.findings.doubts
    assert cell(text, "task3_ddp/earlier", "workers") == "2" and "40 iterations of 3 DDP" not in text
    flags = "--data_dir /elsewhere/RTE --task_name rte --max_seq_length 32 --learning_rate 0.001 --num_train_epochs 8"
    assert without["40 iterations of 3 DDP"] == (
        f"python -m cluster.launch --workers 4 -- task3_ddp/run_glue.py --max_steps 40 {flags} --seed 7 --dropout 0.0"
    )
    assert without["task 1 over 3 epochs (task1_single has only 0)"].endswith(" --output_dir runs/task1_epochs")
    assert "--per_gpu_train_batch_size 8 --output_dir runs/task4_32" in without["task 4 with 32"]
    assert without["GPT-2 in mode pipeline_parallel with 8 micro-batches"].endswith("--output_dir runs/pipeline_m8")
    assert "OMP_NUM_THREADS=1" in without["GPT-2 on 2 workers"] and without["the timeline of 2a"] == "make demo"


def test_a_course_without_a_task_asks_for_nothing_of_it(tmp_path):
    tasks = {name: task for name, task in COURSE.tasks.items() if name not in ("4", "p", "b")}

    report = build_report(tmp_path, replace(COURSE, tasks=tasks))

    assert not re.search(r"Task 4|task4|[Pp]ipeline|beyond|4_bytes|\*\*.*micro-batches", report.markdown.read_text())
    assert "GPT-2: data parallel" in report.markdown.read_text()


UNUSUAL = [
    f"{WORDS}\n\n\\*no* <b>HTML</b>, \u03a9 \u2192 \u0142 \u6c49 \U0001f600\\\n> quoted\n> - item\n\n1. \n2. \n\n---\n",
    "x" * 5000 + "\n\n`" + "y" * 3000 + "`\n\n# " + "long heading " * 60 + "\n\n\x00\x07 control \u202e characters",
    "| a |\n|---|\n" + "| " + "word " * 2000 + "|\n\n| |\n|---|\n| |\n",
    f"{'| column ' * 40}|\n{'|---' * 40}|\n{'| cell ' * 40}|\n\n| a | b |\n|---|---|\n| 1 |\n",
    "```\n" + "\t" * 50 + "x\n```\n\n" + "".join("  " * i + "- item\n" for i in range(40)),
]


@pytest.mark.parametrize("text", UNUSUAL)
def test_whatever_a_student_writes_becomes_pages_and_the_same_text_the_same_bytes(tmp_path, text):
    pdfs = {markdown_to_pdf(text, tmp_path, "T", "Jos\u00e9") for _ in range(2)}

    assert len(pdfs) == 1 and re.search(rb"/Type /Page\b", pdfs.pop())


def test_pictures_are_embedded_and_those_that_cannot_be_shown_are_left_out(tmp_path):
    folder = tmp_path / "report"
    (folder / "folder").mkdir(parents=True)
    (folder / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\nbroken")
    Image.new("RGB", (9, 9)).save(tmp_path / "outside.png")
    Image.new("RGB", (3000, 200), "red").save(folder / "wide.png")
    Image.new("RGB", (20, 9000), "blue").save(folder / "tall.png")
    names = ("none.png", "../outside.png", "broken.png", "folder", "https://example.org/x.png", "wide.png", "tall.png")

    pdf = markdown_to_pdf("".join(f"![a]({name})\n\n" for name in names), folder, "T", "")

    assert len(re.findall(rb"/Subtype /Image", pdf)) == 2
