"""Builds DeepSpeed's operators before anything is timed, once for all programs of a user, and says so."""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import psutil
import torch
from tqdm.auto import tqdm

from benchmark.strategies import STRATEGIES, use_cpu
from common.errors import InputError
from common.paths import locked

PERIOD = 1.0  # seconds between two looks
LEAST = 3  # seconds of a build before it is announced: what is built already is loaded at once
ANNOUNCEMENT = "building DeepSpeed's operators with g++, once (some minutes)"


def compile_operators(strategies: Iterable[str], no_cuda: bool) -> None:
    """Build what these strategies need (g++ and ninja); raises InputError.

    With a CUDA build of torch, the optimizer for CPUs may need CUDA's compiler, so there only offloading builds it.
    """
    needed = [zero for name in strategies if (zero := STRATEGIES[name].zero)]
    on_gpu = torch.cuda.is_available() and not no_cuda
    if needed and not on_gpu:
        use_cpu()
    if needed and (not on_gpu or any(offload for _, offload in needed)):
        build(with_messages=not on_gpu)


def build(with_messages: bool, beat: Callable[[], None] = lambda: None) -> None:
    """Build the optimizer for CPUs, and what sends between processes of one machine; `beat` is called meanwhile.

    One program of a user builds at a time: the others wait for a lock that the kernel frees when its holder dies.
    """
    from deepspeed.comm.torch import build_shm_op
    from deepspeed.ops.op_builder import CPUAdamBuilder

    folder = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache" / "torch_extensions")
    folder.mkdir(parents=True, exist_ok=True)
    with watched(folder, beat), locked(folder / "course"), contextlib.redirect_stdout(sys.stderr):
        try:
            CPUAdamBuilder().load(verbose=False)
        except Exception as error:
            advice = "it needs g++, ninja and, with CUDA, the CUDA toolkit (CUDA_HOME); or leave out *_offload"
            raise InputError(f"DeepSpeed cannot build its optimizer for CPUs ({error}); {advice}") from error
        if with_messages:
            build_shm_op()


@contextlib.contextmanager
def watched(folder: Path, beat: Callable[[], None]) -> Iterator[None]:
    """While the block builds or waits: show that it is alive, and remove locks whose owner has gone."""
    begin, bars, unowned = time.monotonic(), list[tqdm](), set[Path]()

    def look() -> None:
        nonlocal unowned
        beat()
        unowned = remove_left_locks(folder.resolve(), unowned)
        if not bars and time.monotonic() - begin > LEAST:
            bars.append(tqdm(desc=ANNOUNCEMENT, bar_format="{desc}: {elapsed}", file=sys.stderr))
        for bar in bars:
            bar.refresh()

    try:
        with called_every(PERIOD, look):
            yield
    finally:
        for bar in bars:
            bar.close()


@contextlib.contextmanager
def called_every(seconds: float, call: Callable[[], object]) -> Iterator[None]:
    """While the block runs, call a function in a thread, each time after so many seconds."""
    done = threading.Event()

    def repeat() -> None:
        while not done.wait(seconds):
            call()

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def remove_left_locks(folder: Path, unowned: set[Path]) -> set[Path]:
    """Remove the locks that had no owner at the last look, and still have none; return those without one now.

    torch builds under a lock file that outlives a killed process, and then waits for it for ever. One look is not
    enough: torch closes its lock before it removes it.
    """
    locks = set(folder.rglob("lock"))
    used = paths_in_use() if locks else set()
    left = {lock for lock in locks if not used & {lock, lock.parent}}
    for lock in left & unowned:
        lock.unlink(missing_ok=True)
    return left - unowned


def paths_in_use() -> set[Path]:
    """What this user's processes have open, and where they work.

    The process that builds has the lock open. If it is killed, ninja and g++ can go on in the lock's folder.
    """
    used = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            used |= {Path(process.cwd()), *(Path(file.path) for file in process.open_files())}
    return used
