"""Predict a step of any strategy: its time with parts, its bytes, its memory, without running it.

    python -m benchmark.calibrate                                                    # once, on this machine
    python -m benchmark.predict --strategy ddp --model gpt2-tiny --workers 2 --batch_size 4
    python -m benchmark.predict --strategy own_zero3 --model gpt2 --workers 4096 --batch_size 4 --rate 1gbit --cores 8

The step is simulated as events: threads that compute, operations on the network, and the cores and links that they
share. What lies outside of the calibrated range is computed from the algorithms, and the table says so.

Without --cores, all workers share the cores of this machine, as the calibrated ones did; more workers than were
calibrated have a machine each, with as many cores as this one. With --cores K, every worker has K cores of its own.
Beyond four times the calibrated workers only a range is printed: at its lower end nobody waits and all operations go
along trees, at its upper end along rings, and all wait for the slowest worker.
"""

import common.workers.environment  # isort: skip  # noqa: F401 (stops with a message if torch is missing)

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

from benchmark.cost import calibration as stored
from benchmark.cost import curve
from benchmark.cost.cell import Cell
from benchmark.cost.predict_step import Prediction, predict
from benchmark.names import MODELS, check_model, command_parser
from benchmark.strategies import STRATEGIES
from cluster.emulate import bits_per_second
from common.errors import InputError, exit_on_input_error
from common.flags import check_at_least
from common.paths import ROOT

PICTURE = ROOT / "runs" / "benchmark" / "curve.png"
UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}


def table(prediction: Prediction) -> str:
    """For people."""
    cell = prediction.cell
    cores = "sharing this machine" if cell.cores is None else f"with {cell.cores} cores each"
    lines = [
        f"{cell.strategy}, {Path(cell.model).name}, {cell.workers} workers {cores}, {cell.batch} x {cell.length} "
        f"tokens each, link {cell.rate or 'loopback'}" + (f" + {cell.latency * 1e6:g} us" if cell.latency else ""),
    ]
    if prediction.is_range:
        lines.append(f"  {'step':<16}{prediction.least * 1e3:>12.0f} to {prediction.seconds * 1e3:.0f} ms")
    else:
        step = f"{prediction.seconds * 1e3:>12.2f} ms{prediction.examples_per_second:>14.1f} examples/s"
        lines.append(f"  {'step':<16}{step}")
    for name, seconds in prediction.parts.items():
        if seconds and not prediction.is_range:
            lines.append(f"    {name:<14}{seconds * 1e3:>12.2f} ms{seconds / prediction.seconds:>13.0%}")
    lines.append(f"  {'sent by a rank':<16}{prediction.sent_bytes / 1e6:>12.3f} MB")
    for name, (calls, size) in prediction.sent.items():
        lines.append(f"    {name:<14}{size / 1e6:>12.3f} MB{calls:>12g} calls")
    if prediction.sent_bytes:
        lines.append(f"  {'with frames':<16}{prediction.on_wire / 1e6:>12.3f} MB")
    memory = prediction.memory
    lines.append(f"  {'kept in memory':<16}{memory.kept / 1e6:>12.2f} MB{memory.textbook / 1e6:>13.2f} by the papers")
    lines.append(f"  {'at the peak':<16}{memory.peak / 1e6:>12.2f} MB{memory.activations / 1e6:>13.2f} of activations")
    lines += [f"  extrapolated: {note}" for note in prediction.notes]
    return "\n".join(lines)


def as_dict(prediction: Prediction) -> dict[str, Any]:
    """Return the figures for the last line: seconds in ms, bytes in bytes."""
    return {
        "cell": vars(prediction.cell),
        **prediction.times(),
        **({} if prediction.is_range else {"parts_ms": {k: v * 1e3 for k, v in prediction.parts.items()}}),
        "sent": {name: {"calls": calls, "bytes": size} for name, (calls, size) in prediction.sent.items()},
        "on_wire": prediction.on_wire,
        "memory": vars(prediction.memory),
        "notes": list(prediction.notes),
        "is_calibrated": prediction.is_calibrated,
    }


