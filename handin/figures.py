"""The figures of the report: drawn from records, or copied from where the tasks have left them."""

import shutil
from pathlib import Path
from typing import Any

from common.errors import InputError
from common.figures import COLOURS, bars, figure
from common.timeline.boxes import shortest_step
from common.timeline.parts import table
from common.timeline.picture import draw
from common.timeline.trace import read_trace
from handin.findings import Findings, iteration_time
from handin.records import Run

MARKERS = ("o", "s", "^", "D")


class ReportFigures:
    """The pictures in report/figures. Each method returns the picture's Markdown, "" if there is nothing to show."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def losses(self, name: str, caption: str, runs: dict[str, Run]) -> str:
        """Draw the loss of each iteration, for as many as all runs have. runs: by their names in the legend."""
        length = min((len(run.losses) for run in runs.values()), default=0)
        if length < 2:
            return ""
        with figure(self.folder / name) as axes:
            for i, (label, run) in enumerate(runs.items()):  # equal curves: markers by turns, so that all can be seen
                style: dict[str, Any] = {"label": label, "color": COLOURS[i], "marker": MARKERS[i]}
                axes.plot(range(1, length + 1), run.losses[:length], **style, markevery=(i, len(runs)))
            axes.set_xlabel("iteration")
            axes.set_ylabel("training loss, mean over workers")
            axes.legend(frameon=False)
        return _markdown(caption, name)

    def times(self, name: str, caption: str, runs: dict[str, Run]) -> str:
        """Draw a bar for each run, with twice the standard error."""
        times = {label.replace(" ", "\n", 1): time for label, run in runs.items() if (time := iteration_time(run))}
        if not times:
            return ""
        means, errors = zip(*((1e3 * time.mean, 2e3 * (time.error or 0)) for time in times.values()), strict=True)
        bars(self.folder / name, list(times), means, errors=errors, label="time per iteration (ms)", title="")
        return _markdown(caption, name)

    def timeline(self, caption: str, run: Run, findings: Findings) -> str:
        """Draw one step of a run with --timeline, that which was disturbed least, and show where the time went."""
        name = f"timeline_{run.kind}.png"
        try:
            timeline = read_trace(run.folder / "timeline.json")
        except InputError as error:
            findings.doubt(f"{run.name}: {str(error).removeprefix(f'{run.folder}/')}")
            return ""
        draw(shortest_step(timeline), self.folder / name)
        return f"{_markdown(caption, name)}```\n{table(timeline)}\n```\n\n"

    def copied(self, source: Path, caption: str, name: str = "") -> str:
        """Copy a picture that a task has left behind, if it is there."""
        if not source.is_file():
            return ""
        shutil.copyfile(source, self.folder / (name or source.name))
        return _markdown(caption, name or source.name)


def _markdown(caption: str, name: str) -> str:
    return f"![{caption}](figures/{name})\n\n"
