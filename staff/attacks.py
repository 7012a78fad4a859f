"""Grade a class of attackers: each must gain nothing, leave nothing running, and harm nobody.

    python -m staff.attacks [--jobs N] [--mode root|user] [NAME...]

Each attack of staff/banks/attacks is handed in beside two honest submissions, and all are graded by one run of
staff.grade, as a class would be. Default mode: both when run as root, otherwise user. What is printed: each attack that
had success, and what it came to. The last line of stdout is
{"attacks": n, "runs": n, "gained": n, "leaked": n, "left_running": n, "harmed": n, "unproven": n, "seconds": n}:
`harmed` counts what happened to others; `unproven` attacks whose code was never run. Exit code 0 only if these five
are 0.
"""

import common.workers.environment  # isort: skip  # noqa: F401 (stops with a message if torch is missing)

import argparse
import csv
import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from common.errors import InputError, exit_on_input_error
from common.paths import ROOT
from staff.grade import result_store
from staff.grade.submissions import clean_files, name_all, write_files
from staff.proofs import attack_bank
from staff.proofs.attack_bank import TARGET, VICTIM, Attack
from staff.proofs.bank import solved_files
from staff.proofs.decoys import Decoys, decoys
from staff.sandbox import kernel
from staff.sandbox.graded_run import CONFINING, become_other, probe

LONGEST_CELL = 32_767  # characters that a spreadsheet takes
RAN = ("crashed", "wrong", "passed", "deadlocked", "timed out")  # statuses of a test that ran a student's code
COUNTED = ("gained", "leaked", "left_running", "harmed", "unproven")


def run_class(attacks: Sequence[Attack], jobs: int) -> Counter[str]:
    """Grade these attacks as one class; print every success, and count."""
    with decoys() as around:
        folder, out = around.work / "class", around.work / "graded"
        hand_ins = {path: one for one in attacks for path in attack_bank.hand_in(one, folder / "attacks", around.words)}
        honest = [folder / "solved", folder / "untouched"]
        for path, files in zip(honest, (solved_files(), clean_files()), strict=True):
            write_files(files, path)
        grade([*hand_ins, *honest], out, [TARGET, VICTIM, *(attack.test for attack in attacks)], jobs, around)
        names = {submission.path: submission.name for submission in name_all([*hand_ins, *honest])}
        found = [(one.name, *what) for path, one in hand_ins.items() for what in judge(one, out, names[path], around)]
        solved, untouched = (names[path] for path in honest)
        found += [("the class", *what) for what in of_the_class(out, solved, untouched, around)]
    for name, kind, what in found:
        print(f"{name}   <-- {kind}: {what}", flush=True)
    return Counter[str](kind for _, kind, _ in found) + Counter(runs=len(hand_ins))


def grade(paths: Sequence[Path], out: Path, tests: Sequence[str], jobs: int, around: Decoys) -> None:
    """Run staff.grade with a token in its environment, on a terminal that knows few characters."""
    command = [sys.executable, "-m", "staff.grade", *map(str, paths), "--out", str(out), "--jobs", str(jobs)]
    environment = os.environ | {"PLATFORM_TOKEN": around.word, "PYTHONIOENCODING": "ascii"}
    command += ["--tests", *dict.fromkeys(tests)]
    process = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if process.returncode:
        raise InputError(f"staff.grade ended with code {process.returncode}: {process.stderr[-1000:]}")


