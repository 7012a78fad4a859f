"""A class of attackers gains nothing; and what runs attacks sees those that have success."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from common.paths import ROOT
from staff.attacks import run_class
from staff.proofs import attack_bank
from staff.proofs.attack_bank import Attack
from staff.proofs.decoys import decoys

TRIED = ("reads_the_reference", "daemon", "named_as_the_grade_book")
SOLVES = "\nPartition.__getitem__ = lambda self, index: self.data[self.index[index]]\n"


@pytest.mark.medium
def test_attacks_gain_nothing_beside_one_that_is_seen_to_gain_and_one_that_is_seen_to_leak(capsys):
    successes = [
        Attack("solves", "test", "", SOLVES, named=("solves.zip",)),
        Attack("tells", "test", "", "raise RuntimeError('@WORD@')", named=("tells.zip",)),
    ]

    count = run_class([*attack_bank.load(TRIED), *successes], jobs=2)

    assert count == {"runs": 5, "gained": 1, "leaked": 1}, capsys.readouterr().out


@pytest.mark.slow
def test_no_attack_of_the_bank_gains_leaks_stays_or_harms():
    process = subprocess.run([sys.executable, "-m", "staff.attacks"], cwd=ROOT, capture_output=True, text=True)

    assert process.returncode == 0, process.stdout
    assert json.loads(process.stdout.splitlines()[-1])["attacks"] >= 40


def test_what_is_left_running_or_written_is_seen_and_removed():
    with decoys() as around:
        code = f"import ctypes, time; ctypes.CDLL(None).prctl(15, b'{around.name}', 0, 0, 0); print(1); time.sleep(100)"
        with subprocess.Popen([sys.executable, "-uc", code], stdout=subprocess.PIPE) as process:
            assert process.stdout
            process.stdout.readline()
            assert around.left_running() == 1
        assert process.returncode == -9
        assert around.traces() == ""
        Path(around.words["REPORT"]).write_text("full marks")
        assert "report" in around.traces()
