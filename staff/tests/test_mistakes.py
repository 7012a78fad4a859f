"""The banks fit the solved tree, each graded test catches a wrong program, and what the runner says of entries."""

import json
import os
import subprocess
import sys

import pytest

from common.errors import InputError
from common.paths import ROOT
from grader.tampering import look_at
from staff import mistakes
from staff.grade.submissions import write_files
from staff.proofs.bank import Entry, apply, changed_files, load_bank, load_file
from staff.proofs.grading_pool import Graded, Result, collect
from staff.proofs.verdict import Verdict, graders_of, judge

BANK = load_bank()
MISTAKES = [entry for entry in BANK if entry.is_mistake]
WAITS = ("deadlock", "timed out", "waits", "wait for", "did not end", "never", "still runs", "seconds")


@pytest.mark.medium
@pytest.mark.parametrize("bank", sorted({(entry.kind, entry.bank) for entry in BANK}), ids="/".join)
def test_every_entry_fits_the_solved_tree_and_differs_from_it_and_no_variant_is_flagged(bank, tmp_path):
    for entry in (entry for entry in BANK if (entry.kind, entry.bank) == bank):
        write_files({entry.file: changed_files([entry])[entry.file]}, tmp_path)

        assert entry.is_mistake or look_at(tmp_path, [entry.file]) == [], entry


def test_every_mistake_names_words_and_no_two_entries_make_the_same_change():
    changes = [
        (entry.file, *sorted((place, body.strip()) for place, body in entry.bodies.items()), entry.patch.strip())
        for entry in BANK
    ]

    assert [str(entry) for entry in MISTAKES if not all(all(words) and words for words in entry.fails.values())] == []
    assert [str(entry) for entry, change in zip(BANK, changes, strict=True) if changes.count(change) > 1] == []


def one_for_each_test() -> list[Entry]:
    """Mistakes that make every graded test fail: those that fail many come first, those that wait or race last."""

    def price(entry: Entry) -> tuple[bool, bool, int]:
        words = " ".join(word.lower() for words in entry.fails.values() for word in words)
        return entry.race, any(word in words for word in WAITS), -len(entry.fails)

    chosen: list[Entry] = []
    covered: set[str] = set()
    for entry in sorted(MISTAKES, key=price):
        if not set(entry.fails) <= covered:
            chosen.append(entry)
            covered |= set(entry.fails)
    return chosen


@pytest.mark.medium
def test_every_graded_test_catches_a_wrong_program_by_name():
    tests, copies = collect()
    caught: set[str] = set()
    for entry in one_for_each_test():
        of_its_task = {name: test for name, test in tests.items() if test.task == entry.task}

        verdict = judge(entry, graders_of(entry, of_its_task, copies), [1])

        assert verdict.complaint == "", entry
        caught |= set(verdict.failed)
    assert set(tests) - caught == set()


ENTRIES = """
task = "1"
file = "task1_single/run_glue.py"
["right, in other words"]
body."1.2" = "backward = loss.backward; backward()"
["no step"]
fails.test_every_step_moves_the_parameters_by_the_gradient_of_a_new_batch = "no such words"
body."1.3" = "optimizer.step"
["no such region"]
body."9.9" = "pass"
["no Python"]
body."1.2" = "loss.backward("
["a patch for other lines"]
patch = "-these are nowhere\\n"
"""


@pytest.mark.medium
def test_a_file_from_elsewhere_has_a_line_for_each_entry_and_leaves_nothing(tmp_path):
    (tmp_path / "bank.toml").write_text(ENTRIES)
    (tmp_path / "tmp").mkdir()
    command = [
        sys.executable,
        "-m",
        "staff.mistakes",
        "--bank",
        tmp_path / "bank.toml",
        "--seed",
        "5",
        "--workers",
        "1",
    ]
    environment = os.environ | {"TMPDIR": str(tmp_path / "tmp")}

    process = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)

    right, wrong, *errors, figures = map(json.loads, process.stdout.splitlines())
    assert right | {"points_lost": {}, "failed": {}, "warned": []} == right
    assert wrong["points_lost"]["1.3"] == 4 and "seed 5" in " ".join(wrong["failed"].values())
    assert "does not say 'no such words'" in wrong["complaint"]
    assert [line["name"] for line in errors if line["error"]] == [
        "no such region",
        "no Python",
        "a patch for other lines",
    ]
    assert figures == {"entries": 5, "lose_points": 1, "errors": 3, "complaints": 1, "seed": 5}
    assert process.returncode == 1
    assert list((tmp_path / "tmp").iterdir()) == []


