"""Builds DeepSpeed's operators before any worker looks for them, and chooses its device."""

import contextlib
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import torch

from benchmark.strategies import STRATEGIES, use_cpu
from common.errors import InputError
from common.paths import cache_dir, locked

OLD_LOCK_SECONDS = 60


def compile_operators(strategies: Iterable[str], no_cuda: bool) -> None:
    """Build what these strategies need (g++ and ninja), outside anything timed; raises InputError.

    With a CUDA build of torch, the optimizer for CPUs may need CUDA's compiler, so there only offloading builds it.
    torch builds under a lock file that outlives a killed process, and then waits for it for ever. Workers hold it for
    an instant, builders only in here, one at a time: an old one is nobody's.
    """
    needed = [STRATEGIES[name] for name in strategies if STRATEGIES[name].zero]
    on_gpu = torch.cuda.is_available() and not no_cuda
    if not needed or (on_gpu and not any(row.zero[1] for row in needed if row.zero)):
        return
    if not on_gpu:
        use_cpu()
    from deepspeed.comm.torch import build_shm_op
    from deepspeed.ops.op_builder import CPUAdamBuilder

    folder = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache" / "torch_extensions")
    with locked(cache_dir("operators") / "build"):
        for lock in folder.rglob("lock"):
            with contextlib.suppress(FileNotFoundError):
                if time.time() - lock.stat().st_mtime > OLD_LOCK_SECONDS:
                    lock.unlink()
        with contextlib.redirect_stdout(sys.stderr):
            try:
                CPUAdamBuilder().load(verbose=False)
            except Exception as error:
                advice = "it needs g++, ninja and, with CUDA, the CUDA toolkit (CUDA_HOME); or leave out *_offload"
                raise InputError(f"DeepSpeed cannot build its optimizer for CPUs ({error}); {advice}") from error
            if not on_gpu:
                build_shm_op()
