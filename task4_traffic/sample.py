"""One reading of a network interface's counters."""

from typing import NamedTuple


class Sample(NamedTuple):
    """One reading: seconds since 1970; bytes and packets so far; the event at that time, or ""."""

    time: float
    received: int
    sent: int
    received_packets: int = 0
    sent_packets: int = 0
    event: str = ""
