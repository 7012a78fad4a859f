"""Our own tests of traces: recorded, saved, read back, drawn."""

import json

import pytest
import torch

from pipeline.pipe import Pipe
from pipeline.timeline import Box, Trace
from tests.own.pipeline_stages import labelled, mlp, no_worker_is_left

__all__ = ["no_worker_is_left"]  # a fixture for every test here


def test_a_trace_has_a_box_for_every_forward_and_backward_in_chromes_format_and_is_drawn(tmp_path):
    piped = Pipe(labelled(*mlp()), 2)
    trace = piped.trace = Trace()

    piped(torch.randn(8, 6)).sum().backward()
    trace.save(tmp_path / "trace.json")
    trace.draw(tmp_path / "trace.png", "three stages")

    assert 0 < trace.bubble < 1
    assert trace.speedup == pytest.approx((1 - trace.bubble) * 3)
    assert (tmp_path / "trace.png").read_bytes()[:4] == b"\x89PNG"
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [event["args"]["name"] for event in events if event["ph"] == "M"] == [f"partition {j}" for j in range(3)]
    complete = [event for event in events if event["ph"] == "X"]
    assert sorted((event["cat"], event["tid"], event["name"]) for event in complete) == [
        (phase, j, f"{phase[0].upper()}{i}") for phase in ("backward", "forward") for j in range(3) for i in range(4)
    ]
    end = max(event["ts"] + event["dur"] for event in complete)
    assert min(event["ts"] for event in complete) == 0 and end == pytest.approx(trace.duration * 1e6)


@pytest.mark.parametrize(("partitions", "sentence"), [(1, "the blocks compute 75.0% of the time"), (2, "bubble 62.5%")])
def test_only_a_model_that_is_cut_has_a_bubble(partitions, sentence):
    trace = Trace()
    trace.boxes = [Box("forward", 0, 0, 0.0, 1.0), Box("backward", partitions - 1, 0, 2.0, 4.0)]

    assert trace.in_words().startswith(sentence)
