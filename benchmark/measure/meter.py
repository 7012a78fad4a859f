"""Where the time of a step goes, phase by phase, as this worker sees it.

meter.begin()
with meter.phase("forward"): ...
meter.end()

Between two phases, and after the last, runs "other". So the phases of a step add up to its wall time.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from statistics import fmean

import torch

from benchmark.measure.profile import mark
from common.workers.process_group import Worker

PERIOD = 0.1  # seconds between two looks at the GPU
PHASES = ("data", "forward", "backward", "optimizer", "other")


class Meter:
    """Seconds of every step and of its phases; costs some microseconds a step, and on a GPU one wait per phase."""

    def __init__(self, worker: Worker) -> None:
        self.device = worker.device
        self.steps: list[dict[str, float]] = []  # {"wall": ..., "data": ..., ...}
        self.cpu_seconds: list[float] = []  # of this process, in each step
        self._now: dict[str, float] = {}
        self._begin = self._cpu_begin = 0.0

    def begin(self) -> None:
        self._wait()
        self._now = dict.fromkeys(PHASES, 0.0)
        self._begin, self._cpu_begin = time.perf_counter(), time.process_time()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time what stands inside; the same name may come several times in a step."""
        begin = time.perf_counter()
        with mark(name):  # in the trace, if there is one
            yield
            self._wait()
        self._now[name] += time.perf_counter() - begin

    def end(self) -> None:
        self._wait()
        wall = time.perf_counter() - self._begin
        self._now["other"] = wall - sum(self._now.values())
        self.steps.append({"wall": wall, **self._now})
        self.cpu_seconds.append(time.process_time() - self._cpu_begin)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # a GPU still computes after the call has returned


def gpu_figures(device: torch.device) -> dict[str, float]:
    """Utilisation (%), temperature (degrees C), power (W) of a GPU now, as far as they can be read.

    torch reads them with nvidia-ml-py, which the extra "benchmark" installs.
    """
    readings = {"gpu_utilisation": "utilization", "gpu_temperature": "temperature", "gpu_power": "power_draw"}
    figures: dict[str, float] = {}
    for name, function in readings.items():
        with contextlib.suppress(Exception):  # no NVML, or a GPU that keeps this to itself
            value = float(getattr(torch.cuda, function)(device))
            figures[name] = value / 1000 if name == "gpu_power" else value  # torch says milliwatts
    return figures


class GpuSampler:
    """Reads a worker's GPU from start() on, in a thread, while steps run; a CPU has no figures."""

    def __init__(self, device: torch.device, read: Callable[[torch.device], dict[str, float]] = gpu_figures) -> None:
        self.device, self.read, self.samples = device, read, list[dict[str, float]]()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def start(self) -> None:
        if self.device.type == "cuda":
            self._thread.start()

    def _look(self) -> None:
        while True:
            self.samples.append(self.read(self.device))
            if self._stopped.wait(PERIOD):
                return

    def means(self) -> dict[str, float]:
        """Stop, and return the mean of each figure."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()
        names = {name for sample in self.samples for name in sample}
        return {name: fmean(sample[name] for sample in self.samples if name in sample) for name in names}
