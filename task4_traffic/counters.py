"""Bytes in and out of one network interface over time: from the kernel's counters, or from a file of dstat or dool.

    python task4_traffic/counters.py --interface eth0 --output traffic.csv      counts until Ctrl-C
    python task4_traffic/counters.py --read dstat.csv --interface total         adds up a dstat or dool file

The kernel counts every byte of an interface since it was created, headers included. The difference between two readings
is a volume and misses nothing. dstat writes a rate: multiply it by the time that it covers.
"""

import argparse
import csv
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import IO

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # finds common/ from any folder

from common.errors import InputError, exit_on_input_error
from task4_traffic.dstat import read_dstat
from task4_traffic.sample import Sample

PER_SECOND = 10
HEAD = ("time", "received_bytes", "sent_bytes", "received_packets", "sent_packets", "event")


Counted = tuple[int, int, int, int]  # bytes received and sent, packets received and sent


def interface_counters() -> dict[str, Counted]:
    """Return what the kernel has counted on every interface of this process's network."""
    counted = psutil.net_io_counters(pernic=True, nowrap=False)
    return {name: (row.bytes_recv, row.bytes_sent, row.packets_recv, row.packets_sent) for name, row in counted.items()}


class Counter:
    """Writes the counters of an interface to a CSV file ten times per second, in a thread, until stop().

    This takes well under 1 % of a core. Every line is flushed, so nothing is lost in a crash.

    Raises:
        InputError: there is no such interface.
    """

    def __init__(
        self,
        interface: str,
        path: Path,
        *,
        read: Callable[[], Mapping[str, Counted]] = interface_counters,
        per_second: float = PER_SECOND,
    ) -> None:
        self.interface, self.samples = interface, list[Sample]()
        self._counters, self._pause = read, 1 / per_second
        self._file: IO[str] | None = None
        self._read("")
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "w", newline="", encoding="utf-8")  # noqa: SIM115
        csv.writer(self._file).writerow(HEAD)
        self._lock, self._end = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._count, daemon=True)
        self.mark("start")
        self._thread.start()

    def mark(self, event: str) -> Sample:
        """Take an additional reading and name it, for instance at the beginning and end of training."""
        with self._lock:
            sample = self._read(event)
            self.samples.append(sample)
            assert self._file, "open until stop()"
            csv.writer(self._file).writerow([f"{sample.time:.6f}", *sample[1:]])
            self._file.flush()
        return sample

    def stop(self) -> None:
        self._end.set()
        self._thread.join()
        self.mark("stop")
        assert self._file, "stopped once"
        self._file.close()

    def _count(self) -> None:
        while not self._end.wait(self._pause):
            self.mark("")

    def _read(self, event: str) -> Sample:
        counted = self._counters()
        if self.interface not in counted:
            known = ", ".join(sorted(counted))
            raise InputError(f"--interface: expected one of {known}; got {self.interface!r}")
        return Sample(time.time(), *counted[self.interface], event)


def read_counters(path: Path) -> list[Sample]:
    """Return the readings in a Counter's CSV file (its last line may be incomplete). InputError: any other file."""
    with open(path, newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file))
    if not rows or tuple(rows[0]) != HEAD:
        raise InputError(f"{path}: expected a first line {','.join(HEAD)}; for a file of dstat use --read")
    whole = [row for row in rows[1:] if len(row) == len(HEAD)]
    return [Sample(float(row[0]), int(row[1]), int(row[2]), int(row[3]), int(row[4]), row[5]) for row in whole]


def rates(samples: Iterable[Sample]) -> list[tuple[float, float, float]]:
    """Return (middle time, bytes received per second, bytes sent per second) between neighbouring readings."""
    points = []
    previous: Sample | None = None
    for sample in samples:
        if previous and sample.time - previous.time < 0.02:
            continue  # a mark next to a regular reading: the time is too short for a rate
        if previous:
            span = sample.time - previous.time
            moment = (sample.time + previous.time) / 2
            points.append((moment, (sample.received - previous.received) / span, (sample.sent - previous.sent) / span))
        previous = sample
    return points


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--interface", required=True, help="interface, such as eth0; with --read also total")
    parser.add_argument("--output", type=Path, default=Path("traffic.csv"), help="where to write (%(default)s)")
    parser.add_argument("--seconds", type=float, help="stop after this many seconds (default: at Ctrl-C)")
    parser.add_argument("--read", type=Path, help="do not count; add up a file of dstat, dool or pcp dstat instead")
    parser.add_argument("--unit", choices=("bytes", "bits"), help="of that file (default: what its header says)")
    arguments = parser.parse_args()
    if arguments.read:
        for number, run in enumerate(read_dstat(arguments.read, arguments.interface, arguments.unit), 1):
            first, last = run[0], run[-1]
            print(
                f"run {number}: {last.time - first.time:.1f} s, {last.received - first.received:,} bytes received,",
                end=" ",
            )
            print(f"{last.sent - first.sent:,} sent")
        return
    counter = Counter(arguments.interface, arguments.output)
    try:
        threading.Event().wait(arguments.seconds)
    except KeyboardInterrupt:
        print()
    counter.stop()
    first, last = counter.samples[0], counter.samples[-1]
    print(f"{arguments.interface}: {last.received - first.received:,} bytes received, {last.sent - first.sent:,} sent")
    print(f"{len(counter.samples)} readings in {arguments.output}")


if __name__ == "__main__":
    exit_on_input_error(main)
