"""The files of a run, and what becomes of the earlier run in its folder.

    FOLDER            the newest run
    FOLDER/earlier    the run before it, until the newest one is complete
    FOLDER.kept       the longest run before these, for a folder in runs/

A complete record is never lost to a run that does not complete. A new run first moves the earlier one to
FOLDER/earlier. When the records of all ranks of the new run are there, the earlier run becomes FOLDER.kept if it is
longer than that one; otherwise it is removed. If the new run crashes or is killed, FOLDER/earlier stays, and the report
uses it.
"""

import contextlib
import json
from pathlib import Path
from typing import NamedTuple

from common.paths import ROOT, shown

EARLIER = "earlier"
# Everything that a script writes into the folder of a run; files that are not listed here stay behind.
PATTERNS = (
    "rank*.json",
    "loss_*.txt",
    "timeline.*",
    "trace.*",
    "trace_*.json",
    "traffic_*.json",
    "counters_*.csv",
)


class Standing(NamedTuple):
    """How much of a run is in a folder. Of two, the larger one is worth more."""

    is_complete: bool  # the record of every rank is there
    iterations: int  # by the record of rank 0; 0: no run that can be used


def standing(folder: Path) -> Standing:
    try:
        record = json.loads((folder / "rank0.json").read_text(encoding="utf-8"))
        iterations, world_size = len(record["iterations"]), int(record["world_size"])
    except (OSError, ValueError, KeyError, TypeError):
        return Standing(False, 0)
    return Standing(iterations > 0 and _has_all_ranks(folder, world_size), iterations)


def files_of_a_run(folder: Path) -> list[Path]:
    return [file for pattern in PATTERNS for file in sorted(folder.glob(pattern))]


def set_aside(folder: Path) -> None:
    """Make room in `folder` for a new run. Rank 0 calls this before any other rank writes a file there.

    The earlier run goes to FOLDER/earlier. If it is not complete, it does not replace a complete one there.
    """
    earlier = folder / EARLIER
    newest = standing(folder)
    if newest.iterations and newest.is_complete >= standing(earlier).is_complete:
        _keep_or_remove(earlier, _kept_folder(folder))
        _move(folder, earlier)
    else:
        _keep_or_remove(folder, _kept_folder(folder))


def settle(folder: Path, rank: int, world_size: int) -> None:
    """Keep or remove FOLDER/earlier if the new run is complete. Every rank calls this when it has written its files.

    The last rank finds all records. If the ranks do not share the folder, none does, and the next `set_aside` decides.
    """
    if not _has_all_ranks(folder, world_size):
        return
    own_folder = folder / f".{EARLIER}.{rank}"
    try:
        (folder / EARLIER).rename(own_folder)  # two ranks may end at the same time: only one of them can rename it
    except FileNotFoundError:
        return
    _keep_or_remove(own_folder, _kept_folder(folder))


def _has_all_ranks(folder: Path, world_size: int) -> bool:
    return all((folder / f"rank{rank}.json").is_file() for rank in range(world_size))


def _kept_folder(folder: Path) -> Path | None:
    """Return where the longest earlier run is kept; None for a folder elsewhere, which the user asked to overwrite."""
    return folder.with_name(f"{folder.name}.kept") if folder.parent == ROOT / "runs" else None


def _keep_or_remove(folder: Path, kept_folder: Path | None) -> None:
    """Move a run to `kept_folder` if it is worth more than the one there: a quick try must not replace a long run."""
    candidate = standing(folder)
    if kept_folder and candidate > standing(kept_folder):
        _move(folder, kept_folder)
        print(f"the earlier run ({candidate.iterations} iterations) is kept in {shown(kept_folder)}", flush=True)
    for file in files_of_a_run(folder):
        file.unlink()
    if folder.name.lstrip(".").startswith(EARLIER):
        with contextlib.suppress(OSError):  # it does not exist, or the user has put a file there
            folder.rmdir()


def _move(folder: Path, target: Path) -> None:
    target.mkdir(exist_ok=True)
    for old in files_of_a_run(target):
        old.unlink()
    for file in files_of_a_run(folder):
        file.replace(target / file.name)
