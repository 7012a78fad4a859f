"""With what, where and when something was measured: stands in every result."""

import os
import socket
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version

import torch

from common.paths import ROOT
from common.record import versions


def environment() -> dict:
    """Versions, commit ("+": with changes), machine, date and the load of the minute before."""
    found = versions()
    try:
        found["deepspeed"] = version("deepspeed")
    except PackageNotFoundError:
        found["deepspeed"] = "not installed"
    changed = _git("status", "--porcelain", "-uno")
    return {
        "versions": found,
        "commit": _git("rev-parse", "--short", "HEAD") + ("+" if changed else ""),
        "host": socket.gethostname(),
        "cores": len(os.sched_getaffinity(0)),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "load": round(os.getloadavg()[0], 1),
    }


def _git(*words: str) -> str:
    """What git says; nothing in a folder without it."""
    try:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    except OSError:
        return ""
