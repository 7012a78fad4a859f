"""Grades a class with every harmful hand-in there is; the honest ones must be graded as if they were alone.

    python -m staff.proofs.harmful_class --out DIR [--whole]

Harmful are the attacks in harm.toml and class.toml of the bank, the hand-ins below, and zips that cannot be read. The
honest ones are graded first without them. With --whole all tests are run, otherwise two of them. Last line of stdout:
{"submissions": n, "honest": n, "as_alone": n, "harm": [what was seen]}; exit code 0 only if there is no harm.
"""

import common.workers.environment  # isort: skip  # noqa: F401 (stops with a message if torch is missing)

import argparse
import csv
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from common.errors import InputError, exit_on_input_error
from common.paths import ROOT
from course.table import load_course
from staff.grade import result_store
from staff.proofs import attack_bank
from staff.proofs.attack_bank import HONEST, PARTITION, TARGET, VICTIM
from staff.proofs.attack_runs import Surroundings, surroundings
from staff.proofs.class_of_submissions import Files, as_zip, solved_files

LONG = "\U00020000" * 100  # 400 bytes, in a zip only: no file system takes such a name
MANY = 400  # files in place of one
LONGEST_CELL = 32_767  # characters that a spreadsheet takes
MOST_MEMORY = 2500.0  # MiB: graders and ranks of one hand-in
SENDS = "class Partition(Partition):\n    def __getitem__(self, index):\n        "
TEXTS = {
    "gradebook.csv.zip": "\n",
    "index.html.zip": "\n",
    "hand_ins.zip": "\n",
    "alice smith.zip": "\n",
    "alice_smith.zip": "\n",
    "Alice_Smith.zip": "\n",
    "long answer.zip": f"{SENDS}return 'expected ' * 100_000\n",
    "long name.zip": f"{SENDS}raise type('expected ' * 100_000, (Exception,), {{}})('x' * 900_000)\n",
    "half a character.zip": f"print('\\ud800')\n{SENDS}raise RuntimeError('\\udfff')\n",
    "large value.zip": f"import torch\n{SENDS}return torch.zeros(50_000_000)\n",
    "many pairs.zip": f"{SENDS}return [[i, i] for i in range(200_000)]\n",
    "all memory.zip": "held = [bytes(1 << 28) for _ in range(100)]\n",
    "flood.zip": "import os\nfor _ in range(3000):\n    os.write(1, b'x' * 65535 + b'\\n')\n",
    "no end.zip": "while True:\n    pass\n",
    "dies.zip": "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n",
    "hog.zip": "import os, time\nend = time.time() + 8.5\nfor _ in range(5):\n    os.fork()\n"
    "os.setsid()\nwhile time.time() < end:\n    pass\n",
}
FEW = ("gradebook.csv.zip", "alice smith.zip", "alice_smith.zip", "long answer.zip")


def honest(folder: Path) -> list[str]:
    """Three honest hand-ins: all regions solved, all but one task, none."""
    course = load_course()
    for name, without in (("all", "-"), ("most", "2b"), ("none", "")):
        files = solved_files(course, without=[region for region in course.regions if region.startswith(without)])
        _write(folder / name, files)
    return ["all", "most", "none"]


def harmful(folder: Path, names: Sequence[str]) -> int:
    """Hand-ins of these names, see TEXTS."""
    for name in names:
        (folder / name).write_bytes(as_zip({PARTITION: f"{HONEST}{TEXTS[name]}".encode()}))
    return len(names)


def attackers(folder: Path, around: Surroundings) -> int:
    """The attacks of the bank that are to harm others, each under its names."""
    count = 0
    for attack in attack_bank.load(name for file in ("harm.toml", "class.toml") for name in attack_bank.names_in(file)):
        places = around.places | ({"TAKEN": "allowed here"} if attack.limits else {})
        for name in attack.named or [f"{attack.name}.zip"]:
            files = around.work / "files" / attack.name / name
            attack_bank.hand_in(attack, files, places)
            (folder / attack.name).mkdir(parents=True, exist_ok=True)
            as_handed_in(files, folder / attack.name / name)
            count += 1
    return count


