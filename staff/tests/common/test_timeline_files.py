"""A timeline's trace and page: what can be read back, and what a browser makes of it."""

import json
import re
from dataclasses import replace

import pytest

from common.errors import InputError
from common.timeline.page import write_page
from common.timeline.trace import read_trace, write_trace
from staff.tests.common.made_timelines import after_backward, during_backward

pytestmark = pytest.mark.medium


# -------------------------------------------------------------------------------------------------- trace


@pytest.mark.parametrize("made", [after_backward(), during_backward()])
def test_a_trace_read_again_is_the_timeline_and_perfetto_gets_a_process_per_rank_and_slices_that_nest(tmp_path, made):
    made = replace(made, notes=("one line",), labels=tuple(f"partition {i}" for i in range(made.world_size)))
    write_trace(made, tmp_path / "timeline.json")

    assert read_trace(tmp_path / "timeline.json") == made
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    named = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert named == dict(enumerate(made.labels))
    slices = [e for e in events if e["ph"] == "X"]
    assert sum(e["args"].get("bytes", 0) for e in slices) == sum(box.bytes for box in made.boxes)
    for a in slices:  # Perfetto draws slices of one thread that overlap without nesting in the wrong place
        for b in slices:
            if (a["pid"], a["tid"]) == (b["pid"], b["tid"]) and a["ts"] < b["ts"] < a["ts"] + a["dur"] - 0.01:
                assert b["ts"] + b["dur"] <= a["ts"] + a["dur"] + 0.01, (a, b)


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda text: text.replace('"bytes"', '"size"'), r"expected a timeline, but an entry is missing or wrong"),
        (lambda text: text[: len(text) // 2], "expected a whole trace, but it is cut off .*; rerun with"),
        *(
            (lambda _, other=other: other, "expected a timeline, got another file")
            for other in ('{"traceEvents": []}', "3")
        ),
    ],
)
def test_a_trace_that_cannot_be_used_is_refused_in_one_line(tmp_path, damage, message):
    write_trace(after_backward(), tmp_path / "timeline.json")
    (tmp_path / "timeline.json").write_text(damage((tmp_path / "timeline.json").read_text()))

    with pytest.raises(InputError, match=f"timeline.json: {message}"):
        read_trace(tmp_path / "timeline.json")


# --------------------------------------------------------------------------------------------------- page


def test_a_page_needs_no_network_and_is_not_ended_by_its_data(tmp_path):
    made = replace(after_backward(), title="</script><b>@data@ & co", notes=("<i>@title@",))
    write_page(made, tmp_path / "timeline.html")

    page = (tmp_path / "timeline.html").read_text()

    assert not re.search(r"(src|href)=(?!.data:)", page) and "http" not in page
    assert page.count("</script>") == 2 and "<b>" not in page and "<i>@title@" not in page
