"""The figures of the report: two that are drawn from records, and those that the tasks have left behind."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from common.figures import COLOURS, bars, figure
from handin.gpt2 import FIGURES
from handin.measures import iteration_time
from handin.runs import Run
from handin.sections import NAMES, Findings

_COMMANDS = {
    "data_parallel": "python task2b_allreduce/run_gpt2.py --n_epochs 4 --world_size 2 --batch_size 128",
    "pipeline": "python pipeline/run_gpt2.py --model_parallel_mode pipeline_parallel --n_epochs 4",
}
_LINES = ("-", "--", "-.", ":")


def draw_losses(path: Path, runs: Sequence[Run]) -> bool:
    """Mean loss over the workers against the iteration; False if no run has two iterations."""
    runs = [run for run in runs if len(run.mean_losses) > 1]
    if not runs:
        return False
    with figure(path) as axes:
        for run, colour, style in zip(runs, COLOURS, _LINES * 2, strict=False):
            losses = run.mean_losses
            axes.plot(range(1, len(losses) + 1), losses, style, color=colour, linewidth=1.5, label=NAMES[run.slot])
        axes.set_xlabel("iteration")
        axes.set_ylabel("training loss, mean over workers")
        axes.set_title("Loss of each iteration's batch")
        axes.legend(frameon=False)
    return True


def draw_times(path: Path, runs: Sequence[Run]) -> bool:
    """One bar for each task, with twice the standard error; False if there is none."""
    timed = [(run, time) for run in runs if (time := iteration_time(run)) and time.count > 1]
    if not timed:
        return False
    names = [f"{NAMES[run.slot].replace(' ', chr(10), 1)}\n{run.workers} workers" for run, _ in timed]
    unit, scale = ("s", 1) if max(time.mean for _, time in timed) >= 1 else ("ms", 1000)
    values, errors = [scale * time.mean for _, time in timed], [2 * scale * time.error for _, time in timed]
    bars(path, names, values, errors=errors, label=f"time per iteration ({unit})", title="Mean without the first")
    return True


def copy_gpt2_figures(source: Path, to: Path, findings: Findings) -> list[tuple[str, str]]:
    """The four figures of the GPT-2 parts: (file name, caption) of those that are there and whole."""
    found = []
    for name, caption in FIGURES.items():
        if copy_figure(source / name, to / name):
            found.append((name, caption))
        else:
            broken = " (it is damaged)" if (source / name).exists() else ""
            command = next(command for part, command in _COMMANDS.items() if name.startswith(part))
            findings.missing.append((f"figure submit_figures/{name}{broken}", command))
    return found


def copy_figure(source: Path, to: Path) -> bool:
    """Copy a picture; False if it is not there or not whole."""
    try:
        with Image.open(source) as picture:
            picture.load()
    except (OSError, SyntaxError, ValueError):  # PIL says "broken PNG" by a SyntaxError
        return False
    to.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, to)
    return True
