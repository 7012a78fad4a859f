"""What benchmark.calibrate measured, as dataclasses and as a JSON file; predictions are made from nothing else.

A calibration belongs to one machine and to the versions of the libraries: others compute and send at other speeds.
"""

import json
import os
import socket
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmark.measure.machine import processor, these_versions
from common.errors import InputError
from common.paths import ROOT, atomic_write

DEFAULT = ROOT / "runs" / "benchmark" / "calibration.json"
LOOPBACK = "loopback"


@dataclass(frozen=True)
class Profile:
    """A step of one model without communication; `workers` of this machine take it at the same time. Seconds.

    forward: of each unit of the model, in order. backward: parameter -> from the gradient before it (or the beginning)
    until its own is ready, in the order in which they become ready. tail: from the last gradient to the end.
    optimizer: clip, update, zero_grad. spread: by how much the slowest worker is later than the mean of all.
    """

    model: str
    length: int
    batch: int
    workers: int
    threads: int
    forward: dict[str, float]
    backward: dict[str, float]
    tail: float
    optimizer: float
    spread: float

    @property
    def seconds(self) -> float:
        return sum(self.forward.values()) + sum(self.backward.values()) + self.tail + self.optimizer


@dataclass(frozen=True)
class SmallCosts:
    """Costs of a worker while `workers` of this machine do the same, in seconds; process: its memory in bytes.

    copy_byte: to copy a byte of a large tensor. flat: elements -> clip, AdamW and zero_grad of one tensor.
    flop: width of a model -> a multiplication or an addition in its layers.
    """

    workers: int
    copy_byte: float
    flat: dict[int, float]
    flop: dict[int, float]
    process: float = 0.0


@dataclass(frozen=True)
class TransferTimes:
    """One operation of `workers` over one link, measured alone: a table by bytes handed in by a worker.

    seconds: until the slowest worker has it. cpu: processor seconds of one worker. wire: bytes out of its interface;
    empty on a link that has no counter of its own.
    """

    link: str
    operation: str
    workers: int
    bytes: list[int]
    seconds: list[float]
    cpu: list[float]
    wire: list[float] = field(default_factory=list)

    @property
    def latency(self) -> float:
        return self.seconds[0]

    @property
    def latency_of_all_hops(self) -> float:
        """Return the latency of an operation with bytes in every hop: gloo's all_reduce of few numbers has fewer hops.

        The line through the second and the third size gives it, at 0 bytes.
        """
        if len(self.bytes) < 3:
            return self.latency
        (second, third), (sooner, later) = self.bytes[1:3], self.seconds[1:3]
        return max(self.latency, sooner - second * (later - sooner) / (third - second))

    def flow(self, size: float) -> float:
        """Return the seconds that `size` bytes take beyond the latency."""
        return max(0.0, interpolate(self.bytes, self.seconds, size) - self.latency)


@dataclass(frozen=True)
class EngineTimes:
    """A whole step of a strategy over loopback, in seconds, and how many rounds it is the median of."""

    strategy: str
    model: str
    length: int
    batch: int
    workers: int
    seconds: float
    rounds: int


@dataclass(frozen=True)
class Calibration:
    """All of it, with the machine, the versions and the date."""

    machine: dict[str, Any]
    versions: dict[str, str]
    date: str
    load: float
    memory: int  # bytes of the machine
    profiles: list[Profile] = field(default_factory=list)
    small: list[SmallCosts] = field(default_factory=list)
    transfers: list[TransferTimes] = field(default_factory=list)
    engines: list[EngineTimes] = field(default_factory=list)

    @property
    def links(self) -> list[str]:
        return list(dict.fromkeys(table.link for table in self.transfers))


READ: dict[str, Callable[[dict[str, Any]], Any]] = {
    "profiles": lambda entry: Profile(**entry),
    "transfers": lambda entry: TransferTimes(**entry),
    "small": lambda entry: SmallCosts(
        **entry | {name: {int(size): s for size, s in entry[name].items()} for name in ("flat", "flop")}
    ),
    "engines": lambda entry: EngineTimes(**entry),
}


def interpolate(places: Sequence[int], values: Sequence[float], place: float) -> float:
    """Return the value at `place`: a straight line between neighbours, and the last one beyond the end."""
    if len(places) == 1 or place <= places[0]:
        return values[0]
    i = min(bisect_left(places, place), len(places) - 1)
    slope = (values[i] - values[i - 1]) / (places[i] - places[i - 1])
    return values[i] + slope * (place - places[i])


def this_machine() -> dict[str, Any]:
    """Return what identifies a machine, as far as the speed of its processors depends on it."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {"host": socket.gethostname(), "processor": processor(), "cores": cores}


def empty() -> Calibration:
    """Return a calibration of this machine without any measurement."""
    date = datetime.now(UTC).isoformat(timespec="seconds")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Calibration(this_machine(), these_versions(), date, round(os.getloadavg()[0], 1), memory)


def save(calibration: Calibration, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as file:
        json.dump(asdict(calibration), file, indent=1)


def load(path: Path) -> Calibration:
    """Read a calibration; raises InputError if it is missing, damaged, or of another machine or other versions."""
    if not path.exists():
        raise InputError(f"--calibration: no file {path}; make it with: python -m benchmark.calibrate")
    try:
        calibration = read(path)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"--calibration: {path} is damaged ({error}); run python -m benchmark.calibrate again"
        ) from error
    for what, here, there in (
        ("machine", this_machine(), calibration.machine),
        ("version", these_versions(), calibration.versions),
    ):
        for name, expected in here.items():
            if there.get(name) != expected:
                raise InputError(
                    f"--calibration: {path} is of another {what}: expected {name} {expected}, "
                    f"got {there.get(name)}; run python -m benchmark.calibrate here"
                )
    return calibration


def read(path: Path) -> Calibration:
    """Read what `save` wrote."""
    content = json.loads(path.read_text())
    for name, entry_of in READ.items():
        content[name] = [entry_of(entry) for entry in content[name]]
    return Calibration(**content)
