"""One class with a hostile hand-in and an honest one, graded by staff.grade: is the honest one graded as alone?"""

import argparse
import csv
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from common.errors import exit_on_input_error
from common.paths import ROOT
from staff.grade import result_store, whole_class
from staff.grade.submissions import clean_files
from staff.proofs import attack_bank, class_switches
from staff.proofs.attack_bank import TARGET, VICTIM, VICTIM_FILE, Attack
from staff.proofs.attack_runs import Gain, Surroundings, surroundings
from staff.proofs.class_of_submissions import as_zip

LONG = "\U00020000" * 100  # 400 bytes, in a zip only: no file system takes such a name
MANY = 400  # files in place of one
LONGEST_CELL = 32_767  # characters that a spreadsheet takes
HONEST, POINTS = "honest", 4  # its name, and its points in the two tests that are graded
STEPS = 150  # seconds for all steps but the graders
SLOWNESS = "3"  # of the deadlines of single runs: several attacks run at once


def class_attempt(attack: Attack, off: Sequence[str]) -> Gain:
    """Grade the class, and look at the files of the class as an instructor would."""
    with surroundings() as around:
        hand_ins, out = around.work / "hand-ins", around.work / "graded"
        _honest(hand_ins / HONEST)
        for number, name in enumerate(attack.named):
            attack_bank.hand_in(attack, around.work / f"files{number}", around.places)
            as_handed_in(around.work / f"files{number}", hand_ins / name)
        command = [sys.executable, "-m", "staff.proofs.class_attacks", "--off", ",".join(off), "--"]
        command += [*map(str, sorted(hand_ins.iterdir())), "--out", str(out), "--jobs", str(1 + len(attack.named))]
        command += ["--deadline", str(attack.deadline), "--tests", TARGET, VICTIM]
        environment = os.environ | {"COS598D_SLOWNESS": SLOWNESS, "PYTHONIOENCODING": "latin-1"}
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            _, errors = process.communicate(timeout=attack.deadline + STEPS)
            said = "" if process.returncode == 0 else f"staff.grade failed: {errors.decode(errors='replace')[-200:]}"
        except subprocess.TimeoutExpired:
            said = f"staff.grade was not done {STEPS} s after the last deadline"
            process.kill()
            process.communicate()
        harm = [said] * bool(said) + complaints(out, len(attack.named) + 1)
        harm += ["took more than it may have"] * _is_in(out, around.taken)
        return Gain(_points(out, HONEST), _secret(out, around), around.left_running(), "; ".join(harm))


def complaints(out: Path, count: int) -> list[str]:
    """What is not as it must be in the files of a class of `count`, of which one is honest."""
    try:
        rows = list(csv.DictReader((out / "gradebook.csv").read_text(encoding="utf-8").splitlines()))
    except (OSError, csv.Error) as error:
        return [f"no grade book that can be read ({type(error).__name__})"]
    long = any(len(cell) > LONGEST_CELL for row in rows for cell in row.values())
    found = ["a cell that no spreadsheet reads"] * long
    found += [] if len(rows) == count else [f"{len(rows)} rows in the grade book, expected {count}"]
    found += [] if (out / "index.html").is_file() else ["no overview"]
    score = next((row["score"] for row in rows if row["submission"] == HONEST), "nothing")
    return found + ([] if score == str(POINTS) else [f"the honest hand-in has {score} of {POINTS} points"])


def _points(out: Path, honest: str) -> int:
    """The most points that an attacker got for what it has not solved: its partition."""
    found = [0]
    for path in (out / result_store.HAND_INS).glob("*/report.json"):
        tests = json.loads(path.read_text())["tests"] if path.parent.name != honest else []
        found += [test["points"] for test in tests if test["id"] == TARGET]
    return max(found)


def _secret(out: Path, around: Surroundings) -> str:
    """Another's word, or where our scratch folder is."""
    return "in the results" if _is_in(out, around.word) or _is_in(out, result_store.PREFIX) else ""


def _is_in(out: Path, word: str) -> bool:
    files = (path for path in out.rglob("*") if path.is_file() and not path.name.startswith("."))
    return any(word in path.read_text(errors="replace") for path in files)


def _honest(folder: Path) -> None:
    for file in (attack_bank.PARTITION, VICTIM_FILE):
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_bytes((ROOT / file).read_bytes())


def as_handed_in(files: Path, target: Path) -> None:
    """A zip or a folder, as its name says."""
    if target.suffix != ".zip":
        files.rename(target)
        return
    packed = {path.relative_to(files).as_posix(): path.read_bytes() for path in files.rglob("*") if path.is_file()}
    named = {name.replace("LONG", LONG): content for name, content in packed.items()}
    many = {name.replace("MANY", str(number)): named[name] for name in named for number in range(MANY)}
    target.write_bytes(as_zip(many))


def main() -> None:
    """staff.grade without some defences."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--off", default="")
    parser.add_argument("arguments", nargs="*")
    options = parser.parse_args()
    if options.off:
        class_switches.switch_off(options.off.split(","))
    assert clean_files(), "the course can be read"
    whole_class.main(options.arguments)


if __name__ == "__main__":
    exit_on_input_error(main)
