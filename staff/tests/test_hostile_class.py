"""A class in which most hand-ins are hostile: the honest ones are graded as if they were alone, in every run."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from common.paths import ROOT
from staff.grade import result_store
from staff.grade.submissions import clean_files
from staff.proofs.attack_bank import HONEST, PARTITION, TARGET, VICTIM, VICTIM_FILE
from staff.proofs.class_attacks import LONG
from staff.proofs.class_of_submissions import as_zip

MOST_MEMORY = 2500.0  # MiB: graders and ranks of one hand-in
SENDS = "class Partition(Partition):\n    def __getitem__(self, index):\n        "
HOSTILE = {
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
}
FEW = ("gradebook.csv.zip", "alice smith.zip", "alice_smith.zip", "long answer.zip")


def solved(file: str) -> bytes:
    return (ROOT / file).read_bytes()


def honest(folder: Path) -> dict[str, int]:
    """Three honest hand-ins, and the points that each has when it is alone."""
    write(folder / "both", {PARTITION: solved(PARTITION), VICTIM_FILE: solved(VICTIM_FILE)})
    write(folder / "one", {PARTITION: solved(PARTITION)})
    write(folder / "none", {PARTITION: clean_files()[PARTITION]})
    return {"both": 4, "one": 2, "none": 0}


def write(folder: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def hostile(folder: Path, names: list[str]) -> None:
    for name in names:
        (folder / name).write_bytes(as_zip({PARTITION: f"{HONEST}{HOSTILE[name]}".encode()}))


def unreadable(folder: Path) -> int:
    """Hand-ins of which nothing can be graded."""
    (folder / "overlong.zip").write_bytes(as_zip({f"task1/{LONG}.py": b"x"}))
    (folder / "secret.txt").write_text("another's work")
    (folder / "linked").mkdir()
    os.link(folder / "secret.txt", folder / "linked/notes.py")
    return 2


def start(folder: Path, out: Path) -> subprocess.Popen:
    paths = [str(path) for path in sorted(folder.iterdir()) if path.suffix != ".txt"]
    command = [sys.executable, "-m", "staff.grade", *paths, "--out", str(out), "--jobs", "2", "--seed", "7"]
    command += ["--tests", TARGET, VICTIM]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run(folder: Path, out: Path, then: Callable[[subprocess.Popen], None] = lambda _: None) -> dict:
    process = start(folder, out)
    then(process)
    said, errors = process.communicate(timeout=3000)
    assert process.returncode == 0, errors[-2000:]
    return json.loads(said.splitlines()[-1])


def reports(out: Path, names: list[str]) -> list[bytes]:
    return [(result_store.folder_of(out, name) / "report.json").read_bytes() for name in names]


def kill_after(out: Path, count: int, process: subprocess.Popen) -> None:
    while process.poll() is None and len(list(out.glob("hand_ins/*/report.json"))) < count:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.communicate()


def check(tmp_path: Path, names: list[str], more: int, restart: bool) -> None:
    folder, alone, out = tmp_path / "in", tmp_path / "alone", tmp_path / "out"
    points = honest(folder)
    run(folder, alone)
    hostile(folder, names)
    more = unreadable(folder) if more else 0
    if restart:
        kill_after(out, 5, start(folder, out))

    figures = run(folder, out)

    count = len(points) + len(names) + more
    rows = list(csv.DictReader((out / "gradebook.csv").read_text(encoding="utf-8").splitlines()))
    assert (figures["submissions"], figures["not_graded"], len(rows)) == (count, 0, count)
    assert reports(out, list(points)) == reports(alone, list(points))
    scores = {row["submission"]: int(row["score"]) for row in rows}
    assert {name: scores.pop(name) for name in points} == points and not any(scores.values()), scores
    assert figures["peak_pss_mb"] < MOST_MEMORY
    assert (figures["kept"] >= 5) == restart
    assert "another's work" not in "".join(p.read_text(errors="replace") for p in out.rglob("*") if p.is_file())


@pytest.mark.proof
def test_hostile_names_and_answers_change_nothing_for_honest_hand_ins(tmp_path):
    check(tmp_path, list(FEW), more=0, restart=False)


@pytest.mark.slow
def test_a_class_of_twenty_with_every_kind_of_hostile_hand_in_is_graded_and_can_be_restarted(tmp_path):
    check(tmp_path, list(HOSTILE), more=2, restart=True)
