"""What this machine has: GPUs, the NVIDIA driver, addresses. torch is imported only when a function needs it."""

import contextlib
import os
import re
import shutil
import socket
from collections.abc import Mapping
from pathlib import Path

from common.errors import InputError
from common.flags import integer_of

DRIVER = Path("/proc/driver/nvidia/version")  # of Linux' NVIDIA driver
WITHOUT_CUDA = (
    "this machine has an NVIDIA driver, but torch {} was built without CUDA, so the CPU is used; "
    "to use the GPUs, run `rm -r .venv; make setup` on a machine with a GPU"
)


def nvidia_driver() -> str:
    """Return the version of the NVIDIA driver, "unknown version" if only its tools are found, "" without a driver."""
    if DRIVER.exists():
        match = re.search(r"\d+\.\d+(\.\d+)?", DRIVER.read_text())
        return match[0] if match else "unknown version"
    return "unknown version" if shutil.which("nvidia-smi") else ""


def own_cores() -> list[int]:
    """Return the numbers of the cores that this process may use; where the system does not say, of all."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def count_gpus() -> int:
    """Return the number of GPUs that torch can use."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def no_cuda_for(workers: int) -> list[str]:
    """Return --no_cuda if `workers` workers on this machine cannot have a GPU each: for runs that are compared."""
    return ["--no_cuda"] if nvidia_driver() and count_gpus() < workers else []


def own_address(address: str) -> str:
    """Return this machine's own address on the way to `address`."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # a datagram socket: this asks the routing table and sends nothing
        return probe.getsockname()[0]


def interfaces() -> dict[str, str]:
    """Return the IPv4 addresses of this machine, each with the name of its interface; {} if psutil is missing."""
    try:
        import psutil
    except ImportError:  # `make setup` has not been run
        return {}
    addresses = psutil.net_if_addrs().items()
    return {entry.address: name for name, entries in addresses for entry in entries if entry.family == socket.AF_INET}


def workers_on_machine(world_size: int, master_ip: str, environment: Mapping[str, str]) -> int:
    """Return how many workers share this machine: as torchrun or the launcher says, or all if rank 0 is on loopback.

    Workers that were started by hand, on several nodes, count as one for each node.
    """
    if "LOCAL_WORLD_SIZE" in environment:
        return integer_of(environment, "LOCAL_WORLD_SIZE", 1)
    return world_size if is_loopback(master_ip) else 1


def is_loopback(address: str) -> bool:
    """Return whether an address or a name means this machine alone: 127.0.0.1, localhost, often its own name."""
    with contextlib.suppress(OSError):
        return socket.gethostbyname(address).startswith("127.")
    return False


def device_and_backend(workers: int, no_cuda: bool, backend: str | None, speaks: bool) -> tuple[bool, str]:
    """Return the `no_cuda` and the `backend` of a Place: NCCL needs a GPU for each worker of this machine.

    Without any GPU, no_cuda stays as it was requested: there is nothing to turn off.

    backend: --backend, None if it was not given. speaks: print one line if GPUs stay unused; rank 0 does.
    Raises InputError if NCCL was asked for and cannot be used.
    """
    import torch

    gpus = 0 if no_cuda else count_gpus()
    if gpus >= workers:
        return False, backend or "nccl"
    if backend == "nccl" and gpus == 0:
        raise InputError("--backend nccl needs an NVIDIA GPU that PyTorch can see; use --backend gloo on CPUs")
    if backend == "nccl":
        raise InputError(f"--backend nccl needs a GPU for each of the {workers} workers on this machine, got {gpus}")
    if speaks and gpus:
        count = f"{gpus} GPU{'s' if gpus > 1 else ''}"
        print(f"{workers} workers and {count} on this machine: using the CPU and gloo", flush=True)
    elif speaks and not no_cuda and torch.version.cuda is None and nvidia_driver():
        print(WITHOUT_CUDA.format(torch.__version__), flush=True)
    return no_cuda or gpus > 0, "gloo"
