"""--profile: how long the parts of a step take, and which tensors a step has to synchronise."""

from pathlib import Path

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule

from common.paths import shown

SKIPPED, TRACED = 2, 3  # iterations: the first ones warm up the caches, so their times are not typical


class StepProfiler:
    """Traces three iterations into `folder`/trace_{rank}.json; open it in https://ui.perfetto.dev."""

    def __init__(self, folder: Path, rank: int):
        self._file = folder / f"trace_{rank}.json"
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(
            activities=activities,
            schedule=schedule(wait=SKIPPED - 1, warmup=1, active=TRACED, repeat=1),
            on_trace_ready=self._write,
        )
        self._profile.start()

    def step(self) -> None:
        """Tell the profiler that an iteration has ended."""
        self._profile.step()

    def close(self) -> None:
        self._profile.stop()

    def _write(self, trace: profile) -> None:
        trace.export_chrome_trace(str(self._file))
        print(trace.key_averages().table(sort_by="self_cpu_time_total", row_limit=10, max_name_column_width=40))
        print(f"trace of {TRACED} iterations: {shown(self._file)}")


def parameter_table(model: nn.Module) -> str:
    """Return a table of all parameters, largest first; tasks 2 and 3 send the gradient of each in every step."""
    rows = sorted(model.named_parameters(), key=lambda row: -row[1].numel())
    total = sum(parameter.numel() * parameter.element_size() for _, parameter in rows)
    lines = [f"{'parameter':60s} {'shape':>18s} {'MB':>9s} {'share':>6s}"]
    for name, parameter in rows:
        size = parameter.numel() * parameter.element_size()
        frozen = "" if parameter.requires_grad else "  frozen"
        shape = "x".join(str(n) for n in parameter.shape)
        lines.append(f"{name:60s} {shape:>18s} {size / 1e6:9.3f} {size / total:6.1%}{frozen}")
    lines.append(f"{f'{len(rows)} tensors':60s} {'':>18s} {total / 1e6:9.3f}")
    return "\n".join(lines)