def seconds_of(word: str) -> float:
    """Return a --latency such as 50us in seconds; raises InputError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(us|ms|s)", word)
    if not match:
        raise InputError(f"--latency: expected a number with us, ms or s such as 50us; got {word!r}")
    return float(match[1]) * UNITS[match[2]]


def parse(argv: list[str]) -> argparse.Namespace:
    """Return the flags, with cell, calibration (known) and axis of what is asked.

    Of more workers than were calibrated, each has a machine of its own. Raises InputError for anything that cannot be
    predicted.
    """
    parser = command_parser("predict", __doc__)
    add = parser.add_argument
    add("--strategy", default="ddp", help=f"{', '.join(STRATEGIES)} (ddp)")
    add("--model", default="gpt2-tiny", help=f"{', '.join(MODELS)}, or a folder (gpt2-tiny)")
    add("--workers", type=int, default=2, help="2")
    add("--batch_size", type=int, default=4, help="examples of one worker (4)")
    add("--length", type=int, default=64, help="tokens of an example (64)")
    add("--rate", help="of every link, such as 1gbit (default: loopback)")
    add("--latency", default="0us", help="of every message, beyond what was calibrated, such as 50us")
    add("--cores", type=int, help="of each worker's own machine (default: see above)")
    add("--memory_gb", type=float, help="of each machine (default: as this one)")
    add("--bucket_mb", type=float, default=4, help="own_overlap: MiB in a bucket of gradients (4)")
    add("--calibration", type=Path, default=stored.DEFAULT, help="what benchmark.calibrate wrote (%(default)s)")
    add("--timeline", type=Path, help="write the step's timeline to this folder: timeline.png, .html, trace.json")
    add("--sweep", help="a curve: workers=1..4096, batch=1..128 or rate=100mbit,1gbit")
    add("--picture", type=Path, default=PICTURE, help="of the curve (%(default)s)")
    arguments = parser.parse_args(argv)
    check_at_least(arguments, 1, "workers", "batch_size", *(["cores"] if arguments.cores is not None else []))
    check_at_least(arguments, 8, "length")
    if arguments.rate is not None:
        bits_per_second(arguments.rate)
    seconds_of(arguments.latency)
    if arguments.memory_gb is not None and not arguments.memory_gb > 0:
        raise InputError(f"--memory_gb: expected more than 0; got {arguments.memory_gb:g}")
    if not arguments.bucket_mb > 0:
        raise InputError(f"--bucket_mb: expected a size in MiB above 0; got {arguments.bucket_mb:g}")
    if arguments.strategy not in STRATEGIES:
        raise InputError(f"--strategy: expected one of {', '.join(STRATEGIES)}; got {arguments.strategy!r}")
    check_model("--model", arguments.model)
    if arguments.timeline is not None and arguments.sweep is not None:
        raise InputError("--timeline: shows one step, and --sweep predicts many; leave one of them out")
    axis, places = arguments.axis = curve.read_axis(arguments.sweep) if arguments.sweep else ("", [])
    known = arguments.known = stored.load(arguments.calibration)
    most = max([arguments.workers, *map(int, places if axis == "workers" else [])])
    has_own_cores = most > max((profile.workers for profile in known.profiles), default=1)
    arguments.cell = Cell(
        arguments.strategy,
        arguments.model,
        arguments.workers,
        arguments.batch_size,
        arguments.length,
        bucket_bytes=int(arguments.bucket_mb * 2**20),
        rate=arguments.rate,
        latency=seconds_of(arguments.latency),
        cores=arguments.cores or (int(known.machine["cores"]) if has_own_cores else None),
        memory=None if arguments.memory_gb is None else arguments.memory_gb * 1e9,
    )
    return arguments


def write_timeline(prediction: Prediction, folder: Path) -> None:
    """Write the picture, the page and the trace of the predicted step."""
    from benchmark.cost.predicted_timeline import timeline  # here: most predictions are drawn by nobody
    from common.timeline.page import write_page
    from common.timeline.picture import draw
    from common.timeline.trace import write_trace

    step_timeline = timeline(prediction)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--timeline: cannot write to {folder}: {error.strerror}; name another folder") from error
    draw(step_timeline, folder / "timeline.png")
    write_page(step_timeline, folder / "timeline.html")
    write_trace(step_timeline, folder / "trace.json")


def show_curve(question: argparse.Namespace) -> dict[str, Any]:
    """Print the table of a sweep and draw its curve; return its figures."""
    axis, places = question.axis
    points = curve.curve(question.known, question.cell, axis, places)
    title = f"{question.cell.strategy}, {Path(question.cell.model).name}, predicted"
    curve.draw(axis, points, title, question.picture)
    print(curve.table(points))
    return {"axis": axis, "points": curve.rows(points)}


def main() -> None:
    question = parse(sys.argv[1:])
    if question.sweep is not None:
        print(json.dumps(show_curve(question)))
        return
    prediction = predict(question.known, question.cell)
    print(table(prediction))
    if question.timeline is not None:
        write_timeline(prediction, question.timeline)
    print(json.dumps(as_dict(prediction)))


if __name__ == "__main__":
    exit_on_input_error(main)
