"""Reads the bank of attacks, and writes what each of them hands in. See staff/banks/attacks/README.md."""

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from common.errors import InputError
from common.paths import ROOT
from course.zip_files import write_zip
from staff.grade.submissions import clean_files, write_files
from staff.proofs.bank import BANKS

PARTITION = "common/data_partition.py"
TARGET = "tests/task2b/test_partitions.py::test_a_partition_gives_the_examples_at_its_indices"
VICTIM_FILE = "common/schedule.py"  # solved in every attacker's hand-in: its points show that grading went on
VICTIM = "tests/pipeline/test_schedule.py::test_the_schedule_is_as_short_as_it_can_be"
LONG = "\U00020000" * 100  # 400 bytes, in a zip only: no file system takes such a name
MANY = 400  # files in place of one
UNSOLVED = """
class Partition:
    def __init__(self, data, index):
        self.data, self.index = data, index

    def __len__(self):
        return len(self.index)

    def __getitem__(self, index):
        raise RuntimeError("not solved")

"""


@dataclass(frozen=True)
class Attack:
    """One attack: its kind (the file that it is in), what it does, and what is handed in.

    `code` is at the end of `file`, which is an unsolved Partition or the handout's file of that name; `files` lie
    beside it. `test` is the test whose points it is after. `named` are the names of its hand-ins, which are alike.
    """

    name: str
    kind: str
    what: str
    code: str = ""
    file: str = PARTITION
    test: str = TARGET
    files: dict[str, str] = field(default_factory=dict)
    named: tuple[str, ...] = ()
    most_memory: float = 3000.0  # MiB: graders and ranks together


def load(names: Iterable[str] = (), folder: Path = BANKS / "attacks") -> list[Attack]:
    """Return the attacks of these names, or all of them.

    Raises:
        InputError: what is no entry, and a name that the bank does not have.
    """
    attacks: dict[str, Attack] = {}
    for path in sorted(folder.glob("*.toml")):
        try:
            for name, row in tomllib.loads(path.read_text(encoding="utf-8")).items():
                named = tuple(row.pop("named", [f"{name}.zip"]))
                attacks[name] = Attack(name, path.stem, named=named, **row)
        except (tomllib.TOMLDecodeError, TypeError, AttributeError) as error:
            raise InputError(f"{path.name}: expected attacks as the README there says, got {error}") from error
    names = list(names)
    if unknown := set(names) - set(attacks):
        raise InputError(f"expected attacks of the bank, got {min(unknown)!r}; it has {', '.join(attacks)}")
    return [attacks[name] for name in names or attacks]


def hand_in(attack: Attack, folder: Path, words: Mapping[str, str]) -> list[Path]:
    """Write an attack's hand-ins below a folder, with @NAME@ replaced by `words`. Returns their paths."""
    files = {VICTIM_FILE: (ROOT / VICTIM_FILE).read_text(), PARTITION: UNSOLVED} | attack.files
    if attack.code:
        start = UNSOLVED if attack.file == PARTITION else clean_files()[attack.file].decode()
        files[attack.file] = start.replace("# TODO(cos598d)", "#") + attack.code  # or it counts as not attempted
    content: dict[str, bytes] = {}
    for name, text in files.items():
        for word, value in words.items():
            text = text.replace(f"@{word}@", value)
        copies = range(MANY if "MANY" in name else 1)
        content |= {name.replace("LONG", LONG).replace("MANY", str(n)): text.lstrip("\n").encode() for n in copies}
    paths = [folder / attack.name / name for name in attack.named]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_zip(content, path) if path.suffix == ".zip" else write_files(content, path)
    return paths
