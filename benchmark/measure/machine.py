"""With what, where and when something was measured: stands in every result."""

import os
import socket
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from common.paths import ROOT


def environment() -> dict:
    """Versions, commit ("+": with changes), machine, date and the load of the minute before."""
    import torch  # here: commit() is asked for by commands that run others

    from common.record import versions

    found = versions()
    try:
        found["deepspeed"] = version("deepspeed")
    except PackageNotFoundError:
        found["deepspeed"] = "not installed"
    return {
        "versions": found,
        "commit": commit(),
        "host": socket.gethostname(),
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "load": round(os.getloadavg()[0], 1),
    }


def processor() -> str:
    """The model of this machine's processor."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "CPU part"))]
    return names[0] if names else "unknown"


def commit() -> str:
    """The commit of this repository; with a "+" if files have been changed since."""
    return _git("rev-parse", "--short", "HEAD") + ("+" if _git("status", "--porcelain", "-uno") else "")


def machine_line(found: dict) -> str:
    """The machine and its load in one line, for a table. load: of the minute before the command, and at its end."""
    kinds = ", ".join(f"{name} {number}" for name, number in found["versions"].items() if number != "not installed")
    loads = f"load {found['load']} at the beginning, {os.getloadavg()[0]:.1f} at the end"
    machine = f"{found['cores']} cores, {found['gpu'] or 'no GPU'}"
    return f"{machine}, {loads}; {kinds}; commit {found['commit']}, {found['date']}"


def interface_bytes(interface: str = "eth0") -> int | None:
    """Bytes that this node's interface has sent; None on a machine without it, which is no emulated node."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, figures = line.partition(":")
        if name.strip() == interface:
            return int(figures.split()[8])
    return None


def _git(*words: str) -> str:
    """What git says; nothing in a folder without it."""
    try:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    except OSError:
        return ""
