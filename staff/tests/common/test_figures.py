"""What a figure shows, read from an SVG file: matplotlib writes each text as a comment, and each bar as a path."""

import re
from pathlib import Path

import pytest

from benchmark.strategies import STRATEGIES
from cluster.demo.drawings import memory, remainder
from common.data_partition import DataPartitioner
from pipeline.timeline import TaskBox, Trace


def texts(file: Path) -> list[str]:
    return [text.strip() for text in re.findall(r"<!--(.*?)-->", file.read_text(encoding="utf-8"))]


def left_ends(file: Path, colour: str) -> list[float]:
    """Of the bars of a colour, in the order in which they were drawn."""
    return [
        float(x) for x in re.findall(rf'<path d="M (\S+)[^"]*"[^>]*fill: {colour}', file.read_text(encoding="utf-8"))
    ]


def test_the_picture_of_a_remainder_has_the_sizes_that_the_partitioner_gives(tmp_path):
    remainder(tmp_path / "remainder.svg")

    partitions = DataPartitioner(list(range(11)), [0.7, 0.2, 0.1])
    sizes = [int(size) for text in texts(tmp_path / "remainder.svg") for size in re.findall(r"→ +(\d+)", text)]
    assert sizes == [len(partitions.use(part)) for part in range(3)]


def test_the_picture_of_memory_has_the_bytes_of_the_benchmark_s_strategies(tmp_path):
    memory(tmp_path / "memory.svg")

    *_, ddp, zero1, zero2, zero3 = [int(text) for text in texts(tmp_path / "memory.svg") if text.isdigit()]
    totals = {"ddp": ddp, "zero1": zero1, "zero2": zero2, "zero3": zero3}
    assert totals == {name: STRATEGIES[name].ideal_bytes(1, workers=4) for name in totals}


def test_the_picture_of_a_pipeline_has_each_box_at_its_time(tmp_path):
    times = [0.0, 0.001, 0.003]
    boxes = [TaskBox(phase, 0, i, 7 + t, 7.001 + t) for phase in ("forward", "backward") for i, t in enumerate(times)]

    Trace(boxes).draw(tmp_path / "trace.svg")

    assert {"F0", "F1", "F2", "B0", "B1", "B2", "partition 0"} <= set(texts(tmp_path / "trace.svg"))
    for colour in ("#8fbbe8", "#f2c179"):
        first, second, third = left_ends(tmp_path / "trace.svg", colour)
        assert third - first == pytest.approx(3 * (second - first), rel=1e-4) != 0
