"""Nodes whose links have a delay, on this machine, by a switch of our own: not every kernel has netem.

As in cluster.emulate, node r has the address 10.10.1.{r+1}, and {rank} is replaced. The switch connects one TAP device
of each node, and passes every frame on when the delay is over. It is a Python program: use it for small messages.
"""

import fcntl
import os
import select
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence

from benchmark.checks.check import SkippedError
from cluster.emulate import namespaces, run, search_path, why_not, words

TUN = "/dev/net/tun"
SET_INTERFACE, TAP, NO_HEADER = 0x400454CA, 0x0002, 0x1000  # TUNSETIFF, IFF_TAP, IFF_NO_PI of linux/if_tun.h
FRAME = 65536  # more than a frame has


def command_on_nodes(nodes: int, delay_ms: float, command: Sequence[str]) -> list[str]:
    """Return the command that runs `command` on every node. Raises SkippedError if this machine has no such links."""
    if reason := why_not():
        raise SkippedError(reason)
    if not os.access(TUN, os.R_OK | os.W_OK):
        raise SkippedError(f"{TUN} cannot be opened")
    own = [sys.executable, "-m", "benchmark.checks.delayed_links", str(nodes), str(delay_ms)]
    return [*namespaces(), *own, *command]


def plug(node: int) -> int:
    """Make a node with an interface; return the file from which its frames are read, and to which they are written."""
    tap = os.open(TUN, os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tap, SET_INTERFACE, struct.pack("16sH", f"tap{node}".encode(), TAP | NO_HEADER))
    inside = f"ip -netns node{node}"
    for command in (
        f"ip netns add node{node}",
        f"ip link set tap{node} netns node{node} name eth0",
        f"{inside} address add 10.10.1.{node + 1}/24 dev eth0",
        f"{inside} link set lo up",
        f"{inside} link set eth0 up address {address(node)}",
    ):
        run(words(command))
    return tap


def address(node: int) -> str:
    """Return a node's hardware address; its last byte is the node's number + 1."""
    return f"02:00:00:00:00:{node + 1:02x}"


def switch(taps: Sequence[int], delay: float, ranks: Sequence[subprocess.Popen]) -> None:
    """Pass frames on, `delay` seconds after they came, until all ranks have ended."""
    under_way: deque[tuple[float, int, bytes]] = deque()  # when it is due, from which node, the frame
    while any(rank.poll() is None for rank in ranks):
        while under_way and under_way[0][0] <= time.perf_counter():
            _, source, frame = under_way.popleft()
            for node, tap in enumerate(taps):
                is_for_all = frame[0] & 1
                if node != source and (is_for_all or frame[5] == node + 1):
                    os.write(tap, frame)
        left = under_way[0][0] - time.perf_counter() if under_way else 0.2
        for tap in select.select(taps, [], [], max(0.0, left))[0]:
            under_way.append((time.perf_counter() + delay, taps.index(tap), os.read(tap, FRAME)))


def main() -> None:
    """The first process of its own namespaces."""
    nodes, delay_ms, *command = sys.argv[1:]
    os.environ["PATH"] = search_path()
    for line in ("mount --make-rprivate /", "mount -t tmpfs none /run", "mkdir /run/netns", "ip link set lo up"):
        run(words(line))
    taps = [plug(node) for node in range(int(nodes))]
    ranks = [
        subprocess.Popen(
            [*words(f"ip netns exec node{node}"), *(word.replace("{rank}", str(node)) for word in command)]
        )
        for node in range(int(nodes))
    ]
    switch(taps, float(delay_ms) / 1e3, ranks)
    sys.exit(max(abs(rank.returncode) for rank in ranks))


if __name__ == "__main__":
    main()
