"""With what, where and when something was measured: stands in every result."""

import os
import platform
import socket
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from common.paths import ROOT
from common.workers.machine import own_cores
from task4_traffic.counters import interface_counters

BUSY = 1.5  # load per core; what ran before in the same minute has a part in it


def environment() -> dict:
    """Versions, commit ("+": with changes), machine, date and the load of the minute before."""
    import torch  # here: commit() is asked for by commands that run others

    return {
        "versions": these_versions(),
        "commit": commit(),
        "host": socket.gethostname(),
        "processor": processor(),
        "cores": len(own_cores()),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "load": round(os.getloadavg()[0], 1),
    }


def these_versions() -> dict[str, str]:
    """The versions of what computes and sends."""
    versions = {"python": platform.python_version()}
    for name in ("torch", "transformers", "deepspeed"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "not installed"
    return versions


def processor() -> str:
    """The model of this machine's processor."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "CPU part"))]
    return names[0] if names else "unknown"


def commit() -> str:
    """The commit of this repository; with a "+" if files have been changed since."""
    return _git("rev-parse", "--short", "HEAD") + ("+" if _git("status", "--porcelain", "-uno") else "")


def busy(begin: dict) -> str:
    """Say that the machine was busy before the measurement; "" if it was not."""
    load, cores = begin["load"], begin["cores"]
    is_busy = load > BUSY * cores
    return f"the machine was busy (load {load} on {cores} cores); do not compare its times" if is_busy else ""


def machine_line(begin: dict) -> str:
    """Return the machine and its load in one line, for a table. begin: environment() at the beginning."""
    return f"load {begin['load']} at the beginning, {os.getloadavg()[0]:.1f} at the end; {machine_words(begin)}"


def machine_words(begin: dict) -> str:
    kinds = ", ".join(f"{name} {number}" for name, number in begin["versions"].items() if number != "not installed")
    machine = f"{begin['cores']} cores, {begin['gpu'] or 'no GPU'}"
    return f"{machine}; {kinds}; commit {begin['commit']}, {begin['date']}"


def interface_bytes() -> int | None:
    """Bytes that this node's eth0 has sent; None on a machine without it, which is no emulated node."""
    counters = interface_counters().get("eth0")
    return counters[1] if counters else None


def _git(*words: str) -> str:
    """What git says; nothing in a folder without it."""
    try:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    except OSError:
        return ""
