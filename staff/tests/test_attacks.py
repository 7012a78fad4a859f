"""A class of attackers gains nothing; and the judge of attacks sees one that has success."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from common.errors import InputError
from common.paths import ROOT
from staff.attacks import run_class
from staff.proofs import attack_bank
from staff.proofs.attack_bank import Attack
from staff.proofs.decoys import decoys

TRIED = ("reads_the_reference", "tells_a_listener", "kills_the_grader", "daemon", "named_as_the_grade_book")
SOLVES = "\nPartition.__getitem__ = lambda self, index: self.data[self.index[index]]\n"


@pytest.mark.medium
def test_attacks_gain_nothing_beside_one_that_is_seen_to_gain_and_one_that_is_seen_to_leak(capsys):
    successes = [Attack("solves", "test", "", SOLVES), Attack("tells", "test", "", "raise RuntimeError('@WORD@')")]
    named = [Attack(one.name, one.kind, one.what, one.code, named=(f"{one.name}.zip",)) for one in successes]

    count = run_class([*attack_bank.load(TRIED), *named], jobs=2)

    assert count == {"attacks": 7, "runs": 7, "gained": 1, "leaked": 1}, capsys.readouterr().out


@pytest.mark.proof
def test_no_attack_of_the_bank_gains_leaks_stays_or_harms():
    process = subprocess.run([sys.executable, "-m", "staff.attacks"], cwd=ROOT, capture_output=True, text=True)

    figures = json.loads(process.stdout.splitlines()[-1])
    assert process.returncode == 0, process.stdout
    assert figures["attacks"] >= 40 and not any(figures[name] for name in ("gained", "leaked", "harmed", "unproven"))


def test_what_is_left_running_or_written_is_seen_and_removed():
    with decoys() as around:
        code = f"import ctypes, time; ctypes.CDLL(None).prctl(15, b'{around.name}', 0, 0, 0); print(1); time.sleep(100)"
        with subprocess.Popen([sys.executable, "-uc", code], stdout=subprocess.PIPE) as process:
            assert process.stdout
            process.stdout.readline()

            assert around.left_running() == 1
            assert process.wait() == -9
        assert around.traces() == ""
        Path(around.words["REPORT"]).write_text("full marks")
        assert "report" in around.traces()


@pytest.mark.parametrize("text", ["[a]\nwhy = 'x'", "[a]\ncode = 'x'", "[", "a = 1"])
def test_what_is_no_entry_is_an_input_error(tmp_path, text):
    (tmp_path / "bank.toml").write_text(text)

    with pytest.raises(InputError, match=r"bank\.toml: expected attacks"):
        attack_bank.load(folder=tmp_path)
