"""What is taken of a hand-in, under which names, and what the student learns about the rest."""

from pathlib import Path

import pytest

from common.errors import InputError
from course.manifest import version_of
from course.table import load_course
from staff.grade.hand_ins import version_of_handout
from staff.grade.submissions import choose, clean_files, name_all, write_files, write_tree
from staff.tests.handouts import open_handout

COURSE = load_course()
HOME = "common/data_partition.py"


def hand_in(folder: Path, *files: str) -> Path:
    write_files(dict.fromkeys(files, b"mine = 1\n"), folder)
    return folder


@pytest.mark.parametrize(
    "handed_in, taken",
    [
        (["task2a/run_glue.py"], {"task2a_gather_scatter/run_glue.py"}),  # the course's name of the folder
        (["Task3/run_glue.py", "pipeline/pipe.py"], {"task3_ddp/run_glue.py", "pipeline/pipe.py"}),
        (["task2b/mine/deep/helper.py"], {"task2b_allreduce/mine/deep/helper.py"}),
        (["notes.txt", "group 3/final/task1/a.py", f"group 3/final/{HOME}"], {"task1_single/a.py", HOME}),
        (["task1/a.py", "common/data/glue.py", "grader/ranks/one_run.py", "tests/conftest.py"], {"task1_single/a.py"}),
        ([HOME, "conftest.py", "pytest.ini", "torch.py", "course.toml"], {HOME}),
    ],
)
def test_what_a_student_may_change_is_taken_from_wherever_it_lies(tmp_path, handed_in, taken):
    assert set(choose(hand_in(tmp_path, *handed_in), COURSE)[0]) == taken


def test_a_task_handed_in_twice_is_said_and_a_hand_in_without_the_courses_folders_is_none(tmp_path):
    files, notes = choose(hand_in(tmp_path / "twice", "task1/run_glue.py", "task1_single/run_glue.py"), COURSE)

    assert list(files) == ["task1_single/run_glue.py"] and "was also submitted" in notes[0]
    with pytest.raises(InputError, match=r"expected the folders of the course .*, got a\.zip, report\.txt; put them"):
        choose(hand_in(tmp_path / "none", "report.txt", "a.zip"), COURSE)


@pytest.mark.parametrize(
    ("found", "advice"),
    [
        ("run_glue.py", ""),
        ("run_glue (1).py", "Rename it to run_glue.py"),
        ("Run_Glue.py", "Rename it to run_glue.py"),
        ("run_glue.py.txt", "Rename it to run_glue.py"),
        ("solution.ipynb", "Export it as run_glue.py"),
        ("notes.py", "count as unsolved"),
    ],
)
def test_a_lesson_s_file_that_is_missing_is_named_with_what_is_there_instead(tmp_path, found, advice):
    _, notes = choose(hand_in(tmp_path, f"task1/{found}"), COURSE)

    assert [advice in note and "its regions (1.1, 1.2, 1.3, 1.4)" in note for note in notes] == [True] * bool(advice)
    assert (repr(found) in " ".join(notes)) == (found not in ("notes.py", "run_glue.py"))


def test_a_lesson_s_file_that_lies_deeper_is_named(tmp_path):
    _, notes = choose(hand_in(tmp_path, "task2b/task2b/run_glue.py", "task1/a.py"), COURSE)

    assert any("is it 'task2b_allreduce/task2b/run_glue.py'? Move it to task2b_allreduce" in note for note in notes)


@pytest.mark.parametrize(
    "lost",
    [
        "hw/Task 2b/run_glue.py",  # a folder with another name
        "hw/run_glue.py",  # no folder
        "task2b/run_glue.py",  # not beside the others
        "hw/common/my_schedule.ipynb",  # a notebook where only some files may change
    ],
)
def test_code_that_is_not_graded_is_named_unless_it_is_the_handouts(tmp_path, lost):
    handed_in = (lost, "hw/task1/run_glue.py", "hw/task3/run_glue.py", "hw/cluster/launch.py", "hw/tests/conftest.py")

    _, notes = choose(hand_in(tmp_path, *handed_in, "hw/notes.txt"), COURSE)

    (note,) = [note for note in notes if note.startswith("ignored, since")]
    assert note.endswith(f": {lost}")


def test_the_graders_know_the_version_that_the_handout_has():
    assert version_of_handout(clean_files(), COURSE) == version_of(open_handout().code)


def test_what_is_not_handed_in_is_the_handouts_and_every_tree_has_files_of_its_own(tmp_path):
    clean = clean_files()
    write_tree(clean, choose(hand_in(tmp_path / "in", "task1/run_glue.py"), COURSE)[0], tmp_path / "tree")
    (tmp_path / "tree" / HOME).write_text("poisoned\n")
    write_tree(clean, {}, tmp_path / "next")

    assert (tmp_path / "tree/task1_single/run_glue.py").read_text() == "mine = 1\n"
    assert "raise NotImplementedError" in (tmp_path / "tree/task2a_gather_scatter/run_glue.py").read_text()
    assert not any("SOLUTION" in path.read_text() for path in (tmp_path / "tree").rglob("*.py"))
    assert not (tmp_path / "tree/course.toml").exists()  # hints
    assert (tmp_path / "next" / HOME).read_bytes() == clean[HOME]


