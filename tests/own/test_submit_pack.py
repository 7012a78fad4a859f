"""submit.py pack: what goes into the archive and under which name, what stays out, and that nothing is replaced."""

import json
import os
import stat
import sys
import zipfile
from hashlib import sha256
from pathlib import Path

import pytest

import submit
from common.errors import InputError, exit_on_input_error
from common.paths import ROOT
from handin.pack import archive_name, collect, pack, points_table, run_graders
from handin.sections import Findings
from handin.write_report import Report
from tests.own.run_records import ADA, COURSE

CODE = sorted({region.file for region in COURSE.regions.values()})


@pytest.fixture
def tree(tmp_path):
    """A student's folder with code in every home file, and a report."""
    folder = tmp_path / "student"
    for name in CODE:
        write(folder, name, f"# {name}\n")
    write(folder, "report/report.md", "![times](figures/times.png)\n")
    for name in ("times", "of_an_earlier_report"):
        write(folder, f"report/figures/{name}.png", "a picture")
    write(folder, f"report/{ADA.stem}.pdf", "a report")
    return folder


def report_of(tree):
    findings = Findings([("figure submit_figures/a.png", "command")], ["a doubt"])
    return Report(tree / "report/report.md", tree / f"report/{ADA.stem}.pdf", findings, None)


def contents_of(tree, points=None):
    return collect(tree, COURSE, report_of(tree), points)


def write(folder: Path, name: str, text: str = "x = 1\n") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_code_lies_in_the_folders_that_the_course_asks_for(tree):
    files = contents_of(tree).files

    assert files["task2a/run_glue.py"] == b"# task2a_gather_scatter/run_glue.py\n"
    assert {"task1/run_glue.py", "task2b/run_gpt2.py", "task3/run_glue.py", "task4/expected.py"} <= set(files)
    assert {"pipeline/pipe.py", "common/schedule.py", "common/data_partition.py"} <= set(files)
    assert {"report.md", "ab1234_First_Last.pdf", "figures/times.png"} <= set(files)
    assert "figures/of_an_earlier_report.png" not in files
    assert archive_name("task3_ddp/run_gpt2.py", COURSE) == "task3/run_gpt2.py"


@pytest.mark.parametrize(
    "name, text, why",
    [
        ("task1_single/model.safetensors", "weights", "not code"),
        ("task1_single/gradients.pth", "weights", "not code"),
        ("task2b_allreduce/train.tsv", "data", "not code"),
        ("pipeline/.secret.py", "x", "hidden"),
        ("task3_ddp/big.txt", "x" * 1_000_001, "1.0 MB"),
    ],
)
def test_data_and_weights_are_left_out_and_named(tree, name, text, why):
    write(tree, name, text)

    contents = contents_of(tree)

    assert archive_name(name, COURSE) not in contents.files
    assert len(contents.left_out) == 1
    assert contents.left_out[0].startswith(f"{name} ({why}")


def test_a_picture_of_the_handout_is_left_out_without_a_line_but_not_one_that_was_changed(tree):
    names = [f"task3_ddp/{name}.png" for name in ("timeline", "changed")]
    files = dict.fromkeys(names, sha256(b"a picture").hexdigest())
    write(tree, ".handout.json", json.dumps({"format": 1, "files": files, "code": {}}))
    for name, text in zip(names, ("a picture", "another picture"), strict=True):
        write(tree, name, text)

    contents = contents_of(tree)

    assert contents.left_out == ["task3_ddp/changed.png (not code)"]
    assert "task3/timeline.png" not in contents.files


def test_a_damaged_manifest_is_said_in_one_line(tree):
    write(tree, ".handout.json", '{"format": 1')

    with pytest.raises(InputError, match=r"\.handout\.json: is damaged \(.*\); copy it"):
        contents_of(tree)


def test_links_runs_caches_and_what_the_course_gives_are_not_in_it(tree, tmp_path):
    for name in ("course/table.py", "runs/x/rank0.json", "task1_single/__pycache__/run_glue.pyc", "glue_data/RTE/a.py"):
        write(tree, name)
    (tree / "task1_single/link.py").symlink_to(write(tmp_path, "secret.py"))
    (tree / "pipeline/pipe.py").unlink()

    contents = contents_of(tree)
    files = contents.files

    assert "task1_single/link.py (a link)" in contents.left_out and "task1/link.py" not in files
    assert "pipeline/pipe.py is not in the archive, so its points will be lost" in contents.missing
    assert any(what.startswith("figure submit_figures/") for what in contents.missing)
    assert not [name for name in files if "runs" in name or "cache" in name or "course" in name or "glue_data" in name]


