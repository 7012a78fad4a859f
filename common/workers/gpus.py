"""Decides, before the workers of a machine join, whether they use its GPUs: NCCL needs a GPU for each of them."""

from collections.abc import Mapping

import torch

from common.errors import InputError
from common.workers.driver import nvidia_driver

WITHOUT_CUDA = (
    "this machine has an NVIDIA driver, but torch {} was built without CUDA, so the CPU is used; "
    "to use the GPUs, run `rm -r .venv; make setup` on a machine with a GPU"
)


def count_gpus() -> int:
    """Return the number of GPUs that torch can use."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def workers_on_machine(world_size: int, master_ip: str, environment: Mapping[str, str]) -> int:
    """Return how many workers share this machine: as torchrun or the launcher says, or all if rank 0 is on loopback.

    Workers that were started by hand, on several nodes, count as one for each node.
    """
    if "LOCAL_WORLD_SIZE" in environment:
        return int(environment["LOCAL_WORLD_SIZE"])
    return world_size if master_ip == "localhost" or master_ip.startswith("127.") else 1


def device_and_backend(workers: int, no_cuda: bool, backend: str | None, speaks: bool) -> tuple[bool, str]:
    """Return whether the workers of this machine use the CPU, and their backend.

    backend: --backend, None if it was not given. speaks: print one line if GPUs stay unused; rank 0 does.
    Raises InputError if NCCL was asked for and cannot be used.
    """
    gpus = 0 if no_cuda else count_gpus()
    if gpus >= workers:
        return False, backend or "nccl"
    if backend == "nccl" and gpus == 0:
        raise InputError("--backend nccl needs an NVIDIA GPU that PyTorch can see; use --backend gloo on CPUs")
    if backend == "nccl":
        raise InputError(f"--backend nccl needs a GPU for each of the {workers} workers on this machine, got {gpus}")
    if speaks and gpus:
        count = f"{gpus} GPU{'s' * (gpus > 1)}"
        print(f"{workers} workers and {count} on this machine: using the CPU and gloo", flush=True)
    elif speaks and not no_cuda and torch.version.cuda is None and nvidia_driver():
        print(WITHOUT_CUDA.format(torch.__version__), flush=True)
    return no_cuda or gpus > 0, "gloo"