def test_a_folder_in_place_of_a_file_is_said(tmp_path):
    hand_in(tmp_path / "in", "pipeline/pipe.py/inside.py")

    with pytest.raises(InputError, match=r"^pipeline/pipe\.py: expected a file of the course"):
        write_tree(clean_files(), choose(tmp_path / "in", COURSE)[0], tmp_path / "tree")


def names(*paths: str) -> list[str]:
    return [submission.name for submission in name_all([Path(path) for path in paths])]


def test_submissions_are_named_after_folders_and_zips_and_a_path_that_is_given_twice_is_one():
    paths = ("/x/alice.zip", "/x/bob", "/y/hand in.ZIP", "/y/carol/hw.zip", "/y/dan/hw.zip", "/x/./bob")

    assert names(*paths) == ["alice", "bob", "hand_in", "carol-hw", "dan-hw"]


def test_submissions_that_gradescope_exported_have_the_ids_of_their_people_and_its_time(tmp_path):
    (tmp_path / "submission_metadata.yml").write_text("""
submission_12:
  :submitters:
  - {":name": Ada Byron, ":sid": '901', ":email": ab_12@u.edu}
  - {":name": Carl Dai, ":sid": , ":email": cd34@u.edu}
  :created_at: 2026-02-14 09:30:00.123456000 -05:00
""")
    paths = [tmp_path / name for name in ("submission_metadata.yml", "submission_12", "submission_13")]

    first, second = name_all(paths)

    assert (first.name, first.submitted) == ("901-ab_12-cd34-submission_12", "2026-02-14T09:30:00-05:00")
    assert (second.name, second.submitted) == ("submission_13", "")


@pytest.mark.parametrize(
    "begin", ["byronada_4711_{}_", "byronada_LATE_4711_{}_", "Ada Byron_4711_assignsubmission_file_"]
)
def test_of_a_students_files_in_a_download_only_archives_are_hand_ins_and_the_others_are_said(begin):
    of_ada = [f"/x/{begin.format(i)}{file}" for i, file in enumerate(("hw.zip", "report.pdf", "run_glue.py", "b.tgz"))]
    of_bob = [
        "/x/bob_4712_5_report.pdf",
        "/x/Bob_4712_assignsubmission_file_report.pdf",
        "/x/hw_2b",
        "/y/" + of_ada[1][3:],
    ]

    found = {
        submission.path.as_posix(): " ".join(submission.notes) for submission in name_all(map(Path, of_ada + of_bob))
    }

    assert found.keys() == {of_ada[0], of_ada[3], *of_bob}
    assert found[of_ada[0]].endswith(": report.pdf, run_glue.py, b.tgz")
    assert found[of_ada[3]].endswith(": hw.zip, report.pdf, run_glue.py") and not any(map(found.get, of_bob))


@pytest.mark.parametrize("name", ["..", "a\nb", "\udcff", "x" * 300, "\U00020000" * 100, "<b>", "."])
def test_every_name_can_be_a_folder_and_a_cell(tmp_path, name):
    (cleaned,) = names(f"/x/{name}.zip")

    (tmp_path / cleaned).mkdir()
    assert cleaned not in ("", ".", "..") and len(cleaned) <= 80
    assert cleaned.encode() and not set(cleaned) & set("/\n<>")


@pytest.mark.parametrize(
    "paths",
    [
        ["/a/x/hw.zip", "/b/x/hw.zip"],
        ["/a/alice smith.zip", "/a/alice_smith.zip"],
        ["/a/alice", "/a/alice.zip"],
        ["/a/Alice.zip", "/a/alice.zip"],
        ["/a/caf\u00e9.zip", "/a/cafe\u0301.zip"],
        ["/a/" + "x" * 90 + "1.zip", "/a/" + "x" * 90 + "2.zip"],
        ["/a/\udcff.zip", "/a/\udcfe.zip", "/a/_.zip"],
    ],
)
def test_names_that_clean_to_one_are_told_apart_and_stay_the_same(paths):
    assert len({name.casefold() for name in names(*paths)}) == len(paths)
    assert names(*reversed(paths)) == names(*paths)[::-1]


def test_a_name_that_another_hand_in_would_get_is_not_given_twice():
    first = names("/a/x/hw.zip", "/b/x/hw.zip")
    chosen = [f"/a/{name}" for name in (*first, f"{first[0]}-{first[0].rpartition('-')[2]}")]

    assert len(set(names("/a/x/hw.zip", "/b/x/hw.zip", *chosen))) == 2 + len(chosen)


def test_a_name_under_which_the_results_of_another_hand_in_are_kept_is_not_given_again():
    kept = {"alice_smith": "alice smith"}

    assert name_all([Path("/a/alice smith.zip")], kept)[0].name == "alice_smith"
    assert name_all([Path("/a/alice_smith.zip")], kept)[0].name not in kept
