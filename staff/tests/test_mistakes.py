"""The banks fit the solved tree, and what is printed tells a caught mistake from a survivor: tried on a tiny grader."""

import contextlib
import json
import re
import subprocess
import sys
import textwrap
from concurrent.futures import Future
from dataclasses import replace
from unittest import mock

import pytest

from common.errors import InputError
from common.paths import ROOT
from grader.tampering import look_at
from staff import mistakes
from staff.grade.submissions import write_files
from staff.mistakes import cover, summarize
from staff.proofs import grading_pool, verdict
from staff.proofs.bank import Entry, apply, changed_files, load_bank
from staff.proofs.grading_pool import Graded, GradingPool, Result
from staff.proofs.grading_pool import Test as Grader
from staff.proofs.verdict import Verdict

pytestmark = pytest.mark.medium

BANK = load_bank()


@pytest.mark.parametrize("bank", sorted({(entry.kind, entry.bank) for entry in BANK}), ids="/".join)
def test_every_entry_fits_the_solved_tree_and_differs_from_it_and_no_variant_is_flagged(bank, tmp_path):
    for entry in (entry for entry in BANK if (entry.kind, entry.bank) == bank):
        write_files({entry.file: changed_files([entry])[entry.file]}, tmp_path)

        assert entry.is_mistake or look_at(tmp_path, [entry.file]) == [], entry


def test_every_mistake_names_the_words_its_message_must_hold():
    silent = [str(entry) for entry in BANK if not all(all(words) and words for words in entry.fails.values())]

    assert silent == []


def test_no_two_entries_make_the_same_change():
    names: dict[tuple, list[str]] = {}
    for entry in BANK:
        bodies = {place: body.strip() for place, body in entry.bodies.items()}
        names.setdefault((entry.file, *sorted(bodies.items()), entry.patch.strip()), []).append(str(entry))

    assert [same for same in names.values() if len(same) > 1] == []


def read_output(text):
    """What `python -m staff.mistakes` has printed: the figures, and the lines that say what is not as it must be."""
    lines = text.splitlines()
    return json.loads(lines[-1]), [line for line in lines if "<--" in line or line.startswith("no mist")]


class Here:
    """A pool of workers that is this process."""

    def submit(self, function, *arguments):
        future: Future = Future()
        future.set_result(function(*arguments))
        return future


@pytest.fixture
def in_this_process(monkeypatch):
    """Entries are graded here, where the graders are loaded, and not in new processes."""
    monkeypatch.setattr(mistakes, "worker_processes", lambda count: contextlib.nullcontext(Here()))


def test_every_graded_test_catches_a_wrong_program_by_name(in_this_process, capsys):
    with pytest.raises(SystemExit) as end:
        mistakes.main(["--cover", "--seed", "1"])  # other draws: below

    figures, complaints = read_output(capsys.readouterr().out)
    assert complaints == []
    assert figures["mistakes"] == figures["caught"] == figures["caught_by_name"] > 0
    assert end.value.code == 0


def test_the_cover_prefers_one_entry_for_two_tests_to_a_wait_and_to_a_race():
    both = entry(test_a=("x",), test_b=("x",))
    waits = entry(test_a=("deadlock",), test_b=("x",))
    race = replace(both, race=True)

    assert cover([race, waits, entry(test_a=("x",)), both]) == [both]
    assert cover([race, waits]) == [waits]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(("--seed", "1"), marks=pytest.mark.bank, id="one draw"),
        pytest.param(("--times", "5"), marks=pytest.mark.slow, id="five draws of the inputs"),
    ],
)
@pytest.mark.parametrize("task", sorted({entry.task for entry in BANK}))
def test_every_mistake_is_caught_by_name_every_variant_passes_and_no_test_passes_all_mistakes(task, options):
    command = [sys.executable, "-m", "staff.mistakes", "--task", task, *options]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)

    figures, complaints = read_output(process.stdout)
    assert complaints == []
    assert figures["mistakes"] == figures["caught"] == figures["caught_by_name"] > 0
    assert figures["variants"] == figures["accepted"] > 0
    assert process.returncode == 0


def entry(kind="mistakes", body="x = 2", patch="", **fails):
    return Entry(kind, "bank", "a name", "1", "a.py", {"1.2": body} if body else {}, patch, fails)


