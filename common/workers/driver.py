"""Finds the NVIDIA driver of this machine without torch, which takes seconds to import."""

import re
import shutil
from pathlib import Path

DRIVER = Path("/proc/driver/nvidia/version")  # of Linux' NVIDIA driver


def nvidia_driver() -> str:
    """Return the version of the NVIDIA driver, "unknown version" if only its tools are found, "" without a driver."""
    if DRIVER.exists():
        found = re.search(r"\d+\.\d+(\.\d+)?", DRIVER.read_text())
        return found[0] if found else "unknown version"
    return "unknown version" if shutil.which("nvidia-smi") else ""


def no_cuda_for(workers: int) -> list[str]:
    """Return --no_cuda if `workers` workers on this machine cannot have a GPU each: for runs that are compared."""
    if not nvidia_driver():
        return []
    import torch  # imported here, because it takes seconds

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return ["--no_cuda"] if gpus < workers else []