def judge(attack: Attack, out: Path, name: str, around: Decoys) -> Iterator[tuple[str, str]]:
    """Yield what an attack came to, by kind, as far as its results show it."""
    row = result_store.read(out, name)
    tests = {test["id"]: test for test in row.tests}
    if points := tests[attack.test]["points"]:
        yield "gained", f"{points} points"
    if not row.run["unreadable"]:
        if attack.code and tests[attack.test]["status"] not in RAN:
            yield "unproven", f"its code was not run: {tests[attack.test]['message'][:200]}"
        if tests[VICTIM]["status"] != "passed":
            yield "harmed", f"its other task: {tests[VICTIM]['status']} {tests[VICTIM]['message'][:200]}"
    texts = [path.read_text(errors="replace") for path in result_store.folder_of(out, name).iterdir()]
    text = "\n".join(texts).replace('\\"', '"')
    if any(secret in text for secret in around.secrets):
        yield "leaked", "a secret is in its results"
    if around.taken in text:
        yield "harmed", "it took more than it may have"
    if (row.run["peak_pss_mb"] or 0) > attack.most_memory:
        yield "harmed", f"{row.run['peak_pss_mb']:.0f} MiB of memory"


def of_the_class(out: Path, solved: str, untouched: str, around: Decoys) -> Iterator[tuple[str, str]]:
    """Yield what happened to others, and to the machine."""
    report = result_store.read(out, solved).report
    if report["score"] != report["max_score"]:
        yield "harmed", f"the solved submission has {report['score']} of {report['max_score']} points"
    if score := result_store.read(out, untouched).report["score"]:
        yield "harmed", f"the untouched submission has {score} points"
    rows = list(csv.DictReader((out / "gradebook.csv").read_text(encoding="utf-8").splitlines()))
    if len(rows) != len(list((out / result_store.HAND_INS).iterdir())) or not (out / "index.html").is_file():
        yield "harmed", f"{len(rows)} rows in the grade book; or there is no page of the class"
    if any(len(cell) > LONGEST_CELL for row in rows for cell in row.values()):
        yield "harmed", "a cell of the grade book is longer than a spreadsheet takes"
    if around.received:
        yield "leaked", f"a listener received {around.received[:40]!r}"
    if traces := around.traces():
        yield "harmed", traces
    if running := around.left_running():
        yield "left_running", f"{running} processes"


def run_mode(mode: str, attacks: Sequence[Attack], jobs: int) -> Counter[str]:
    """Grade the class as the user that this process is."""
    staff = ROOT / "staff"
    if not os.access(staff, os.R_OK | os.X_OK):
        raise InputError(f"--mode {mode}: this user cannot read {staff}; use a clone that others can read")
    held = probe()
    missing = [wall for wall in CONFINING if not held[wall] and wall != "user"]
    print(f"{mode}: {held['level']}{'; NOT AVAILABLE HERE: ' * bool(missing)}{', '.join(missing)}", flush=True)
    return run_class(attacks, jobs)


def become_nobody() -> None:
    """Without any rights: a user who is nobody else."""
    become_other()
    kernel.prctl(kernel.DUMPABLE, 1)
    os.environ.pop("COS598D_CACHE", None)
    probe.cache_clear()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="names of attacks (default: all)")
    parser.add_argument(
        "--jobs", type=int, default=min(2, os.cpu_count() or 1), help="graded in parallel (%(default)s)"
    )
    parser.add_argument("--mode", choices=["root", "user"], help="default: both when run as root, otherwise user")
    options = parser.parse_args(argv)
    attacks, start, total = attack_bank.load(options.names), time.monotonic(), Counter[str]()
    root = os.geteuid() == 0
    if options.mode == "root" and not root:
        raise InputError("--mode root needs root; run as root or use --mode user")
    for mode in [options.mode] if options.mode else ["root", "user"] if root else ["user"]:
        become = become_nobody if root and mode == "user" else None
        with ProcessPoolExecutor(1, multiprocessing.get_context("fork"), initializer=become) as process:
            total += process.submit(run_mode, mode, attacks, options.jobs).result()
    figures = {"attacks": len(attacks), "runs": total["runs"]} | {name: total[name] for name in COUNTED}
    print(json.dumps(figures | {"seconds": round(time.monotonic() - start)}))
    sys.exit(any(total[name] for name in COUNTED))


if __name__ == "__main__":
    exit_on_input_error(main)
