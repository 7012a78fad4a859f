"""Runs that were stopped: the rows that the ranks left behind, one per rank, for the report."""

import json
from dataclasses import dataclass
from pathlib import Path

from common.workers.rows import STOPPED_FILE
from handin.sections import table

CELLS = ("rank", "state", "where", "calls")


@dataclass(frozen=True)
class Stopped:
    """The newest run of a folder, if it was stopped."""

    name: str
    conclusion: str
    rows: tuple[tuple[str, ...], ...]

    @property
    def doubt(self) -> str:
        return f"{self.name}: the newest run was stopped: {self.conclusion}"


def find_stopped(root: Path, folder: Path) -> list[Stopped]:
    """Return every stopped run in `folder` and two levels below; a file that cannot be read is left out."""
    found = []
    for path in sorted(path for below in ("", "*/", "*/*/") for path in folder.glob(f"{below}{STOPPED_FILE}")):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            rows = tuple(tuple(str(row[cell]) for cell in CELLS) for row in content["rows"])
            name = path.parent.relative_to(root).as_posix() if path.is_relative_to(root) else str(path.parent)
            found.append(Stopped(name, str(content["conclusion"]), rows))
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            continue
    return found


def tables(stopped: list[Stopped]) -> str:
    """Where each rank was when a run was stopped; nothing if none was."""
    head = ("rank", "state", "where", "collectives")
    return "".join(f"\n{run.name} was stopped: {run.conclusion}.\n\n{table(head, run.rows)}" for run in stopped)
