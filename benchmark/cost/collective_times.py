"""How long an operation takes over a link: interpolated in the calibrated tables, extrapolated by the algorithms.

A table has the time of an operation by size, for some numbers of workers. Between two sizes the time is interpolated,
beyond the largest one the last two go on as a straight line. For more workers than were measured:

    all_reduce   ring: 2(N-1) hops, every rank sends 2(N-1)/N S      all_gather               N-1 hops
    broadcast    tree: log2 N hops, each as long as a message        exchange, hop            one hop
    all_to_all   one hop: gloo posts all messages at once

In a group, two workers have one connection, and gloo sends nothing before the receiver has said that it is ready. That
word waits behind the data that its worker sends. So the worker that comes last sends at once, and the other one has to
wait: for the whole message of all_to_all and exchange, and for the first half of all_gather, which is cut. all_reduce
says that it is ready before it sends. Among more workers, only all_to_all uses a connection in both directions; on
average, a worker comes after one half of the others and before the other half, so half of its messages have to wait.
On a shaped link, this is the `lag` of a transfer: alone, it takes so much longer, and where transfers follow one
another, the directions of different ones overlap.

An emulated link lets a burst through at full speed, and while it is idle, it gets back as much of it as it could have
sent. So collectives with pauses between them take less time than their bytes would at the link's rate.

The time for N workers is that of the measured number n for as many bytes sent by a rank, plus the latency of the
further hops. A link that was not calibrated takes loopback's processor time and its own rate.
"""

import math
from dataclasses import replace

from benchmark.cost.calibration import LOOPBACK, Calibration, TransferTimes, interpolate
from benchmark.cost.simulate import Transfer
from cluster.emulate import bits_per_second
from common.errors import InputError
from common.flags import LARGEST_SEGMENT, burst_bytes

FRAMES, MESSAGE = 1.0025, 132  # where no counter was calibrated: TCP's frames, and those of one message and its answer
SMALL_FRAMES = 1.049  # of a link below about 260 Mbit/s, whose packets have 1,500 bytes; acknowledgements included
HEADERS = 1448 / 1514  # of a full Ethernet frame, TCP's payload; what a link can reach
LAG = {"all_to_all": 1.0, "exchange": 1.0, "all_gather": 0.5}  # of two workers: a share of what a worker sends
LAG_OF_MORE = {"all_to_all": 0.5}


def moved(operation: str, size: float, workers: int) -> float:
    """Return the bytes that one rank sends, as a mean over the ranks; `size`: bytes that it hands in."""
    share = (workers - 1) / workers
    factors = {"all_reduce": 2 * share, "all_gather": workers - 1, "all_to_all": share, "broadcast": share}
    return factors.get(operation, 1.0) * size


def hops(operation: str, workers: int, tree: bool = False) -> int:
    """Return how many messages follow one another; tree: at best, where all operations go along trees."""
    if operation in ("exchange", "hop", "all_to_all"):
        return 1
    steps = math.ceil(math.log2(workers)) if tree or operation == "broadcast" else workers - 1
    return 2 * steps if operation == "all_reduce" else steps


def rising(values: list[float]) -> list[float]:
    """Return the values so that none is above a later one: noise makes a time longer, and fewer bytes never do."""
    return [min(values[i:]) for i in range(len(values))]