SOLVED = "# TODO(cos598d) 1.2: set x (1 line)\n# BEGIN SOLUTION 1.2\nx = 1\n# END SOLUTION 1.2\nfoo(x)\nbar(x)\n"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (entry(body="x = 1  # the same"), "the entry equals the solution"),
        (entry(body="x = ("), "a name"),
        (entry(body="", patch="-nothing like it\n"), "once"),
        (entry(body="", patch="*foo(x)\n"), "begin with a blank"),
        (Entry("variants", "bank", "a name", "1", "a.py", {"1.3": "x = 2"}), "expected one region 1.3"),
    ],
)
def test_an_entry_that_does_not_fit_is_refused_by_name(wrong, message):
    with pytest.raises(InputError, match="a name") as error:
        apply(wrong, SOLVED)

    assert message in str(error.value)


def test_an_entry_of_a_file_that_is_not_the_courses_is_refused():
    with pytest.raises(InputError, match=r"\.\./a\.py: expected a file of the course"):
        changed_files([Entry("variants", "bank", "a name", "1", "../a.py", {"1.2": "x = 2"})])


def test_a_patch_of_two_places_and_a_body_are_put_in_together():
    text = apply(entry(body="x = 3", patch="-foo(x)\n bar(x)\n@@\n bar(x)\n+foo(x)\n"), SOLVED)

    assert text == SOLVED.replace("x = 1", "x = 3").replace("foo(x)\nbar(x)\n", "bar(x)\nfoo(x)\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = (", "expected a bank as TOML"),
        ("task = '1'\nfile = 'a.py'\n[one]\nbody.x = 'y'", "expected the tests that must fail"),
        ("task = '1'\nfile = 'a.py'\n[one]\nfails.x = 'y'\nbody.x = 'y'\nrace = 'no'", "race: expected true or false"),
    ],
)
def test_a_malformed_bank_is_refused(text, message, tmp_path):
    (tmp_path / "mistakes").mkdir()
    (tmp_path / "mistakes/one.toml").write_text(text)

    with pytest.raises(InputError, match=message):
        load_bank(tmp_path)


def judged(fails, kind="mistakes", name="a name", **results):
    made = Entry(kind, "bank", name, "1", "a.py", {"1.2": "x = 2"}, "", fails)
    return Verdict(made, Graded({test: Result(*outcome) for test, outcome in results.items()}))


@pytest.mark.parametrize(
    ("results", "complaint"),
    [
        ({"test_a": ("wrong", "wrong: You forgot to divide")}, ""),
        ({"test_a": ("passed",)}, "not caught by test_a"),
        ({"test_a": ("skipped", "builds on 1.1")}, "not caught by test_a"),
        ({}, "not caught by test_a"),
        ({"test_a": ("passed",), "test_b": ("wrong", "wrong: divide")}, "caught, but not by test_a"),
        ({"test_a": ("wrong", "wrong: something is amiss")}, "does not say 'divide'"),
        (
            {"test_a": ("crashed", "crashed: internal grader error (please report it): divide")},
            "the grader itself fails in test_a",
        ),
    ],
)
def test_a_mistake_counts_only_if_the_named_test_fails_with_the_named_words(results, complaint):
    assert complaint in judged({"test_a": ("divide",)}, **results).complaint
    assert bool(complaint) == bool(judged({"test_a": ("divide",)}, **results).complaint)


@pytest.mark.parametrize(
    ("results", "accepted"),
    [
        ({"test_a": ("passed",), "test_b": ("passed",)}, True),
        ({"test_a": ("passed",), "test_b": ("skipped",)}, False),
        ({"test_a": ("wrong", "wrong: x")}, False),
        ({}, False),
    ],
)
def test_a_variant_is_accepted_only_if_every_test_passes(results, accepted):
    assert (judged({}, "variants", **results).complaint == "") == accepted


def test_mistakes_with_the_same_messages_count_as_one_and_a_survivor_is_not_hidden_behind_another(capsys):
    fails = {"test_a": ("divide",)}
    one = judged(fails, name="one", test_a=("wrong", "wrong: divide (task/run.py:12)"))
    same = judged(fails, name="same", test_a=("wrong", "wrong: divide (task/run.py:88)"))
    other = judged(fails, name="other", test_a=("wrong", "wrong: divide by 3"))
    survivor = judged(fails, name="survivor", test_a=("passed",))

    figures = summarize([one, same, other, survivor])

    assert figures == {"mistakes": 3, "caught": 2, "caught_by_name": 2, "variants": 0, "accepted": 0}
    assert "one | same" in capsys.readouterr().out


GRADER = """
import pathlib, pytest
from grader.verdicts import Wrong

@pytest.fixture
def x(request):
    return int(pathlib.Path(request.config.getoption("--tree"), "a.py").read_text().split("x = ")[1].split()[0])

@pytest.mark.graded("1.2")
@pytest.mark.parametrize("least", [1, 2])
def test_x_is_not_too_small(x, least):
    if x < least - 1:
        raise Wrong(f"expected at least {least}, got {x}")

@pytest.mark.graded("1.2")
def test_x_is_not_too_large(x):
    if x > 1:
        raise Wrong(f"expected 1, got {x}")
"""
GRADERS = {name: Grader(f"test_x.py::{name}", "a.py", "1.2", task="1") for name in re.findall(r"def (test\w+)", GRADER)}
TASK = 'task = "1"\nfile = "a.py"\n'


