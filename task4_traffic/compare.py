"""Compare observed with expected traffic, for runs with different batch sizes: a table and two plots.

    python task4_traffic/compare.py runs/task4_64 runs/task4_32 runs/task4_16
    python task4_traffic/compare.py runs/task4_64 --dstat node0.csv --interface eth1      observed by dstat, rank 0 only

The payload is what expected.py computes for the recorded tensors. The framing is calibrated and shown separately.
No number is adjusted to fit another.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # finds common/ from any folder
import common.workers.environment  # isort: skip  # noqa: F401 (stops with a message if torch is missing)

import numpy as np

from common.errors import InputError, exit_on_input_error
from common.figures import COLOURS, HATCHES, figure
from common.flags import burst_bytes
from task4_traffic.counters import rates, read_counters
from task4_traffic.dstat import read_dstat
from task4_traffic.expected import Traffic, all_reduce_traffic, seconds, traffic_per_epoch
from task4_traffic.sample import Sample

SHOWN_ITERATIONS = 5  # in the plot over time


@dataclass(frozen=True)
class TrafficRun:
    """The traffic of one rank in one run.

    Bytes are means per iteration, on this rank's interface, unless a field says otherwise.
    """

    name: str
    rank: int
    world_size: int
    interface: str  # whose bytes were counted
    dtype: str  # in which gradients were sent: fp32, bf16 or fp16
    batch: int  # of all workers together
    examples: int
    batch_of_worker: int
    tensors: int
    tensor_bytes: float
    expected: Traffic  # payload
    framing: Traffic
    observed: Traffic
    epoch: Traffic  # expected payload of a whole epoch
    steps_per_epoch: int
    counted: int  # iterations that were observed
    predicted: float | None  # seconds of communication in an iteration, from the payload and --link_rate
    burst: float  # seconds by which an emulated link can be faster
    communication: float | None  # the same, measured

    @property
    def whose(self) -> str:
        """Return whose bytes the interface counted: on loopback, those of all workers pass through it."""
        return (
            f"all {self.world_size} workers (lo)" if self.interface == "lo" else f"rank {self.rank} ({self.interface})"
        )


def read_run(folder: Path, rank: int = 0) -> TrafficRun:
    """Return one rank's traffic. Raises InputError if the folder is not from task 4."""
    record, traffic = read_json(folder, f"rank{rank}.json"), read_json(folder, f"traffic_{rank}.json")
    iterations = sum(window["iterations"] for window in traffic["windows"])
    written = sum(group["iterations"] for group in traffic["sent"])
    total = sum(group["iterations"] * entry["bytes"] for group in traffic["sent"] for entry in group["tensors"])
    if not iterations or not total:
        raise InputError(f"{folder}: no iteration of this run recorded a tensor; see region 4.1")
    n, size = record["world_size"], total / written
    if n < 2:
        raise InputError(f"{folder}: expected a run on 2 workers or more, got {n}: one worker sends nothing")
    # The packets of all workers pass through the loopback interface, so expect their sum there.
    ranks = range(n) if traffic["interface"] == "lo" else [rank]
    each: Traffic = all_reduce_traffic(size, n)  # type: ignore[arg-type]
    expected = Traffic(len(ranks) * each.sent, len(ranks) * each.received)
    batch = record["config"]["per_gpu_train_batch_size"]
    examples, rate = record["examples"]["train"], record["config"].get("link_rate")
    return TrafficRun(
        name=folder.name,
        rank=rank,
        world_size=n,
        interface=traffic["interface"],
        dtype=record["config"].get("grad_dtype", "fp32"),
        batch=batch * n,
        examples=examples,
        batch_of_worker=batch,
        tensors=len(traffic["sent"][0]["tensors"]),
        tensor_bytes=size,
        expected=expected,
        framing=Traffic(traffic["framing"]["sent"], traffic["framing"]["received"]),
        observed=Traffic(*(sum(w[way] for w in traffic["windows"]) / iterations for way in ("sent", "received"))),
        epoch=traffic_per_epoch(expected, examples, batch, n),
        steps_per_epoch=record["steps_per_epoch"],
        counted=iterations,
        predicted=seconds(each, rate) if rate else None,
        burst=8 * burst_bytes(rate) / rate if rate else 0.0,
        communication=mean_communication(record),
    )


