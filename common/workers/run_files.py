"""The files of a run, and what becomes of the earlier run in its folder: a quick try must not replace a long run.

FOLDER         the newest run
FOLDER.kept    the longest run before it, for a folder in runs/; elsewhere, the user asked to overwrite it
"""

import json
from pathlib import Path

from common.paths import ROOT, shown

# Everything that a script writes into the folder of a run; files that are not listed here stay behind.
PATTERNS = (
    "rank*.json", "loss_*.txt", "timeline.*", "trace.*", "trace_*.json", "traffic_*.json", "counters_*.csv",
)  # fmt: skip


def files_of_a_run(folder: Path) -> list[Path]:
    return [file for pattern in PATTERNS for file in sorted(folder.glob(pattern))]


def set_aside(folder: Path) -> None:
    """Make room in `folder` for a new run. Rank 0 calls this before any other rank writes a file there."""
    kept = folder.with_name(f"{folder.name}.kept")
    is_whole, length = _worth(folder)
    if folder.parent == ROOT / "runs" and length and (is_whole, length) >= _worth(kept):
        kept.mkdir(exist_ok=True)
        for file in files_of_a_run(kept):
            file.unlink()
        for file in files_of_a_run(folder):
            file.replace(kept / file.name)
        print(f"the earlier run ({length} iterations) is kept in {shown(kept)}", flush=True)
    for file in files_of_a_run(folder):
        file.unlink()


def _worth(folder: Path) -> tuple[bool, int]:
    """Return whether the record of every rank is there, and the iterations of rank 0, 0 without a readable record."""
    try:
        record = json.loads((folder / "rank0.json").read_text(encoding="utf-8"))
        iterations, world_size = len(record["iterations"]), int(record["world_size"])
    except (OSError, ValueError, KeyError, TypeError):
        return False, 0
    return all((folder / f"rank{rank}.json").is_file() for rank in range(world_size)), iterations