@pytest.mark.medium
def test_packed_twice_the_archives_are_the_same_byte_for_byte(tree, tmp_path):
    for path in tree.rglob("*.py"):
        path.chmod(0o755)
    first, second = tmp_path / "a.zip", tmp_path / "b.zip"

    lines = pack(tree, COURSE, ADA, lambda: report_of(tree), first, grade=False)
    for path in tree.rglob("*.py"):
        path.chmod(0o600)
        os.utime(path, (1, 1))
    pack(tree, COURSE, ADA, lambda: report_of(tree), second, grade=False)

    assert "missing: figure submit_figures/a.png" in lines and "suspicious: a doubt" in lines
    assert first.read_bytes() == second.read_bytes()
    with zipfile.ZipFile(first) as archive:
        assert archive.testzip() is None
        assert {info.external_attr >> 16 for info in archive.infolist()} == {stat.S_IFREG | 0o644}


def test_an_archive_that_exists_is_not_replaced(tree, tmp_path):
    archive = write(tmp_path, "a.zip", "precious")

    with pytest.raises(InputError, match="exists already and is not replaced"):
        pack(tree, COURSE, ADA, lambda: report_of(tree), archive, grade=False)

    assert archive.read_text() == "precious"


def test_points_are_in_it_without_messages_that_differ_from_run_to_run(tree):
    test = {"id": "t::a", "task": "1", "region": "1.2", "status": "passed", "points": 3, "max_points": 3}
    report = {"score": 3, "max_score": 3, "tests": [test | {"message": "drawn 0.123"}]}

    points = json.loads(contents_of(tree, report).files["points.json"])

    assert points["score"] == 3
    assert "message" not in points["tests"][0]


def test_the_table_of_points_says_which_regions_are_open():
    tests = [
        {"id": "a", "task": "1", "region": "1.1", "status": "passed", "points": 3, "max_points": 3},
        {"id": "b", "task": "1", "region": "1.2", "status": "wrong", "points": 0, "max_points": 3},
        {"id": "c", "task": "b", "region": "b.1", "status": "passed", "points": 4, "max_points": 4},
    ]

    lines = points_table({"score": 3, "max_score": 6, "bonus": 4, "max_bonus": 4, "tests": tests}, COURSE)

    assert lines[0].split()[:4] == ["task1", "3", "of", "13"]
    assert "1.2 wrong; 1.3 has no grader here" in lines[0]
    assert lines[-2].split() == ["total", "3", "of", "100"]
    most = sum(region.points for region in COURSE.regions.values() if region.task == "b")
    assert lines[-1].startswith(f"beyond       4 of {most:3}  bonus, on top of these; b.2 has no grader here")


@pytest.fixture
def graded_tree(tmp_path):
    """A folder with graders that take no time, run by the real plugin."""
    write(tmp_path, "conftest.py", f"import sys\nsys.path.append({str(ROOT)!r})\npytest_plugins = ['grader.plugin']\n")
    return tmp_path


@pytest.mark.medium
def test_the_graders_are_run_once_and_give_their_points(graded_tree):
    text = "import pytest\n\n@pytest.mark.graded('1.1')\ndef test_a(): pass\n\n"
    text += "@pytest.mark.graded('1.2')\ndef test_b(): assert False\n"
    write(graded_tree, "tests/task1/test_bert.py", text)
    write(graded_tree, "tests/test_other.py", "raise SystemExit('not a grader')\n")

    report = run_graders(graded_tree, COURSE)

    assert (report["score"], [test["status"] for test in report["tests"]]) == (3, ["passed", "crashed"])


@pytest.mark.medium
def test_graders_that_cannot_run_are_an_error_that_shows_what_they_said(graded_tree):
    write(graded_tree, "tests/test_a.py", "import nowhere_to_be_found  # graded(\n")

    with pytest.raises(InputError, match="nowhere_to_be_found") as error:
        run_graders(graded_tree, COURSE)

    assert "--no-grading" in str(error.value)


@pytest.mark.parametrize(
    "words, message",
    [
        (["pack", "--netid", "ab1"], "--name"),
        (["pack", "--netid", "a/b", "--name", "A B"], "error: --netid: expected letters and digits"),
        (["report", "--netid", "ab1"], "error: give both --netid and --name"),
    ],
)
def test_a_wrong_command_line_is_said_in_one_line(monkeypatch, capsys, words, message):
    monkeypatch.setattr(sys, "argv", ["submit.py", *words])

    with pytest.raises(SystemExit, match="2"):
        exit_on_input_error(submit.main)

    assert message in capsys.readouterr().err
