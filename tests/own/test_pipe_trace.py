"""Our own tests of traces: recorded, saved, read back, drawn."""

import json

import pytest
import torch

from common.errors import InputError
from pipeline.pipe import Pipe
from pipeline.timeline import Box, Trace
from tests.own.pipeline_stages import labelled, mlp, no_worker_is_left

__all__ = ["no_worker_is_left"]  # a fixture for every test here


def test_a_trace_has_a_box_for_every_forward_and_backward_and_reads_back_and_is_drawn(tmp_path):
    piped = Pipe(labelled(*mlp()), 2)
    piped.trace = Trace()

    piped(torch.randn(8, 6)).sum().backward()
    piped.trace.save(tmp_path / "trace.json")
    piped.trace.draw(tmp_path / "trace.png", "three stages")
    read = Trace.load(tmp_path / "trace.json")

    boxes = [(box.phase, box.partition, box.micro_batch) for box in read.boxes]
    assert sorted(boxes) == [(phase, j, i) for phase in ("backward", "forward") for j in range(3) for i in range(4)]
    assert read.duration == pytest.approx(piped.trace.duration, abs=1e-6)
    assert 0 < read.bubble < 1
    assert read.speedup == pytest.approx((1 - read.bubble) * 3)
    assert (tmp_path / "trace.png").read_bytes()[:4] == b"\x89PNG"
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]  # in Chrome's format
    assert [event["args"]["name"] for event in events if event["ph"] == "M"] == [f"partition {j}" for j in range(3)]
    complete = [event for event in events if event["ph"] == "X"]
    assert {event["name"] for event in complete} == {f"{phase}{i}" for phase in "FB" for i in range(4)}
    assert all({"name", "cat", "ts", "dur", "pid", "tid"} <= event.keys() for event in complete)


@pytest.mark.parametrize(("partitions", "sentence"), [(1, "the blocks compute 75.0% of the time"), (2, "bubble 62.5%")])
def test_only_a_model_that_is_cut_has_a_bubble(partitions, sentence):
    trace = Trace()
    trace.boxes = [Box("forward", 0, 0, 0.0, 1.0), Box("backward", partitions - 1, 0, 2.0, 4.0)]

    assert trace.in_words().startswith(sentence)


def test_a_file_that_is_no_trace_is_refused(tmp_path):
    (tmp_path / "other.json").write_text("[]")

    with pytest.raises(InputError, match="cannot read the trace"):
        Trace.load(tmp_path / "other.json")
