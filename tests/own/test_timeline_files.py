"""A timeline's trace and page: what can be read back, and what a browser makes of it."""

import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from common.errors import InputError
from common.timeline.page import write_page
from common.timeline.trace import read_trace, write_trace
from tests.own.made_timelines import after_backward, during_backward

pytestmark = pytest.mark.medium

BROWSERS = ("chromium", "chromium-browser", "google-chrome")


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


def in_browser(page: Path, script: str) -> tuple[dict, str]:
    """Open a page, then run a script that fills `result`; return that, and what the browser wrote to its console."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if not browser:
        pytest.skip(f"no browser here: looked for {', '.join(BROWSERS)}")
    probe = page.with_name("probe.html")
    more = f"<pre id=out></pre><script>const result = {{}};{script};out.textContent = JSON.stringify(result)</script>"
    probe.write_text(page.read_text() + more)
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--window-size=1200,600", "--enable-logging=stderr"]
    command = [browser, *flags, "--dump-dom", f"--user-data-dir={page.parent / 'profile'}", f"file://{probe}"]
    process = subprocess.run(command, capture_output=True, text=True, timeout=120)
    match = re.search(r'<pre id="out">(.*?)</pre>', process.stdout, re.DOTALL)
    console = "\n".join(line for line in process.stderr.splitlines() if "CONSOLE" in line)
    assert match, console or process.stderr[-2000:]
    return json.loads(match[1].replace("&amp;", "&").replace("&gt;", ">").replace("&lt;", "<")), console


HOVER = """
function hover(ms, y) {
  const place = canvas.getBoundingClientRect()
  const at = {clientX: place.left + xOf(ms), clientY: place.top + TOP + y, bubbles: true}
  canvas.dispatchEvent(new PointerEvent("pointermove", at))
  return tip.style.display == "none" ? "" : tip.textContent
}
"""


def test_a_browser_shows_name_bytes_and_the_rank_waited_for(tmp_path):
    write_page(after_backward(), tmp_path / "timeline.html")
    script = """
        result.wait = hover(70, 10); result.phase = hover(10, 10); result.network = hover(100, 35)
        result.nothing = hover(122, 35)
        canvas.dispatchEvent(new WheelEvent("wheel", {deltaY: -1, bubbles: true, cancelable: true}))
        result.shown = to - from; result.zoomed = hover(10, 10)
    """
    result, console = in_browser(tmp_path / "timeline.html", HOVER + script)

    assert console == ""
    assert result["phase"] == result["zoomed"] == "rank 0: forward, 20.000 ms"
    assert result["network"] == "rank 0: all_reduce, 4,000,000 bytes, 50.000 ms, waited 20.000 ms for rank 2"
    assert result["wait"].startswith("rank 0 waits for rank 2; rank 0: all_reduce, 4,000,000 bytes")
    assert result["nothing"] == ""
    assert result["shown"] == pytest.approx(0.8 * 375)


def test_a_page_needs_no_network_and_is_not_ended_by_its_data(tmp_path):
    made = replace(after_backward(), title="</script><b>@data@ & co", notes=("<i>@title@",))
    write_page(made, tmp_path / "timeline.html")

    page = (tmp_path / "timeline.html").read_text()

    assert not re.search(r"(src|href)=(?!.data:)", page) and "http" not in page
    assert page.count("</script>") == 2 and "<b>" not in page and "<i>@title@" not in page
