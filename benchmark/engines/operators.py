"""Builds DeepSpeed's operators before workers meet, once for all programs of a user, and says so."""

import contextlib
import importlib.util
import io
import os
import sys
import threading
from collections.abc import Iterable
from pathlib import Path

import torch

from benchmark.strategies import STRATEGIES, use_cpu
from common.errors import InputError
from common.paths import locked

BUILT = ("cpu_adam", "deepspeed_shm_comm")  # folders of torch's cache
LEAST = 10  # seconds of a build before it is announced: what is built already is loaded in a few
ANNOUNCEMENT = "building DeepSpeed's operators with g++, once (some minutes)"


def compile_operators(strategies: Iterable[str], no_cuda: bool) -> None:
    """Build what these strategies need (g++ and ninja); raises InputError.

    With a CUDA build of torch, the optimizer for CPUs may need CUDA's compiler, so there only offloading builds it.
    """
    needed = [zero for name in strategies if (zero := STRATEGIES[name].zero)]
    if not importlib.util.find_spec("deepspeed"):
        return  # each of its strategies says so, or is left out
    on_gpu = torch.cuda.is_available() and not no_cuda
    if needed and not on_gpu:
        use_cpu()
    if needed and (not on_gpu or any(offload for _, offload in needed)):
        announcement = threading.Timer(LEAST, print, [ANNOUNCEMENT], {"file": sys.stderr, "flush": True})
        announcement.daemon = True
        announcement.start()
        try:
            build(with_messages=not on_gpu)
        finally:
            announcement.cancel()


def build(with_messages: bool) -> None:
    """Build the optimizer for CPUs, and what sends between processes of one machine.

    One program of a user builds at a time: the others wait for a lock that the kernel frees when its holder dies. So a
    lock of torch's own that is there now was left by a killed build, and torch would wait for it for ever.
    """
    from deepspeed.comm.torch import build_shm_op
    from deepspeed.ops.op_builder import CPUAdamBuilder

    folder = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache" / "torch_extensions")
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / "course"), contextlib.redirect_stdout(io.StringIO()):  # it says that all is well
        for name in BUILT:
            for left in folder.rglob(f"{name}/lock"):
                left.unlink(missing_ok=True)
        try:
            CPUAdamBuilder().load(verbose=False)
        except Exception as error:  # of compilers, CUDA and the file system; the user reads what is missing
            advice = "it needs g++, ninja and, with CUDA, the CUDA toolkit (CUDA_HOME); or leave out *_offload"
            raise InputError(f"DeepSpeed cannot build its optimizer for CPUs ({error}); {advice}") from error
        if with_messages:
            build_shm_op()