def mean_communication(record: dict[str, Any]) -> float | None:
    """Return the mean seconds of communication per iteration, without the first; None with fewer than two."""
    phases = [iteration["phases"]["communication"] or 0.0 for iteration in record["iterations"][1:]]
    return sum(phases) / len(phases) if phases else None


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """Return a file of a run. Raises InputError if it is not there or damaged."""
    try:
        return json.loads((folder / name).read_text())
    except FileNotFoundError:
        reason = "no such file" if folder.is_dir() else "no such folder"
    except OSError as error:
        reason = str(error.strerror)
    except ValueError:
        reason = "a damaged file"
    raise InputError(f"{folder}: expected {name} of a run of task4_traffic/run_glue.py, got {reason}; run it again")


def table(runs: list[TrafficRun]) -> str:
    """Return a table with one row per run: the bytes that its interface sends, and observed over expected."""
    head = (
        f"{'batch':>5} {'dtype':>5} {'tensors':>7} {'S':>11} {'iterations':>10} {'expected/epoch':>15} {'framing':>12}"
    )
    lines = [f"{head} {'observed/epoch':>15} {'/ payload':>9} {'/ with framing':>14}"]
    for run in runs:
        steps = run.steps_per_epoch
        plain, framed = ratios(run)
        lines.append(
            f"{run.batch:>5} {run.dtype:>5} {run.tensors:>7} {run.tensor_bytes:>11,.0f} {steps:>10}"
            f" {run.epoch.sent:>15,.0f} {run.framing.sent * steps:>12,.0f} {run.observed.sent * steps:>15,.0f}"
            f" {plain:>9.4f} {framed:>14.4f}"
        )
    return "\n".join(lines)


def extrapolations(runs: list[TrafficRun]) -> str:
    """Return a line for each run that observed less than an epoch: its bytes of an epoch are computed."""
    return "\n".join(
        f"batch {run.batch}: extrapolated to an epoch of {run.steps_per_epoch} iterations, {run.counted} were observed"
        for run in runs
        if run.counted < run.steps_per_epoch
    )


def predictions(runs: list[TrafficRun]) -> str:
    """Return a line for each run with a prediction: the seconds of communication, predicted and measured."""
    return "\n".join(
        f"batch {run.batch}: communication per iteration: at least {run.predicted:.4f} s predicted "
        f"({max(0.0, run.predicted - run.burst):.4f} s on emulated nodes), {run.communication:.4f} s measured"
        for run in runs
        if run.predicted is not None and run.communication is not None
    )


def ratios(run: TrafficRun) -> tuple[float, float]:
    """Return observed over expected bytes: for the payload alone, and with the calibrated framing."""
    return run.observed.sent / run.expected.sent, run.observed.sent / (run.expected.sent + run.framing.sent)


def check_comparable(runs: list[TrafficRun]) -> None:
    sizes = {run.world_size for run in runs}
    if len(sizes) > 1:
        words = ", ".join(f"{run.name} has {run.world_size}" for run in runs)
        raise InputError(f"expected runs with the same number of workers, because the traffic depends on it; {words}")
    if len({run.interface for run in runs}) > 1:
        words = ", ".join(f"{run.name} counts {run.whose}" for run in runs)
        raise InputError(f"expected runs whose bytes were counted in the same way; {words}")


def plot_over_time(path: Path, folder: Path, rank: int) -> None:
    """Draw bytes per second in and out over the first iterations; dotted lines show where an iteration ends."""
    samples = read_counters(folder / f"counters_{rank}.csv")
    ends = [sample.time for sample in samples if sample.event.startswith("iteration ")]
    begins = [sample.time for sample in samples if sample.event == "window 1 begins"]
    if not ends or not begins:
        raise InputError(f"{folder}: found no iterations in counters_{rank}.csv; run the script again")
    shown = ends[: max(SHOWN_ITERATIONS, sum(end < begins[0] + 1 for end in ends))]  # at least a second
    begin, end = begins[0], shown[-1]
    curve = [point for point in rates(samples) if begin - 0.3 <= point[0] <= end + 0.3]
    with figure(path, width=7.0) as axes:
        for column, name, style in ((2, "sent", "-"), (1, "received", "--")):
            moments = [point[0] - begin for point in curve]
            axes.plot(moments, [point[column] / 1e6 for point in curve], style, color=COLOURS[column], label=name)
        for number, moment in enumerate(shown):
            axes.axvline(moment - begin, color="grey", linestyle=":", label="" if number else "an iteration ends")
        axes.set_xlabel("time since training began (s)")
        axes.set_ylabel("traffic (MB/s)")
        axes.set_title(f"{folder.name}, rank {rank}")
        axes.set_ylim(top=1.2 * axes.get_ylim()[1])  # room for the legend above the curves
        axes.legend(loc="upper center", ncols=3)


