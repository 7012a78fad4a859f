"""Where the time of a step goes, phase by phase, as this worker sees it.

meter.begin()
with meter.phase("forward"): ...
meter.end()

Between two phases, and after the last, runs "other". So the phases of a step add up to its wall time; that they are
all of the run's time is checked against one clock around the whole timed window.
"""

import contextlib
import time
from collections.abc import Iterator

import psutil
import torch

from common.workers.process_group import Worker

PHASES = ("data", "forward", "backward", "optimizer", "other")


class Meter:
    """Seconds of every step and of its phases; costs some microseconds a step, and on a GPU one wait per phase."""

    def __init__(self, worker: Worker) -> None:
        self.device = worker.device
        self.steps: list[dict[str, float]] = []  # {"wall": ..., "data": ..., ...}
        self.process = psutil.Process()
        self._now: dict[str, float] = {}
        self._begin = 0.0

    def begin(self) -> None:
        self._wait()
        self._now = dict.fromkeys(PHASES, 0.0)
        self._begin = time.perf_counter()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time what stands inside; the same name may come several times in a step."""
        begin = time.perf_counter()
        yield
        self._wait()
        self._now[name] += time.perf_counter() - begin

    def end(self) -> None:
        self._wait()
        wall = time.perf_counter() - self._begin
        self._now["other"] = wall - sum(self._now.values())
        self.steps.append({"wall": wall, **self._now})

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # a GPU still computes after the call has returned


class Window:
    """The timed steps as one piece: wall time, CPU time of this process, what the GPU says about itself."""

    def __init__(self, meter: Meter) -> None:
        self.meter = meter
        self.first = self.last = len(meter.steps)
        self._wall = time.perf_counter()
        self._cpu = self._cpu_seconds()
        self.figures: dict[str, float | None] = {}

    def close(self) -> None:
        wall, cpu = time.perf_counter() - self._wall, self._cpu_seconds() - self._cpu
        self.last = len(self.meter.steps)
        self.figures = {
            "wall_s": wall,
            "cpu_utilisation": cpu / wall,  # 1.0: one core is busy all the time
            **gpu_figures(self.meter.device),
        }

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """What stands inside, such as a validation between two steps, does not count."""
        wall, cpu = time.perf_counter(), self._cpu_seconds()
        yield
        self._wall += time.perf_counter() - wall
        self._cpu += self._cpu_seconds() - cpu

    @property
    def steps(self) -> list[dict[str, float]]:
        return self.meter.steps[self.first : self.last]

    def _cpu_seconds(self) -> float:
        used = self.meter.process.cpu_times()
        return used.user + used.system


def gpu_figures(device: torch.device) -> dict[str, float | None]:
    """Utilisation (%), temperature (degrees C), power (W) of a worker's GPU; None where they cannot be read.

    torch reads them with nvidia-ml-py, which the extra "benchmark" installs. A worker on a CPU has none.
    """
    readings = {"gpu_utilisation": "utilization", "gpu_temperature": "temperature", "gpu_power": "power_draw"}
    figures: dict[str, float | None] = dict.fromkeys(readings)
    for name, function in readings.items() if device.type == "cuda" else ():
        with contextlib.suppress(Exception):  # no NVML, or a GPU that keeps this to itself
            value = float(getattr(torch.cuda, function)(device))
            figures[name] = value / 1000 if name == "gpu_power" else value  # torch says milliwatts
    return figures
