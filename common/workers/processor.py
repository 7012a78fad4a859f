"""How much processor time a run uses, and how much other programs use meanwhile.

A time that is measured while other programs are busy is too long: the run says so, and so does the report.
"""

import time
from collections.abc import Sequence
from typing import TypedDict

import psutil

from common.workers.machine import own_cores

BUSY = 0.2  # cores; what other programs use on a quiet machine is far below


class ProcessorTime(TypedDict):
    """Seconds of a run, and processor time in it: of this rank, and of all programs on the cores it may use."""

    seconds: float
    own: float
    machine: float | None  # None where the system does not tell


class ProcessorMeter:
    """Measures processor time from its creation on."""

    def __init__(self) -> None:
        self._begin = _now()

    def so_far(self) -> ProcessorTime:
        begin, now = self._begin, _now()
        machine = None
        if now["machine"] is not None and begin["machine"] is not None:
            machine = now["machine"] - begin["machine"]
        return {"seconds": now["seconds"] - begin["seconds"], "own": now["own"] - begin["own"], "machine": machine}


def other_programs(ranks: Sequence[ProcessorTime]) -> float | None:
    """Return how many cores other programs used on average while these ranks ran together on one machine."""
    machine, seconds = ranks[0]["machine"], ranks[0]["seconds"]
    if machine is None or seconds < 1:  # the system counts in hundredths of a second
        return None
    return max(0.0, (machine - sum(rank["own"] for rank in ranks)) / seconds)


def disturbance(cores: float | None) -> str:
    """Return what to say about a run during which other programs used this many cores; "" if it was quiet."""
    if cores is None or cores < BUSY:
        return ""
    return f"disturbed: other programs used {cores:.1f} of {len(own_cores())} cores during this run"


def _now() -> ProcessorTime:
    return {"seconds": time.perf_counter(), "own": time.process_time(), "machine": _of_all_programs()}


def _of_all_programs() -> float | None:
    """Return seconds; None where psutil cannot read them, such as in a container that hides some cores."""
    try:
        cores = psutil.cpu_times(percpu=True)
        times = [cores[number] for number in own_cores()]
    except (OSError, IndexError, RuntimeError):
        return None
    return sum(core.user + core.nice + core.system + core.irq + core.softirq + core.steal for core in times)