def as_handed_in(files: Path, target: Path) -> None:
    """A zip or a folder, as its name says."""
    if target.suffix != ".zip":
        files.rename(target)
        return
    packed = {path.relative_to(files).as_posix(): path.read_bytes() for path in files.rglob("*") if path.is_file()}
    named = {name.replace("LONG", LONG): content for name, content in packed.items()}
    many = {name.replace("MANY", str(number)): named[name] for name in named for number in range(MANY)}
    target.write_bytes(as_zip(many))


def unreadable(folder: Path) -> int:
    """Hand-ins of which nothing can be graded."""
    (folder / "overlong.zip").write_bytes(as_zip({f"task1/{LONG}.py": b"x"}))
    (folder.parent / "secret.txt").write_text("another's work")
    (folder / "linked").mkdir()
    os.link(folder.parent / "secret.txt", folder / "linked/notes.py")
    return 2


def _write(folder: Path, files: Files) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def command(paths: Iterable[Path], out: Path, tests: Sequence[str]) -> list[str]:
    words = [sys.executable, "-m", "staff.grade", *map(str, paths), "--out", str(out), "--jobs", "2", "--seed", "7"]
    return words + (["--tests", *tests] if tests else [])


def grade(paths: Iterable[Path], out: Path, tests: Sequence[str]) -> dict[str, Any]:
    """Grade a class on a terminal that knows few characters. Returns the last line of what staff.grade prints."""
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command(paths, out, tests), cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise InputError(f"staff.grade ended with code {done.returncode}: {done.stderr[-1000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def points(out: Path, name: str) -> list[tuple[str, str, int]]:
    return [(test["id"], test["status"], test["points"]) for test in result_store.read(out, name).tests]


def harm(out: Path, alone: Path, names: Sequence[str], count: int) -> list[str]:
    """What can be seen in the files of a class of `count`, of which `names` are honest."""
    rows = list(csv.DictReader((out / "gradebook.csv").read_text(encoding="utf-8").splitlines()))
    scores = {row["submission"]: row for row in rows}
    found = [] if len(rows) == count else [f"{len(rows)} rows in the grade book, expected {count}"]
    found += [f"{name} was graded otherwise than alone" for name in names if points(out, name) != points(alone, name)]
    long = any(len(cell) > LONGEST_CELL for row in rows for cell in row.values())
    found += ["a cell that no spreadsheet reads"] * long
    for name in scores.keys() - set(names):
        row = result_store.read(out, name)
        found += [f"{name} has points for {TARGET}"] * any(t["points"] for t in row.tests if t["id"] == TARGET)
        found += [f"{name} took {row.run['peak_pss_mb']} MiB"] * ((row.run["peak_pss_mb"] or 0) > MOST_MEMORY)
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="a new folder for the results")
    parser.add_argument("--whole", action="store_true", help="run all tests")
    options = parser.parse_args(argv)
    if options.out.exists():
        raise InputError(f"--out {options.out}: this folder exists already; choose a new one")
    out, alone = options.out / "class", options.out / "alone"
    tests = [] if options.whole else [TARGET, VICTIM]
    with surroundings() as around:
        folder = around.work / "class"
        names = honest(folder)
        hand_ins = [folder / name for name in names]
        grade(hand_ins, alone, tests)
        count = len(names) + harmful(folder, list(TEXTS)) + unreadable(folder) + attackers(folder / "attacks", around)
        hand_ins += [path for path in folder.iterdir() if path.name not in (*names, "attacks")]
        grade(hand_ins + sorted(folder.glob("attacks/*/*")), out, tests)
        seen = harm(out, alone, names, count) + [around.traces()] * bool(around.traces())
        texts = [path.read_text(errors="replace") for path in out.rglob("*") if path.is_file()]
        words = {around.word: "a secret", around.taken: "more than allowed", "another's work": "another's work"}
        seen += [what for word, what in words.items() if any(word in text for text in texts)]
        if left := around.left_running():
            seen.append(f"{left} processes left")
    for name in names:
        times = [result_store.read(where, name).run["wall_s"] for where in (alone, out)]
        print(f"{name}: alone {times[0]} s, in the class {times[1]} s")
    as_alone = sum(points(out, name) == points(alone, name) for name in names)
    print(json.dumps({"submissions": count, "honest": len(names), "as_alone": as_alone, "harm": seen}))
    sys.exit(bool(seen))


if __name__ == "__main__":
    exit_on_input_error(main)
