"""Reads the bank of attacks, and makes a submission of an entry. See staff/banks/attacks/README.md."""

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.errors import InputError
from common.paths import ROOT
from course.table import load_course
from staff.grade.submissions import choose, clean_files, write_files, write_tree
from staff.proofs.bank import BANKS

PARTITION = "common/data_partition.py"
TARGET = "tests/task2b/test_partitions.py::test_a_partition_gives_the_examples_at_its_indices"
VICTIM_FILE = "common/schedule.py"  # solved in every attacker's tree: an honest task that is graded after the attack
VICTIM = "tests/pipeline/test_schedule.py::test_the_schedule_is_as_short_as_it_can_be"
WANTS = ("points", "secret", "running", "harm")
WHOLE = ("course.toml", "pyproject.toml")  # files beside the graders
HONEST = """
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
    """One attack: what it does, the defences it is made for, what it is after, and what is handed in.

    `row` is a row of docs/grading_limits.md, in place of defences: such an attack gains points with all of them. `code`
    stands at the end of `file`: an unsolved Partition, or the clean or (`solved`) the solved file of that name. `files`
    lie beside it. `named`, in place of defences, are the names of hand-ins with this content, which only
    `staff.proofs.harmful_class` grades, all in one class. `most_memory` is how many MiB graders and ranks may take
    together; `limits` are fields of confine.Policy. `modes` are those in which it succeeds without its defences.
    """

    name: str
    what: str
    off: tuple[str, ...]
    wants: str
    row: str = ""
    code: str = ""
    file: str = PARTITION
    test: str = TARGET
    solved: bool = False
    files: dict[str, str] = field(default_factory=dict)
    bank: str = ""  # the file that it is in
    named: tuple[str, ...] = ()
    limits: dict[str, int] = field(default_factory=dict)
    most_memory: float = 3000.0
    deadline: float = 240.0
    modes: tuple[str, ...] = ("root", "user")


def load(names: Iterable[str] = (), folder: Path = BANKS / "attacks") -> list[Attack]:
    """The attacks of these names, or all of them.

    Raises:
        InputError: what is no entry, and a name that the bank does not have.
    """
    attacks = [attack for path in sorted(folder.glob("*.toml")) for attack in _read(path)]
    bank_names = [attack.name for attack in attacks]
    requested = set(names)
    if unknown := requested - set(bank_names):
        raise InputError(f"expected attacks of the bank, got {min(unknown)!r}; it has {', '.join(bank_names)}")
    if twice := {name for name in bank_names if bank_names.count(name) > 1}:
        raise InputError(f"{folder.name}: expected every name once, got {min(twice)!r} twice; rename one")
    return [attack for attack in attacks if not requested or attack.name in requested]


def _read(path: Path) -> list[Attack]:
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
        return [_attack(name, row | {"bank": path.name}) for name, row in table.items()]
    except (tomllib.TOMLDecodeError, TypeError, KeyError) as error:
        raise InputError(f"{path.name}: expected attacks as the README there says, got {error}") from error


def _attack(name: str, row: dict[str, Any]) -> Attack:
    row |= {key: tuple(row[key]) for key in ("off", "named", "modes") if key in row}
    attack = Attack(name, **({"off": ()} | row))
    if attack.wants not in WANTS or not (attack.code or attack.files):
        raise KeyError(f"{name}: wants one of {', '.join(WANTS)}, and code or files")
    if [bool(attack.off), bool(attack.row), bool(attack.named)].count(True) != 1:
        raise KeyError(
            f"{name}: expected one of off, the defences that stop it; row, a row of docs/grading_limits.md; and named"
        )
    return attack


def fill(text: str, places: Mapping[str, str]) -> str:
    """The text with @NAME@ replaced by what stands there in this run."""
    for name, value in places.items():
        text = text.replace(f"@{name}@", value)
    return text


def hand_in(attack: Attack, folder: Path, places: Mapping[str, str]) -> None:
    """Write what the attacker hands in."""
    files = {name: text.lstrip("\n") for name, text in attack.files.items()}
    if attack.code or attack.file == PARTITION:
        files[attack.file] = _file(attack) + attack.code
    files[VICTIM_FILE] = (ROOT / VICTIM_FILE).read_text()
    write_files({name: fill(text, places).encode() for name, text in files.items()}, folder)


def _file(attack: Attack) -> str:
    if attack.file == PARTITION:
        return HONEST
    if attack.solved:
        return (ROOT / attack.file).read_text()
    return clean_files()[attack.file].decode().replace("# TODO(cos598d)", "#")  # or it counts as not attempted


def tree_of(submission: Path, tree: Path, believing: bool) -> None:
    """What is graded of a hand-in; with `believing` all of it lies over the graders, as where these are sent out."""
    course = load_course()
    clean = clean_files()
    if believing:
        graders = [*ROOT.glob("grader/**/*.py"), *ROOT.glob("tests/**/*.py")]
        clean |= {path.relative_to(ROOT).as_posix(): path.read_bytes() for path in graders}
        clean |= {name: (ROOT / name).read_bytes() for name in WHOLE}
        handed_in = {path.relative_to(submission).as_posix(): path for path in submission.rglob("*") if path.is_file()}
        clean |= {name: path.read_bytes() for name, path in handed_in.items()}
    write_tree(clean, choose(submission, course)[0], tree)
