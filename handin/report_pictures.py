"""The pictures of the report: two kinds are drawn from records, the others are copied from where tasks left them.

Pictures are first planned, which is quick and says whether there is anything to show, and drawn at the end.
"""

import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from PIL import Image

from common.figures import COLOURS, bars, figure
from handin.gpt2_runs import FIGURES
from handin.measures import iteration_time
from handin.runs import Run
from handin.sections import NAMES, Findings

_COMMANDS = {
    "data_parallel": "python task2b_allreduce/run_gpt2.py --n_epochs 4 --world_size 2 --batch_size 128",
    "pipeline": "python pipeline/run_gpt2.py --model_parallel_mode pipeline_parallel --n_epochs 4",
}
_MARKERS = ("o", "s", "^", "D")


class Pictures:
    """The pictures of report/figures. Each method returns the picture's Markdown, "" if there is nothing to show."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._plan: list[Callable[[], object]] = []

    def losses(self, name: str, caption: str, runs: Sequence[Run]) -> str:
        """Mean loss over the workers against the iteration."""
        runs = [run for run in runs if len(run.mean_losses) > 1]
        return self._planned(name, caption, partial(_draw_losses, self.folder / name, runs)) if runs else ""

    def times(self, name: str, caption: str, runs: Sequence[Run]) -> str:
        """One bar for each run, with twice the standard error."""
        runs = [run for run in runs if (time := iteration_time(run)) and time.count > 1]
        return self._planned(name, caption, partial(_draw_times, self.folder / name, runs)) if runs else ""

    def copied(self, source: Path, caption: str, name: str = "") -> str:
        """A picture that a task has left behind, if it is there and whole."""
        name = name or source.name
        if not is_whole(source):
            return ""
        return self._planned(name, caption, partial(shutil.copyfile, source, self.folder / name))

    def of_gpt2(self, source: Path, findings: Findings) -> list[str]:
        """The four figures of the GPT-2 parts; those that are missing are named."""
        pictures = []
        for name, caption in FIGURES.items():
            if picture := self.copied(source / name, caption):
                pictures.append(picture)
            else:
                broken = " (it is damaged)" if (source / name).exists() else ""
                command = next(command for part, command in _COMMANDS.items() if name.startswith(part))
                findings.missing.append((f"figure submit_figures/{name}{broken}", command))
        return pictures

    def draw(self) -> None:
        """Draw and copy everything that was planned."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for make in self._plan:
            make()

    def _planned(self, name: str, caption: str, make: Callable[[], object]) -> str:
        self._plan.append(make)
        return f"![{caption}](figures/{name})\n"


def is_whole(source: Path) -> bool:
    """Return whether a picture is complete and can be read."""
    try:
        with Image.open(source) as picture:
            picture.load()
    except (OSError, SyntaxError, ValueError):  # PIL says "broken PNG" by a SyntaxError
        return False
    return True


def _draw_losses(path: Path, runs: Sequence[Run]) -> None:
    with figure(path) as axes:
        for number, (run, colour, marker) in enumerate(zip(runs, COLOURS, _MARKERS * 2, strict=False)):
            losses = run.mean_losses
            width = 1.2 + 2.0 * (len(runs) - 1 - number)  # equal curves: a thin line on top of a thick one
            axes.plot(
                range(1, len(losses) + 1), losses, color=colour, linewidth=width, label=NAMES[run.slot],
                marker=marker, markersize=width + 4, markevery=(3 * number, 3 * len(runs)),
            )  # fmt: skip
        axes.set_xlabel("iteration")
        axes.set_ylabel("training loss, mean over workers")
        axes.set_title("Loss of each iteration's batch")
        axes.legend(frameon=False)


def _draw_times(path: Path, runs: Sequence[Run]) -> None:
    times = [time for run in runs if (time := iteration_time(run))]
    unit, scale = ("s", 1) if max(time.mean for time in times) >= 1 else ("ms", 1000)
    names = [f"{NAMES[run.slot].replace(' ', chr(10), 1)}\n{run.workers} workers" for run in runs]
    values, errors = [scale * time.mean for time in times], [2 * scale * time.error for time in times]
    title = "Mean time, first iteration excluded"
    bars(path, names, values, errors=errors, label=f"time per iteration ({unit})", title=title)