class Links:
    """The network of a prediction. rate: a calibrated link, or any other rate; None: loopback.

    latency: further seconds of every hop. tree: see hops. notes: what was extrapolated.
    """

    def __init__(
        self,
        calibration: Calibration,
        rate: str | None = None,
        latency: float = 0.0,
        tree: bool = False,
    ) -> None:
        self.latency, self.tree, self.notes = latency, tree, dict[str, None]()
        self.bits = bits_per_second(rate) if rate else None
        self.is_shaped = self.bits is not None
        self.burst = burst_bytes(self.bits) if self.bits else 0
        rates = {link: None if link == LOOPBACK else bits_per_second(link) for link in calibration.links}
        same = [link for link in rates if rates[link] == self.bits]
        self.is_calibrated = bool(same)
        source = same[0] if same else LOOPBACK
        self.tables: dict[str, dict[int, TransferTimes]] = {}
        for table in calibration.transfers:
            if table.link == source:
                rows = self.tables.setdefault(table.operation, {})
                rows[table.workers] = replace(table, seconds=rising(table.seconds))
        if not self.tables:
            raise InputError(
                f"--calibration has no operations of {source}, only of {', '.join(calibration.links) or 'nothing'}; "
                "run python -m benchmark.calibrate"
            )
        if not same:
            note = f"a link of {rate} was not calibrated: loopback's processor time, and {rate} for the bytes"
            self.notes[note] = None

    @property
    def most_workers(self) -> int:
        """Return the largest number of workers that was measured."""
        return max(count for tables in self.tables.values() for count in tables)

    def spent_after(self, seconds: float, spent: float) -> float:
        """Return how many bytes of a link's burst are spent when it has been idle for so many seconds."""
        return max(0.0, min(spent, self.burst) - seconds * (self.bits or 0.0) / 8)

    def transfer(self, operation: str, size: float, workers: int, spent: float = 0.0) -> Transfer:
        """Return the operation alone, when `spent` bytes of the link's burst are spent as it begins."""
        if operation == "broadcast":
            hop, count = self.transfer("hop", size, 2, spent), hops("broadcast", workers)
            return Transfer(hop.latency * count, hop.flow * count, hop.cores, sent=moved("broadcast", size, workers))
        table = self._table(operation, workers)
        sent = moved(operation, size, workers)
        per_byte = moved(operation, 1.0, table.workers)
        count = hops(operation, workers, self.tree)
        extra = count - hops(operation, table.workers, self.tree)
        per_hop = table.latency_of_all_hops / hops(operation, table.workers)
        latency = max(table.latency + extra * per_hop, per_hop) + count * self.latency
        spent = self.spent_after(latency, spent)
        before = spent / per_byte if self.is_shaped and self.is_calibrated else 0.0
        flow = table.flow(before + sent / per_byte) - table.flow(before)
        cpu = max(0.0, interpolate(table.bytes, table.cpu, sent / per_byte))
        if self.bits is not None and not self.is_calibrated:
            flow = max(flow, 8 * max(0.0, sent - (self.burst - spent)) / (self.bits * HEADERS))
        lag = (LAG if workers == 2 else LAG_OF_MORE).get(operation, 0.0) if self.is_shaped else 0.0
        if self.is_calibrated and self.bits is not None:
            # Beyond its bytes, an operation waits: for the lag, or because several workers send to one at a time.
            # Others can use the link meanwhile.
            busy = min(flow, 8 * sent / (self.bits * HEADERS))
            latency, flow = latency + (0.0 if lag and workers == 2 else flow - busy), busy
        seconds = latency + flow
        cores = min(cpu / seconds, 1.5) if seconds > 0 else 0.0
        return Transfer(latency, flow, cores, lag * flow, sent)

    def on_wire(self, operation: str, size: float, workers: int) -> float:
        """Return the bytes out of a rank's interface: payload and frames, as calibrated on links that have counters."""
        sent, messages = moved(operation, size, workers), hops(operation, workers)
        table = None if operation == "broadcast" else self._table(operation, workers)
        if table is None or not table.wire:
            return sent * self.frames() + messages * MESSAGE
        per_byte = moved(operation, 1.0, table.workers)
        extra = (messages - hops(operation, table.workers)) * MESSAGE
        return max(sent, interpolate(table.bytes, table.wire, sent / per_byte) + extra)

    def frames(self) -> float:
        """Return the bytes on the wire for a byte of payload: a shaper cuts packets that are larger than its burst."""
        cuts = self.bits is not None and burst_bytes(self.bits) <= LARGEST_SEGMENT
        return SMALL_FRAMES if cuts else FRAMES

    def _table(self, operation: str, workers: int) -> TransferTimes:
        """The table of this number of workers, or of the nearest one, the larger ones last."""
        tables = self.tables[operation]
        nearest = min(tables, key=lambda count: (abs(math.log(count / workers)), count))
        if operation not in ("exchange", "hop") and nearest != workers:
            self.notes[f"operations of {workers} workers are extrapolated from {nearest}"] = None
        return tables[nearest]