SAID = {"test_a": ("divide",)}
JUDGED = [  # kind, the tests that must fail, what the tests said; what is not as it must be
    ("mistakes", SAID, {"test_a": ("wrong", "wrong: You forgot to divide")}, ""),
    ("mistakes", SAID, {"test_a": ("passed",)}, "not caught by test_a"),
    ("mistakes", SAID, {"test_a": ("skipped", "builds on 1.1")}, "not caught by test_a"),
    ("mistakes", SAID, {}, "not caught by test_a"),
    ("mistakes", SAID, {"test_a": ("passed",), "test_b": ("wrong", "divide")}, "caught, but not by test_a"),
    ("mistakes", SAID, {"test_a": ("wrong", "wrong: something is amiss")}, "does not say 'divide'"),
    ("mistakes", SAID, {"test_a": ("crashed", "crashed: internal grader error: divide")}, "the grader itself fails"),
    ("variants", {}, {"test_a": ("passed",), "test_b": ("passed",)}, ""),
    ("variants", {}, {"test_a": ("passed",), "test_b": ("skipped",)}, "not accepted"),
    ("variants", {}, {"test_a": ("wrong", "wrong: x")}, "not accepted"),
    ("variants", {}, {}, "not accepted"),
]


@pytest.mark.parametrize(("kind", "fails", "results", "complaint"), JUDGED)
def test_a_mistake_counts_if_its_test_fails_with_its_words_and_a_variant_if_all_pass(kind, fails, results, complaint):
    entry = Entry(kind, "bank", "a name", "1", "a.py", {"1.2": "x = 2"}, "", fails)

    verdict = Verdict(entry, Graded({test: Result(*outcome) for test, outcome in results.items()}))

    assert complaint in verdict.complaint and bool(complaint) == bool(verdict.complaint)


SOLVED = "# TODO(cos598d) 1.2: set x (1 line)\n# BEGIN SOLUTION 1.2\nx = 1\n# END SOLUTION 1.2\nfoo(x)\nbar(x)\n"
MISFITS = [
    ({"1.2": "x = 1  # the same"}, "", "the entry equals the solution"),
    ({"1.2": "x = ("}, "", "expected Python"),
    ({}, "-nothing like it\n", "once"),
    ({}, "*foo(x)\n", "begin with a blank"),
    ({"1.3": "x = 2"}, "", "expected one region 1.3"),
]


@pytest.mark.parametrize(("bodies", "patch", "message"), MISFITS)
def test_an_entry_that_does_not_fit_is_refused_by_name(bodies, patch, message):
    with pytest.raises(InputError, match=f"a name.*{message}"):
        apply(Entry("mistakes", "bank", "a name", "1", "a.py", bodies, patch), SOLVED)


def test_a_patch_of_two_places_and_a_body_are_put_in_together():
    entry = Entry("variants", "b", "a", "1", "a.py", {"1.2": "x = 3"}, "-foo(x)\n bar(x)\n@@\n bar(x)\n+foo(x)\n")

    assert apply(entry, SOLVED) == SOLVED.replace("x = 1", "x = 3").replace("foo(x)\nbar(x)\n", "bar(x)\nfoo(x)\n")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("fails.test_x = 'y'", "expected a body or a patch"),
        ("body = 'y'", "body: expected a table"),
        ("body.'1.2' = 3", "expected texts in body and fails"),
        ("body.'1.2' = 'y'\nbodies = 'y'", "unknown key 'bodies'"),
    ],
)
def test_a_row_that_is_no_entry_says_so_and_the_others_remain(tmp_path, row, message):
    (tmp_path / "bank.toml").write_text(f"task = '1'\nfile = 'x.py'\n['bad']\n{row}\n['good']\nbody.'1.2' = 'y'\n")

    bad, good = load_file(tmp_path / "bank.toml")

    assert message in bad.error and (good.name, good.error) == ("good", "")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--only", "no such entry"], "no entry matches"),
        (["--draw", "0"], "--draw"),
        (["--bank", "no.toml"], "no such"),
    ],
)
def test_what_selects_nothing_is_refused_in_one_line(flags, message):
    with pytest.raises(InputError, match=message):
        mistakes.main(flags)
