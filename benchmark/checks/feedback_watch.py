"""How long a student waits for grader.watch: from the save of a file to the verdict on its region.

`python -m benchmark.checks.feedback --watch` runs it. Each save changes a comment in a solved region of a handout, so
that every grader of the region runs again and passes.
"""

import contextlib
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import psutil

from course.table import load_course

REGIONS = ("2a.3", "2b.3", "p.4")
SAVES = 20
MOST_SECONDS = 1.5  # median
READY = "watching; press Ctrl-C to stop"
VERDICT = re.compile(r"^\d+ (passed|failed)")


def saves(handout: Path, regions: Iterable[str], count: int) -> dict[str, dict[str, float]]:
    """Region -> medians of the seconds from a save to its verdict and of the CPU seconds of all processes."""
    return {region: _of_region(handout, region, count) for region in regions}


def _of_region(handout: Path, region: str, count: int) -> dict[str, float]:
    path = handout / load_course(handout / "course.toml").regions[region].file
    text = path.read_text(encoding="utf-8")
    end = re.search(rf"^ *# END TODO {re.escape(region)}$", text, re.MULTILINE)
    assert end, f"{path} has no end of region {region}"
    before, after = text[: end.start()], text[end.start() :]
    indent = " " * (len(after) - len(after.lstrip()))
    waited, busy = [], []
    with _watch(handout, region) as process:
        _line(process, lambda line: line.startswith(READY))
        for number in range(count):
            spent, start = _cpu_seconds(process.pid), time.perf_counter()
            path.write_text(f"{before}{indent}# save {number}\n{after}", encoding="utf-8")
            verdict = _line(process, VERDICT.match)
            waited.append(time.perf_counter() - start)
            busy.append(_cpu_seconds(process.pid) - spent)
            if "failed" in verdict:
                raise RuntimeError(f"{region}: expected a solved region to pass, got {verdict.strip()}")
    path.write_text(text, encoding="utf-8")
    found = {"seconds": statistics.median(waited), "longest": max(waited), "cpu": statistics.median(busy)}
    print(
        f"region {region:<5} from save to verdict {found['seconds']:5.2f} s (longest {found['longest']:.2f} s), "
        f"CPU {found['cpu']:.2f} s",
        flush=True,
    )
    return found


@contextlib.contextmanager
def _watch(handout: Path, region: str) -> Iterator[subprocess.Popen]:
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "grader.watch", region],
        cwd=handout,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        process.terminate()  # its ranks' parent ends with it
        process.wait()
        assert process.stdout
        process.stdout.close()


def _line(process: subprocess.Popen, is_wanted: Callable[[str], object]) -> str:
    """The next line that is wanted; RuntimeError if the process ends before."""
    seen = []
    assert process.stdout
    for line in process.stdout:
        if is_wanted(line):
            return line
        seen.append(line)
    raise RuntimeError(f"grader.watch has ended: {''.join(seen)[-500:]}")


def _cpu_seconds(pid: int) -> float:
    """User and system time of a process and all below it, ended ones included."""
    total, parent = 0.0, psutil.Process(pid)
    for process in (parent, *parent.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            total += sum(process.cpu_times()[:4])
    return total
