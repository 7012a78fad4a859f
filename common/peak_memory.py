"""The memory of this process: the bytes that are alive, the most that training needs at a time, and a limit.

The size of a process says little about its tensors: the C library keeps most of the memory that they give back. So what
is alive is counted where it is allocated: on a GPU by torch, on a CPU by glibc. Nothing of this needs root.
"""

import contextlib
import re
import resource
import threading
from collections.abc import Callable, Iterator

import torch

from common import linux
from common.errors import InputError

PERIOD = 0.004  # seconds between two samples: 2 % of a core
THRESHOLD = 128 * 2**10  # bytes; glibc begins with it, and raises it when a larger block is freed
OUT_OF_MEMORY = re.compile(
    r"not enough memory|can't allocate memory|out of memory|bad_alloc|Cannot allocate|new thread"
)
MB = 10**6


def alive_bytes(device: torch.device) -> int | None:
    """Return the bytes of everything that is allocated: on a GPU by torch, on a CPU by torch, gloo and Python's C code.

    None if the C library does not say.
    """
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return linux.allocated_bytes()


class PeakMemory:
    """Measures the most memory that is alive at a time while training runs, beyond what was alive before the model.

        memory = PeakMemory(device)              # before the model is made
        with memory.limited(megabytes, advice):  # or without a limit
            ...                                  # make the model, load it, divide it among the workers
            memory.start()
            ...                                  # train
            memory.stop()                        # memory.bytes, memory.process_bytes

    On a GPU torch keeps the peak. On a CPU a thread looks every few milliseconds; `sample` looks at once.
    bytes: None where it cannot be measured. process_bytes: the largest size of the whole process between start and
    stop, with libraries and memory that is kept for later use; None if the system does not say.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.before = alive_bytes(device) or 0
        self.bytes: int | None = None
        self.process_bytes: int | None = None
        self._stopped: threading.Event | None = None  # None: no thread is looking

    def start(self, period: float = PERIOD) -> None:
        """Begin to count; loading and sharding are over and do not count."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        elif linux.allocated_bytes() is not None:
            self.bytes = 0
            if self._stopped is not None:
                self._stopped.set()  # another thread takes over, with its own period
            self._stopped = threading.Event()
            threading.Thread(target=self._look, args=(self._stopped, period), daemon=True).start()
        if linux.forget_largest_size():
            self.process_bytes = 0

    def _look(self, stopped: threading.Event, period: float) -> None:
        while not stopped.wait(period):
            self.sample()

    def sample(self) -> None:
        """Look at once: call it where much is alive for a short time only."""
        if self.device.type != "cuda" and self.bytes is not None:
            self.bytes = max(self.bytes, (alive_bytes(self.device) or 0) - self.before)

    def stop(self) -> None:
        """End the measurement; a second call does nothing."""
        if self._stopped is not None:
            self.sample()
            self._stopped.set()
            self._stopped = None
        if self.device.type == "cuda":
            self.bytes = torch.cuda.max_memory_allocated(self.device) - self.before
        if self.process_bytes == 0:
            self.process_bytes = linux.status_bytes("VmHWM")

    @contextlib.contextmanager
    def limited(self, megabytes: int | None, advice: Callable[[], str]) -> Iterator[None]:
        """Let the block allocate at most this many MB (10^6 bytes) more than now; None: no limit.

        Raises InputError if they are not enough: what was needed, and the advice, which is asked for only then.
        On a CPU, blocks from 128 KiB on then leave the process when they are freed. glibc would otherwise keep them
        and reach the limit with memory that nobody uses. This costs time, because the system hands out each page again:
        a step takes a third to two thirds longer. Another C library is left as it is.
        """
        if megabytes is None:
            yield
            return
        self.start()  # its thread needs memory, too
        lift = _limit(megabytes, self.device)
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if not (isinstance(error, MemoryError) or OUT_OF_MEMORY.search(str(error))):
                raise
            lift()
            self.stop()
            asked = re.search(r"tried to allocate (\d+) bytes", str(error))
            more = f"{int(asked[1]) / MB:,.0f} MB more" if asked else "more"
            raise InputError(
                f"--memory_limit_mb: expected to need at most {megabytes} MB on this worker, but {more} did not fit "
                f"when model and training had {(self.bytes or 0) / MB:,.0f} MB; {advice()}"
            ) from error
        finally:
            lift()


def _limit(megabytes: int, device: torch.device) -> Callable[[], None]:
    """Set the limit; return the function that lifts it."""
    if device.type == "cuda":
        share = (torch.cuda.memory_allocated(device) + megabytes * MB) / torch.cuda.mem_get_info(device)[1]
        torch.cuda.set_per_process_memory_fraction(min(share, 1.0), device)
        return lambda: torch.cuda.set_per_process_memory_fraction(1.0, device)
    used = linux.status_bytes("VmData")
    if used is None:
        raise InputError("--memory_limit_mb: needs Linux or a GPU; leave the flag out")
    linux.give_back_blocks_from(THRESHOLD)
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (used + megabytes * MB, hard))
    return lambda: resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
