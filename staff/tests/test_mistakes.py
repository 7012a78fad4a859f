"""The runner of the banks: what is no entry is refused, and what is not as it must be is said."""

import json
import os
import subprocess
import sys

import pytest

from common.errors import InputError
from common.paths import ROOT
from grader.verdicts import GRADER_FAILED
from staff import mistakes
from staff.proofs.bank import BankEntry, apply, load_bank, load_file
from staff.proofs.grading_pool import Graded, GraderResult
from staff.proofs.verdict import Judged

TOP = 'task = "1"\nfile = "task1_single/run_glue.py"\n'
ENTRIES = """
["ends the process that grades it"]
body."1.2" = '''
import os, re
os.kill(int(re.search(r"PPid:\\s*(\\d+)", open(f"/proc/{os.getppid()}/status").read())[1]), 9)
'''
["right, in other words"]
body."1.2" = "backward = loss.backward; backward()"
["no step"]
fails.test_every_step_moves_the_parameters_by_the_gradient_of_a_new_batch = "no such words"
body."1.3" = "optimizer.step"
["a copy in task 2b that does not work"]
file = "task2b_allreduce/run_glue.py"
body."1.1" = "model = BertForSequenceClassification(bert_config)"
["no such region"]
body."9.9" = "pass"
["no Python"]
body."1.2" = "loss.backward("
"""


@pytest.mark.medium
def test_a_file_from_elsewhere_has_a_line_for_each_entry_and_leaves_nothing(tmp_path):
    (tmp_path / "bank.toml").write_text(TOP + ENTRIES)
    (tmp_path / "tmp").mkdir()
    words = ["--bank", tmp_path / "bank.toml", "--seed", "5", "--workers", "1"]  # one that loads torch is enough
    process = subprocess.run(
        [sys.executable, "-m", "staff.mistakes", *words], cwd=ROOT, env=os.environ | {"TMPDIR": str(tmp_path / "tmp")},
        capture_output=True, text=True,
    )  # fmt: skip

    killer, right, wrong, copy, *errors, figures = map(json.loads, process.stdout.splitlines())
    assert killer["error"] == "it ended the process that grades it"
    assert right == {"name": "right, in other words", "task": "1", "points_lost": {}, "failed": {}, "warned": []}
    assert wrong["points_lost"]["1.3"] == 2 and "seed 5" in " ".join(wrong["failed"].values())
    assert "does not say 'no such words'" in wrong["complaint"]
    assert copy["points_lost"] == {} and "task2b_allreduce/run_glue.py:" in " ".join(copy["warned"])
    assert [line["name"] for line in errors if line["error"]] == ["no such region", "no Python"]
    assert figures == {"entries": 6, "lose_points": 1, "errors": 3, "complaints": 1, "seed": 5}
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
    ("mistakes", SAID, {"test_a": ("crashed", "divide", GRADER_FAILED)}, "the grader itself fails"),
    ("variants", {}, {"test_a": ("passed",), "test_b": ("passed",)}, ""),
    ("variants", {}, {"test_a": ("passed",), "test_b": ("skipped",)}, "not accepted"),
    ("variants", {}, {}, "not accepted"),
]


def judged(kind, fails, results):
    entry = BankEntry(kind, "bank", "a name", "1", "a.py", {"1.2": "x = 2"}, fails=fails)
    return Judged(entry, Graded({test: GraderResult(*outcome) for test, outcome in results.items()}))


@pytest.mark.parametrize(("kind", "fails", "results", "complaint"), JUDGED)
def test_a_mistake_counts_if_its_test_fails_with_its_words_and_a_variant_if_all_pass(kind, fails, results, complaint):
    verdict = judged(kind, fails, results)

    assert complaint in verdict.complaint and bool(complaint) == bool(verdict.complaint)


SOLVED = "# TODO(cos598d) 1.2: set x (1 line)\n# BEGIN SOLUTION 1.2\nx = 1\n# END SOLUTION 1.2\nfoo(x)\nbar(x)\n"
MISFITS = [
    ({"1.2": "x = 1  # the same"}, "", "equals the solution"),
    ({"1.2": "x = ("}, "", "expected Python"),
    ({}, "-nothing like it\n", "once"),
    ({}, "*foo(x)\n", "begin with a blank"),
    ({"1.3": "x = 2"}, "", "expected one region 1.3"),
]


@pytest.mark.parametrize(("bodies", "patch", "message"), MISFITS)
def test_an_entry_that_does_not_fit_is_refused_by_name(bodies, patch, message):
    with pytest.raises(InputError, match=f"a name.*{message}"):
        apply(BankEntry("mistakes", "bank", "a name", "1", "a.py", bodies, patch), SOLVED)


ROWS = {
    "fails.test_x = 'y'": "expected a body or a patch",
    "body = 'y'": "body: expected a table",
    "body.'1.2' = 3": "expected texts in body and fails",
    "body.'1.2' = 'y'\nfails.test_x = [1]": "expected texts in body and fails",
    "body.'1.2' = 'y'\nbodies = 'y'": "unknown key 'bodies'",
}


@pytest.mark.parametrize("row", ROWS)
def test_a_row_that_is_no_entry_says_so_and_the_others_remain_but_not_in_our_own_bank(tmp_path, row):
    (tmp_path / "mistakes").mkdir()
    (tmp_path / "mistakes/bank.toml").write_text(f"{TOP}['bad']\n{row}\n['good']\nbody.'1.2' = 'y'\n")

    bad, good = load_file(tmp_path / "mistakes/bank.toml")

    assert ROWS[row] in bad.error and (good.name, good.error) == ("good", "")
    with pytest.raises(InputError, match="bad"):
        load_bank(tmp_path)


@pytest.mark.parametrize("flags", ["--only nothing_like_it", "--draw 0", "--times 0", "--bank no.toml"])
def test_what_selects_nothing_is_refused_in_one_line(flags):
    with pytest.raises(InputError):
        mistakes.main(flags.split())
