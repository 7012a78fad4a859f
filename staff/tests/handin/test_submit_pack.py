"""submit.py pack: what goes into the archive and under which name, what stays out, and that nothing is replaced."""

import json
import os
import stat
import subprocess
import sys
import zipfile
from hashlib import sha256
from pathlib import Path

import pytest

from course.table import load_course
from handin.student import make_student, remembered
from staff.grade.submissions import write_files
from staff.tests.handouts import solved_handout

pytestmark = pytest.mark.medium
ADA = ("pack", "--netid", "ab1234", "--name", "Zoë  O'Last")
GRADERS = "import pytest\n" + "".join(
    f"\n@pytest.mark.task1\n@pytest.mark.graded('{region}')\ndef test_{name}(): assert {passes}\n"
    for region, name, passes in (("1.1", "a", True), ("1.2", "b", False))
)
OWN = {"task1_single/notes.md": b"mine", "task2b_allreduce/mine/deep/helper.py": b"x = 1"}
BONUS = "import pytest\n\n@pytest.mark.beyond\n@pytest.mark.graded('b.15')\ndef test_c(): pass\n"
LEFT_OUT = {
    "task1_single/weights.pth": b"x",
    "task1_single/link.py": b"",  # becomes a link
    "task2b_allreduce/train.tsv": b"x",
    "pipeline/.secret.py": b"x",
    "pipeline/\udcff.py": b"x",  # not UTF-8
    "task3_ddp/big.txt": b"x" * 1_000_001,
}
UNNAMED = {"runs/task1_single/run.py": b"x", "task1_single/__pycache__/x.py": b"x", "task3_ddp/given.png": b"ours"}


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    """A student's folder, with files that do not belong into a hand-in."""
    tree = tmp_path_factory.mktemp("student")
    digests = {name: sha256(text).hexdigest() for name, text in (solved_handout() | UNNAMED).items() if ".png" in name}
    manifest = {".handout.json": json.dumps({"format": 1, "files": digests, "code": {}}).encode()}
    write_files(solved_handout() | LEFT_OUT | UNNAMED | manifest | OWN, tree)
    (tree / "task1_single/link.py").unlink()
    (tree / "task1_single/link.py").symlink_to(tree / "submit.py")
    (tree / "pipeline/pipe.py").unlink()
    return tree


def submit(tree: Path, *words: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "submit.py", *words], cwd=tree, capture_output=True, text=True)


def test_an_archive_holds_code_report_and_figures_and_names_what_is_missing_or_left_out(tree):
    lines = submit(tree, *ADA, "--no-grading").stdout.splitlines()

    with zipfile.ZipFile(tree / "dist/ab1234_Zoë_OLast.zip") as archive:
        files = {info.filename: archive.read(info) for info in archive.infolist()}
        assert {info.external_attr >> 16 for info in archive.infolist()} == {stat.S_IFREG | 0o644}
    expected = {"report.md", "ab1234_Zoë_OLast.pdf", "common/schedule.py", "task1/notes.md", "task2b/run_gpt2.py"}
    expected |= {"task2b/mine/deep/helper.py"}
    assert expected < files.keys() and files["task4/expected.py"] == (tree / "task4_traffic/expected.py").read_bytes()
    assert not [name for name in [*LEFT_OUT, *UNNAMED] if Path(name).name in {Path(file).name for file in files}]
    shown = {os.fsencode(name).decode(errors="backslashreplace") for name in LEFT_OUT}
    assert {line.split()[2] for line in lines if line.startswith("left out: ")} == shown
    assert "missing: pipeline/pipe.py is not in the archive, so its points will be lost" in lines
    assert "missing: task 1 over 3 epochs" in lines


def test_packed_again_the_archive_is_the_same_byte_for_byte_and_none_is_replaced(tree):
    archives = []
    for name, mode in (("a.zip", 0o755), ("b.zip", 0o600)):
        for path in tree.rglob("*.py"):
            path.chmod(mode)
        submit(tree, *ADA, "--no-grading", "--out", name)
        archives.append((tree / name).read_bytes())

    refused = submit(tree, *ADA, "--no-grading", "--out", "b.zip")

    assert refused.returncode == 2 and "exists already and is not replaced" in refused.stderr
    assert archives[0] == archives[1] == (tree / "b.zip").read_bytes()


def test_the_graders_points_are_shown_and_packed_without_messages_that_differ_from_run_to_run(tree):
    for path in (tree / "tests").rglob("test_*.py"):
        path.unlink()
    graders = {load_course().tasks["1"].tests[0]: GRADERS, load_course().regions["b.15"].tests[0]: BONUS}
    write_files({name: text.encode() for name, text in graders.items()}, tree)

    lines = submit(tree, *ADA, "--out", "graded.zip").stdout.splitlines()
    write_files({load_course().tasks["1"].tests[0]: b"import nowhere_to_be_found"}, tree)
    broken = submit(tree, *ADA, "--out", "broken.zip")

    course = load_course()
    earned, most = course.regions["1.1"].points, sum(row.points for row in course.regions.values() if row.task == "1")
    words = ["task1", str(earned), "of", str(most)]
    assert any(line.split()[:4] == words and "1.3 has no grader here" in line for line in lines)
    assert [line.split() for line in lines if line.startswith("total")] == [["total", str(earned), "of", "100"]]
    points = json.loads(zipfile.ZipFile(tree / "graded.zip").read("points.json"))
    assert (points["score"], [set(test) & {"message", "points"} for test in points["tests"]]) == (
        earned,
        [{"points"}] * 3,
    )
    assert broken.returncode == 2 and "nowhere_to_be_found" in broken.stderr and "--no-grading" in broken.stderr


@pytest.mark.parametrize(
    "netid, name, stem",
    [
        ("m.muster", "Madonna", "m.muster_Madonna"),
        ("jan-willem", "X", "jan-willem_X"),
        ("ab_12", "John Smith 3rd", "ab_12_John_Smith_3rd"),
        ("山田.1", "山田 太郎", "山田.1_山田_太郎"),
        ("a@uni.edu", "अनिल मेहता", "a@uni.edu_अनिल_मेहता"),
        ("1007", "Conan O'Brien-Ó", "1007_Conan_OBrien-Ó"),
    ],
)
def test_ids_and_names_of_real_people_make_file_names_and_are_remembered(netid, name, stem):
    student = make_student(netid, name)

    assert student.stem == stem and remembered(f"# Report\n\n{student.lines}More <!-- x -->") == student


@pytest.mark.parametrize(
    "words, message",
    [
        ("pack --netid ab1", "--name"),
        ("pack --netid a/b --name A\u00a0B", "error: --netid: expected letters, digits, dots and hyphens"),
        ("pack --netid .. --name A\u00a0B", "error: --netid: expected letters, digits, dots and hyphens"),
        ("pack --netid ab1 --name ...", "error: --name: expected a name"),
        ("pack --netid " + "a" * 300 + " --name A\u00a0B", "error: --netid, --name: expected at most 200 bytes"),
        ("report --netid ab1", "error: give both --netid and --name"),
        ("report --runs nowhere", "error: --runs: there is no folder nowhere"),
    ],
)
def test_a_wrong_command_line_is_said_in_one_line(tree, words, message):
    done = submit(tree, *words.split(" "))

    assert done.returncode == 2 and message in done.stderr
