"""Reads the table beside the submissions that Gradescope exports: whose they are, and when they were handed in.

export/submission_metadata.yml
export/submission_123456/...        the files of one submission
"""

import functools
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import yaml

from common.errors import InputError

METADATA = "submission_metadata.yml"


@dataclass(frozen=True)
class Exported:
    """What the table says of one submission: the ids of its people (number, and address up to the @), and the time."""

    ids: tuple[str, ...]
    submitted: str  # ISO 8601 with a time zone, or empty


def exported(path: Path) -> Exported | None:
    """Return what the table beside a folder says of it; None if there is no table.

    Raises:
        InputError: the table cannot be read.
    """
    table = path.parent / METADATA
    return _read(table).get(path.name) if table.is_file() else None


@functools.cache  # or a class would read it once for each of its submissions
def _read(table: Path) -> dict[str, Exported]:
    try:
        rows = yaml.safe_load(table.read_text(encoding="utf-8"))
        return {name: _row(row) for name, row in rows.items()}
    except (OSError, ValueError, yaml.YAMLError, AttributeError, TypeError, LookupError) as error:
        raise InputError(f"{table}: expected Gradescope's table of submissions, got {error}; export again") from None


def _row(row: dict) -> Exported:
    ids = [
        str(id)
        for person in row[":submitters"]
        for id in (person.get(":sid"), str(person.get(":email") or "").partition("@")[0])
        if id
    ]
    time = row.get(":created_at")
    if isinstance(time, str):
        time = datetime.fromisoformat(time)
    if time and time.tzinfo is None:  # YAML's reader gives times with a zone as UTC, some versions without saying so
        time = time.replace(tzinfo=UTC)
    return Exported(tuple(dict.fromkeys(ids)), time.isoformat(timespec="seconds") if time else "")
