"""Finds measured times in what a student handed in. Two runs never take the same time to the microsecond, so a time
that several hand-ins share was measured once.

Only forms that the course's programs write are read: keys of JSON that name seconds or a time, with at least six
decimals, and "mean ± error" in the report.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

KEYED = re.compile(r'"(\w{1,40})"\s{0,3}:\s{0,3}(\d{1,9}\.\d{6,20})\b')  # bounded: its time is linear in any text
IN_REPORT = re.compile(r"(\d{1,9}\.\d{3,9})[\u00a0 ]±[\u00a0 ](\d{1,9}\.\d{3,9})")
NAMES = ("second", "time")
LARGEST_FILE = 4 << 20  # bytes
MOST_FILES, MOST = 300, 5000  # files that are read, measurements that are kept
FEWEST = 3  # that two hand-ins must share: one can be a coincidence, or an example from the handout
MOST_SHARED = 50  # groups that are shown


@dataclass(frozen=True)
class Shared:
    """Measurements that the same hand-ins share."""

    names: tuple[str, ...]
    count: int
    example: str


def measured(folder: Path) -> list[str]:
    """The measurements in the files below a folder, as "key=seconds", sorted; a README's are ours."""
    measurements: set[str] = set()
    files = sorted(path for path in folder.rglob("*") if path.suffix in (".json", ".md") and path.is_file())
    for path in files[:MOST_FILES]:
        if path.stem.lower() == "readme" or path.stat().st_size > LARGEST_FILE:
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        measurements |= {f"{key}={float(value):.6f}" for key, value in KEYED.findall(text) if is_time(key)}
        measurements |= {f"{mean} ± {error}" for mean, error in IN_REPORT.findall(text)}
    return sorted(measurements)[:MOST]


def is_time(key: str) -> bool:
    return any(name in key.lower() for name in NAMES)


def find_shared(by_name: Mapping[str, Iterable[str]]) -> list[Shared]:
    """Which hand-ins share measurements, the largest numbers of them first."""
    holders: dict[str, list[str]] = {}
    for name, measurements in by_name.items():
        for measurement in measurements:
            holders.setdefault(measurement, []).append(name)
    groups: dict[tuple[str, ...], list[str]] = {}
    for measurement, names in holders.items():
        if len(names) > 1:
            groups.setdefault(tuple(names), []).append(measurement)
    large_groups = [Shared(names, len(same), min(same)) for names, same in groups.items() if len(same) >= FEWEST]
    return sorted(large_groups, key=lambda group: (-group.count, group.names))[:MOST_SHARED]
