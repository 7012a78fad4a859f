"""Grades a class with every harmful hand-in there is; the honest ones must be graded as they must be alone.

    python -m staff.proofs.harmful_class --out DIR [--whole] [--seed N]

Harmful are the attacks in harm.toml and class.toml of the bank, and the hand-ins below.
Honest are a solution, one without task 2b, the untouched handout, one with drawn variants and one with drawn mistakes:
they are graded before, in a class of their own, and must get the same points again, the solution all of them. With
--whole all tests are run, otherwise two of them. Last line of stdout: {"submissions": n, "honest": n, "as_alone": n,
"harm": [what was seen]}; exit code 0 only if there is no harm.
"""

import common.workers.environment  # isort: skip  # noqa: F401 (stops with a message if torch is missing)

import argparse
import csv
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from common.errors import InputError, exit_on_input_error
from common.paths import ROOT
from course.table import load_course
from course.zip_files import write_zip
from staff.grade import result_store
from staff.grade.submissions import clean_files, write_files
from staff.proofs import attack_bank
from staff.proofs.attack_bank import HONEST, PARTITION, TARGET, VICTIM, VICTIM_FILE
from staff.proofs.attack_runs import Surroundings, surroundings
from staff.proofs.bank import Entry, changed_files, load_bank, solved_files

LONG = "\U00020000" * 100  # 400 bytes, in a zip only: no file system takes such a name
MANY = 400  # files in place of one
LONGEST_CELL = 32_767  # characters that a spreadsheet takes
MOST_MEMORY = 2500.0  # MiB: graders and ranks of one hand-in
SENDS = "class Partition(Partition):\n    def __getitem__(self, index):\n        "
TEXTS = {  # beside those of class.toml
    "hand_ins.zip": "\n",
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


def honest(folder: Path, seed: int) -> list[str]:
    """Write the honest hand-ins; returns their names."""
    draw = random.Random(seed)
    without_2b = [region for region in load_course().regions if not region.startswith("2b")]
    made = {"all": solved_files(), "most": clean_files(solved=without_2b), "none": clean_files()}
    for kind in ("variants", "mistakes"):
        entries = draw_entries(draw, kind)
        print(f"{kind}: {'; '.join(map(str, entries))}")
        made[kind] = changed_files(entries)
    for name, files in made.items():
        write_files(files, folder / name)
    return list(made)


def draw_entries(draw: random.Random, kind: str, count: int = 4) -> list[Entry]:
    """Entries of different files, so that they fit together, each with the same points in every run. The files of
    TARGET and VICTIM have no mistakes."""
    by_file: dict[str, list[Entry]] = {}
    for entry in load_bank():
        if entry.kind == kind and not (entry.race or (entry.is_mistake and entry.file in (PARTITION, VICTIM_FILE))):
            by_file.setdefault(entry.file, []).append(entry)
    return [draw.choice(by_file[file]) for file in draw.sample(sorted(by_file), count)]


def harmful(folder: Path, texts: Mapping[str, str]) -> int:
    """Hand-ins of these names, each with a text at the end of its partition."""
    for name, text in texts.items():
        write_zip({PARTITION: f"{HONEST}{text}".encode()}, folder / name)
    return len(texts)


def attackers(folder: Path, around: Surroundings) -> int:
    """The attacks of the bank that are to harm others, each under its names."""
    count = 0
    for attack in (attack for attack in attack_bank.load() if attack.bank in ("harm.toml", "class.toml")):
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
    renamed = {name.replace("LONG", LONG): content for name, content in packed.items()}
    many = {name.replace("MANY", str(number)): renamed[name] for name in renamed for number in range(MANY)}
    write_zip(many, target)


def grade(paths: Iterable[Path], out: Path, tests: Sequence[str]) -> None:
    """Grade a class on a terminal that knows few characters."""
    command = [sys.executable, "-m", "staff.grade", *map(str, paths), "--out", str(out), "--jobs", "2", "--seed", "7"]
    command += ["--tests", *tests] if tests else []
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    process = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if process.returncode:
        raise InputError(f"staff.grade ended with code {process.returncode}: {process.stderr[-1000:]}")


def points(out: Path, name: str) -> dict[str, int]:
    """The points of a hand-in, by test."""
    return {test["id"]: test["points"] for test in result_store.read(out, name).tests}


def harm(out: Path, alone: Path, honest: Sequence[str], count: int) -> list[str]:
    """What can be seen in the files of a class of `count` hand-ins; in `alone` the honest ones were graded before."""
    rows = list(csv.DictReader((out / "gradebook.csv").read_text(encoding="utf-8").splitlines()))
    problems = [] if len(rows) == count else [f"{len(rows)} rows in the grade book, expected {count}"]
    for name in honest:
        got, expected = points(out, name), points(alone, name)
        other = [f"{test}: expected {n}, got {got.get(test)}" for test, n in expected.items() if got.get(test) != n]
        if other:
            problems.append(f"{name} was graded otherwise than alone: {'; '.join(other)}")
    solution = result_store.read(out, "all").report
    if solution["score"] < solution["max_score"]:
        problems.append("the solution lacks points")
    if any(len(cell) > LONGEST_CELL for row in rows for cell in row.values()):
        problems.append("a cell that no spreadsheet reads")
    for name in {row["submission"] for row in rows} - set(honest):
        row = result_store.read(out, name)
        if any(test["points"] for test in row.tests if test["id"] == TARGET):
            problems.append(f"{name} has points for {TARGET}")
        if (row.run["peak_pss_mb"] or 0) > MOST_MEMORY:
            problems.append(f"{name} took {row.run['peak_pss_mb']} MiB")
    return problems


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="a new folder for the results")
    parser.add_argument("--seed", type=int, default=1, help="seed for drawing the honest hand-ins (%(default)s)")
    parser.add_argument("--whole", action="store_true", help="run all tests")
    options = parser.parse_args(argv)
    if options.out.exists():
        raise InputError(f"--out {options.out}: this folder exists already; choose a new one")
    tests = [] if options.whole else [TARGET, VICTIM]
    with surroundings() as around:
        folder = around.work / "class"
        good = honest(folder, options.seed)
        alone = around.work / "alone"
        grade([folder / name for name in good], alone, tests)
        count = len(good) + harmful(folder, TEXTS) + attackers(folder / "attacks", around)
        hand_ins = [path for path in folder.iterdir() if path.name != "attacks"]
        grade(hand_ins + sorted(folder.glob("attacks/*/*")), options.out, tests)
        problems = [*harm(options.out, alone, good, count), *filter(None, [around.traces()])]
        texts = [path.read_text(errors="replace") for path in options.out.rglob("*") if path.is_file()]
        words = {around.word: "a secret", around.taken: "more than allowed"}
        problems += [what for word, what in words.items() if any(word in text for text in texts)]
        if running := around.left_running():
            problems.append(f"{running} processes left")
    as_alone = sum(not any(line.startswith(f"{name} was graded") for line in problems) for name in good)
    print(json.dumps({"submissions": count, "honest": len(good), "as_alone": as_alone, "harm": problems}))
    sys.exit(bool(problems))


if __name__ == "__main__":
    exit_on_input_error(main)