def plot_epochs(path: Path, runs: list[TrafficRun]) -> None:
    """Draw the bytes sent in an epoch against the batch size: expected payload with framing on top, and observed."""
    with figure(path) as axes:
        places = list(range(len(runs)))
        expected = [run.epoch.sent / 1e6 for run in runs]
        framing = [run.framing.sent * run.steps_per_epoch / 1e6 for run in runs]
        observed = [run.observed.sent * run.steps_per_epoch / 1e6 for run in runs]
        left, right = [place - 0.2 for place in places], [place + 0.2 for place in places]
        style: dict[str, Any] = {"width": 0.38, "edgecolor": "black"}
        axes.bar(left, expected, color=COLOURS[0], hatch=HATCHES[0], label="expected payload", **style)
        axes.bar(left, framing, bottom=expected, color=COLOURS[1], hatch=HATCHES[1], label="framing", **style)
        axes.bar_label(
            axes.bar(right, observed, color=COLOURS[2], hatch=HATCHES[2], label="observed", **style), fmt="%.4g"
        )
        axes.set_xticks(places, [f"{run.batch}" + (f"\n{run.dtype}" if run.dtype != "fp32" else "") for run in runs])
        axes.set_xlabel("batch of all workers together (examples)")
        axes.set_ylabel(f"sent by {runs[0].whose} per epoch (MB)")
        axes.set_title(f"{runs[0].world_size} workers")
        axes.legend()
        axes.margins(y=0.15)


def observed_by_dstat(path: Path, interface: str, folder: Path, rank: int, unit: str | None = None) -> str:
    """Say what dstat or dool counted in the same windows, and whether it looks like bits taken for bytes."""
    windows = read_json(folder, f"traffic_{rank}.json")["windows"]
    sent = received = 0.0
    for window in windows:
        covering = [
            run
            for run in read_dstat(path, interface, unit)
            if run[0].time <= window["begin"] and window["end"] <= run[-1].time
        ]
        if not covering:
            raise InputError(
                f"{path}: no run in this file covers the training of {folder}; "
                "start dstat before the script and stop it afterwards"
            )
        into, out = volume(covering[0], window["begin"], window["end"])
        received, sent = received + into, sent + out
    kernel = sum(window["sent"] for window in windows)
    words = f"{path.name}: {sent:,.0f} bytes sent and {received:,.0f} received while {folder.name} trained"
    ratio = sent / kernel
    line = f"{words}; the kernel's counters say {kernel:,.0f} sent (ratio {ratio:.4f})"
    for factor, unit in ((8.0, "bits"), (1 / 8, "bytes")):
        if abs(ratio / factor - 1) < 0.25:  # rows of a second cut a window to a fraction of a second
            line += f"\nthis is {factor:g} times the kernel's figure: the file seems to hold {unit}; pass --unit {unit}"
    return line


def volume(samples: Sequence[Sample], begin: float, end: float) -> tuple[float, float]:
    """Return the bytes (received, sent) between two times, assuming an even rate between two readings."""
    times = [sample.time for sample in samples]
    received = np.interp([begin, end], times, [sample.received for sample in samples])
    sent = np.interp([begin, end], times, [sample.sent for sample in samples])
    return float(received[1] - received[0]), float(sent[1] - sent[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="output folders of task4_traffic/run_glue.py")
    parser.add_argument("--rank", type=int, default=0, help="rank whose traffic is shown (%(default)s)")
    parser.add_argument("--dstat", type=Path, help="output file of dstat or dool that covers the first run")
    parser.add_argument("--interface", default="total", help="column of that file (%(default)s)")
    parser.add_argument("--unit", choices=("bytes", "bits"), help="of that file (default: what its header says)")
    parser.add_argument("--output", type=Path, default=Path("runs"), help="folder for the plots (%(default)s)")
    arguments = parser.parse_args()
    runs = [read_run(folder, arguments.rank) for folder in arguments.runs]
    check_comparable(runs)
    print(f"bytes sent by {runs[0].whose}; S: bytes of all tensors of an iteration\n")
    print(table(runs))
    for lines in (extrapolations(runs), predictions(runs)):
        if lines:
            print(f"\n{lines}")
    if arguments.dstat:
        print(
            observed_by_dstat(arguments.dstat, arguments.interface, arguments.runs[0], arguments.rank, arguments.unit)
        )
    over_time, epochs = arguments.output / "traffic_over_time.png", arguments.output / "traffic_per_epoch.png"
    plot_over_time(over_time, arguments.runs[0], arguments.rank)
    plot_epochs(epochs, runs)
    print(f"\nplots: {over_time} {epochs}")


if __name__ == "__main__":
    exit_on_input_error(main)