@pytest.fixture
def course(in_this_process, tmp_path, monkeypatch, capsys):
    """A course of one line: run(mistakes, variants) gives the exit code, the figures and all that was printed."""
    (tmp_path / "conftest.py").write_text("pytest_plugins = ['grader.plugin']\n")
    (tmp_path / "test_x.py").write_text(GRADER)
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib\n")
    monkeypatch.setattr(verdict, "changed_files", lambda entries: {"a.py": apply(entries[0], SOLVED).encode()})
    monkeypatch.setattr(mistakes, "collect", lambda: (GRADERS, {}))
    monkeypatch.setattr(grading_pool, "ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)

    def run(wrong, right="", *options):
        for kind, text in (("mistakes", wrong), ("variants", right)):
            (tmp_path / kind).mkdir(exist_ok=True)
            (tmp_path / kind / "bank.toml").write_text(TASK + textwrap.dedent(text))
        monkeypatch.setattr(mistakes, "load_bank", lambda: load_bank(tmp_path))
        with pytest.raises(SystemExit) as end:
            mistakes.main(options)
        printed = capsys.readouterr().out
        return end.value.code, json.loads(printed.splitlines()[-1]), printed

    return run


TOO_SMALL = """
    ["too small"]
    fails.test_x_is_not_too_small = "at least 1"
    body."1.2" = "x = -1"
"""
TOO_LARGE = """
    ["too large"]
    fails.test_x_is_not_too_large = "got 2"
    body."1.2" = "x = 2"
"""
SAME = """
    ["the same in other words"]
    body."1.2" = "x = 1 + 0"
"""


SURVIVOR = TOO_LARGE.replace("x = 2", "x = 1 + 0")


@pytest.mark.parametrize(
    "wrong, right, figures, complaint",
    [
        (TOO_SMALL + TOO_LARGE, SAME, (2, 2, 2, 1, 1), ""),
        (TOO_SMALL + SURVIVOR, "", (2, 1, 1, 0, 0), "not caught by test_x_is_not_too_large"),
        (TOO_SMALL + TOO_LARGE, SAME.replace("1 + 0", "2"), (2, 2, 2, 1, 0), "not accepted"),
        (TOO_SMALL, "", (1, 1, 1, 0, 0), "no mistake in the bank makes test_x_is_not_too_large fail"),
    ],
)
def test_it_succeeds_if_all_are_caught_by_name_all_variants_are_accepted_and_each_test_catches_one(
    course, wrong, right, figures, complaint
):
    code, counts, printed = course(wrong, right)

    assert tuple(counts[name] for name in ("mistakes", "caught", "caught_by_name", "variants", "accepted")) == figures
    assert complaint in printed
    assert "mistakes/bank: too small\n    test_x_is_not_too_small: wrong: expected at least 1, got -1" in printed
    assert code == bool(complaint)


def test_what_is_graded_again_counts_as_the_second_time_and_a_survivor_stays_one(course, monkeypatch):
    real, times = verdict.judge, []

    def misses_the_first_time(entry, tests, seeds):
        times.append(entry.name)
        judgement = real(entry, tests, seeds)
        return replace(judgement, graded=Graded()) if times.count(entry.name) == 1 else judgement

    monkeypatch.setattr(verdict, "judge", misses_the_first_time)
    code, figures, printed = course(TOO_SMALL + SURVIVOR, "", "--again")

    assert (code, figures["caught_by_name"]) == (1, 1)
    assert printed.count("once more, alone") == 2
    assert "mistakes/bank: too large: not caught by test_x_is_not_too_large" in printed.splitlines()[-2]


def test_after_the_last_minute_all_that_has_not_begun_is_cancelled_before_the_next_is_waited_for():
    futures: list[Future[Verdict]] = [Future(), Future(), Future()]
    futures[0].set_result(judged({}))
    pool = mock.Mock(spec=GradingPool)
    pool.submit.side_effect = futures

    assert list(verdict.judge_all(pool, [(entry(), {}, [1])] * 3, -1)) == [judged({})]
    assert all(future.cancelled() for future in futures[1:])


def test_a_test_that_is_not_there_is_named(course):
    with pytest.raises(InputError, match="has no test test_z"):
        course(TOO_SMALL.replace("test_x_is_not_too_small", "test_z"))
