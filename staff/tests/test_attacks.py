"""The bank of attacks and what runs it. That no attack gains anything is proved by `python -m staff.attacks`."""

import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path

import pytest

from common.errors import InputError
from common.paths import ROOT
from course.table import load_course
from staff import attacks
from staff.proofs import attack_bank, undefended
from staff.proofs.attack_bank import Attack
from staff.proofs.attack_runs import Gain, attempt, surroundings
from staff.proofs.undefended import SWITCHES
from staff.sandbox.graded_run import CONFINING

pytestmark = pytest.mark.medium

OTHERS = {"files", "seed", "environment", "watch"}
BANK = {attack.name: attack for attack in attack_bank.load()}


def test_every_defence_has_an_attack_that_needs_it_off_and_every_attack_names_one_of_them():
    assert {name for attack in BANK.values() for name in attack.off} == {*SWITCHES, *CONFINING, *OTHERS}


def names_of_the_grader(text: str) -> Iterator[str]:
    """What an attack imports from the grader, dotted, and the files of the grader that it names."""
    for module, names in re.findall(r"\bfrom (grader[\w.]*) import (\w+(?:, *\w+)*)", text):
        yield from (f"{module}.{name.strip()}" for name in names.split(","))
    yield from re.findall(r"\bimport (grader[\w.]*)", text)
    yield from re.findall(r"\bgrader/[\w/]+\.\w+", text)


def there_is(name: str) -> bool:
    if "/" in name:
        return (ROOT / name).is_file()
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        module, _, last = name.rpartition(".")
        return bool(module) and there_is(module) and hasattr(sys.modules[module], last)
    return True


def test_what_the_attacks_take_from_the_grader_is_there():
    # Where a module has moved, its attack fails with all defences and without its own, and would prove nothing.
    texts = [text for attack in BANK.values() for text in (attack.code, *attack.files.values())]
    names = {name for text in texts for name in names_of_the_grader(text)}

    assert names and [name for name in sorted(names) if not there_is(name)] == []


@pytest.mark.parametrize("defence", SWITCHES)
def test_what_a_defence_is_switched_off_by_replacing_is_there(defence, monkeypatch):
    def find(owner, name, _):
        replaced.append(getattr(owner, name))

    def find_in_the_zygote(module, changes):
        replaced.extend(attrgetter(name)(importlib.import_module(module)) for name in changes)

    replaced: list = []
    monkeypatch.setattr(undefended, "replace", find)
    monkeypatch.setattr(undefended, "_in_the_zygote", find_in_the_zygote)

    SWITCHES[defence]()

    assert replaced


def test_an_attack_on_a_class_is_not_left_out_without_a_word():
    with pytest.raises(InputError, match=r"named_as_the_overview is an attack on a class: .*harmful_class"):
        attacks.main(["named_as_the_overview"])


def test_an_unknown_name_is_an_input_error():
    with pytest.raises(InputError, match="expected attacks of the bank, got 'none'"):
        attack_bank.load(["none"])


@pytest.mark.parametrize(
    "row, message",
    [
        ("off = ['json']\nwants = 'fame'\ncode = 'x'", "wants one of points"),
        ("off = ['json']\nwants = 'harm'", "and code or files"),
        ("off = ['json']\nrow = 'p.4'\nwants = 'harm'\ncode = 'x'", "expected one of off, .*; row, .*; and named"),
        ("gain = 'x'", "gain"),
        ("[", "expected attacks as the README there says"),
    ],
)
def test_what_is_no_entry_is_an_input_error(tmp_path, row, message):
    (tmp_path / "bank.toml").write_text(f"[a]\nwhat = 'x'\n{row}")

    with pytest.raises(InputError, match=rf"bank\.toml: .*{message}"):
        attack_bank.load(folder=tmp_path)


def test_figures_count_success_with_defences_and_failure_without_and_points_of_a_row_apart():
    attack = Attack("a", "what", ("json",), "points", code="x")
    row = Attack("b", "what", (), "points", row="p.4", code="x")
    tried = [
        (attack, Gain(), Gain(points=2)),
        (attack, Gain(secret="word"), Gain(points=2)),
        (attack, Gain(running=1), Gain(points=2)),
        (attack, Gain(harm="x"), Gain(secret="another thing")),  # proves nothing
    ]
    tried += [(row, gain, gain) for gain in (Gain(points=2), Gain(), Gain(points=2, harm="x"))]  # so does the second

    assert attacks.figures(tried) == {
        "attacks": 7, "rows": 2, "gained": 2, "leaked": 1, "left_running": 1, "unproven": 2
    }  # fmt: skip


def test_a_process_that_was_left_is_found_and_killed(tmp_path):
    with surroundings() as around:
        code = f"import ctypes, time; ctypes.CDLL(None).prctl(15, b'{around.name}', 0, 0, 0); print(1); time.sleep(100)"
        with subprocess.Popen([sys.executable, "-uc", code], stdout=subprocess.PIPE) as process:
            assert process.stdout
            process.stdout.readline()

            assert around.left_running() == 1
            assert process.wait() == -9


def test_what_was_written_outside_is_seen():
    with surroundings() as around:
        assert around.traces() == ""
        Path(around.places["REPORT"]).write_text("full marks")
        assert "report" in around.traces()


def test_reading_the_reference_gains_nothing():
    assert not attempt(BANK["reads_the_reference"], ())


@pytest.mark.proof
def test_reading_the_reference_gains_points_without_the_wall():
    attack = BANK["reads_the_reference"]

    assert attempt(attack, attack.off).points


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["root", "user"])
def test_no_attack_gains_anything(mode):
    if mode == "root" and os.geteuid() != 0:
        pytest.skip("needs root")
    process = subprocess.run(
        [sys.executable, "-m", "staff.attacks", "--mode", mode], cwd=ROOT, capture_output=True, text=True
    )

    figures = json.loads(process.stdout.splitlines()[-1])

    assert (figures["gained"], figures["leaked"], figures["left_running"], figures["unproven"]) == (0, 0, 0, 0), process


def test_every_row_of_the_bank_is_on_the_page_and_its_points_add_up():
    text = (ROOT / "docs/grading_limits.md").read_text(encoding="utf-8")
    table = text[text.index("| row | points |") :].split("\n\n")[0].splitlines()[2:]
    points = {row.strip(): int(number) for _, row, number, *_ in (line.split("|") for line in table)}
    bonus = sum(number for row, number in points.items() if row.startswith("b."))

    assert {attack.row for attack in BANK.values() if attack.row} <= set(points)
    sentence = f"In all {sum(points.values()) - bonus} of 100 points and {bonus} of {load_course().bonus} bonus points"
    assert sentence in " ".join(text.split())


def test_the_supervisor_of_students_imports_nothing_that_switches_a_defence_off():
    code = (
        "import sys, staff.sandbox.supervisor; print([name for name in sys.modules if name.startswith('staff.proofs')])"
    )

    process = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)

    assert process.stdout.strip() == "[]"
