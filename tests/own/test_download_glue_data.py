"""The downloader against a real HTTP server: complete, resumed, cut, changed, interrupted, refused, twice at once."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.own import glue_server
from tests.own.glue_server import COMPLETE, PAIRS, Server, command, names, refused, rte, run, tsv
from tests.own.started_processes import wait_for

pytestmark = pytest.mark.medium


server, data_dir = glue_server.server, glue_server.data_dir  # fixtures


def run_until_the_middle(data_dir: Path, server: Server) -> int:
    """Leave a first half of RTE.zip behind, as a broken connection does; returns its length."""
    half = server.send_at_most = len(server.files["RTE.zip"]) // 2
    line = refused(run(data_dir, server))
    assert "the connection broke" in line and "run this again to continue" in line
    assert names(data_dir) == ["RTE.zip.part"] and (data_dir / "RTE.zip.part").stat().st_size == half
    server.send_at_most = None
    server.log.clear()
    return half


def test_a_broken_download_goes_on_where_it_stopped(server: Server, data_dir: Path) -> None:
    server.files["RTE.zip"] = rte()
    half = run_until_the_middle(data_dir, server)
    assert run(data_dir, server).returncode == 0
    assert server.log == [(f"bytes={half}-", len(rte()) - half)]  # only the rest was sent
    assert names(data_dir) == COMPLETE

    (data_dir / "RTE" / "dev.tsv").unlink()
    assert "has test.tsv and no dev.tsv: move it away" in refused(run(data_dir, server))
    shutil.rmtree(data_dir / "RTE")
    (data_dir / "RTE.zip.part").write_bytes(rte())  # a run that was interrupted after the last byte
    assert run(data_dir, server).returncode == 0
    assert sum(sent for _, sent in server.log) == len(rte()) - half
    assert names(data_dir) == COMPLETE


@pytest.fixture
def stalled(server: Server, data_dir: Path) -> Iterator[subprocess.Popen[str]]:
    """A run that has got the first half of RTE.zip and waits for more."""
    server.files["RTE.zip"] = rte()
    server.send_at_most = len(rte()) // 2
    server.go_on = threading.Event()
    # Where the tests run in the background, SIGINT is ignored, and a child would inherit that; a handler it does not.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(command(data_dir, "--mirror", server.url), stderr=subprocess.PIPE, text=True)
    signal.signal(signal.SIGINT, before)
    part = data_dir / "RTE.zip.part"
    try:
        wait_for(lambda: part.exists() and part.stat().st_size == server.send_at_most, "the first half")
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_run_leaves_only_the_part_and_the_next_one_goes_on(
    stalled: subprocess.Popen[str], server: Server, data_dir: Path, how: signal.Signals
) -> None:
    stalled.send_signal(how)
    message = stalled.communicate(timeout=60)[1]
    assert stalled.returncode == (130 if how is signal.SIGINT else -how)
    assert how is signal.SIGKILL or "run the same command again to continue" in message
    assert "Traceback" not in message
    assert names(data_dir) == ["RTE.zip.part"]

    half, server.send_at_most = server.send_at_most, None
    assert server.go_on
    server.go_on.set()
    assert run(data_dir, server).returncode == 0
    assert server.log[1:] == [(f"bytes={half}-", len(rte()) - (half or 0))]
    assert names(data_dir) == COMPLETE


def holds_a_lock_file_open(pid: int) -> bool:
    with contextlib.suppress(OSError):  # a file it closes meanwhile
        return any(os.readlink(file).endswith(".lock") for file in Path(f"/proc/{pid}/fd").iterdir())
    return False


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc to see that the second run waits")
def test_of_two_runs_at_once_the_second_waits_and_takes_over(
    stalled: subprocess.Popen[str], server: Server, data_dir: Path
) -> None:
    second = subprocess.Popen(command(data_dir, "--mirror", server.url))
    try:
        wait_for(lambda: holds_a_lock_file_open(second.pid) or len(server.log) > 1, "the second run")
        assert len(server.log) == 1
        server.send_at_most = None
        assert server.go_on
        server.go_on.set()  # the first run's connection ends here, half-way
        stalled.communicate(timeout=60)
        assert stalled.returncode == 2
        assert second.wait(60) == 0
    finally:
        second.kill()
    assert sum(sent for _, sent in server.log) == len(rte())
    assert names(data_dir) == COMPLETE


def test_a_server_that_cannot_resume_sends_everything_again(server: Server, data_dir: Path) -> None:
    server.files["RTE.zip"] = rte()
    run_until_the_middle(data_dir, server)
    server.ranges = False
    server.send_at_most = 1_000
    assert run(data_dir, server).returncode == 2
    assert (data_dir / "RTE.zip.part").read_bytes() == rte()[:1_000]

    server.send_at_most = None
    assert run(data_dir, server).returncode == 0
    assert [sent for _, sent in server.log] == [1_000, len(rte())]
    assert names(data_dir) == COMPLETE


@pytest.mark.parametrize(
    "rows",
    [PAIRS, {"train": 10, "dev": 10, "test": 10}],
    ids=["same numbers of rows", "shorter than what is there"],
)
def test_a_file_that_changed_on_the_server_is_downloaded_from_the_start(
    server: Server, data_dir: Path, rows: dict[str, int]
) -> None:
    server.files["RTE.zip"] = rte("old")
    half = run_until_the_middle(data_dir, server)
    server.files["RTE.zip"] = rte("new", **rows)
    assert run(data_dir, server).returncode == 0
    assert [asked for asked, _ in server.log] == [f"bytes={half}-", None]
    assert names(data_dir) == COMPLETE
    for split, count in rows.items():
        assert (data_dir / f"RTE/{split}.tsv").read_bytes() == tsv(split, count, "new")


def test_a_login_page_does_not_replace_what_has_come_already(server: Server, data_dir: Path) -> None:
    server.files["RTE.zip"] = rte()
    half = run_until_the_middle(data_dir, server)
    server.files["RTE.zip"], server.content_type, server.ranges = b"<html>please log in</html>", "text/html", False
    assert "got a web page" in refused(run(data_dir, server))
    assert (data_dir / "RTE.zip.part").read_bytes() == rte()[:half]


def test_without_an_answer_the_manual_way_is_told_and_works(server: Server, data_dir: Path) -> None:
    server.status = 404
    server.files["RTE.zip"] = rte()
    line = refused(run(data_dir, server))
    assert "the server answered 404" in line and "by hand: fetch https://" in line
    assert names(data_dir) == []
    with socket.socket() as nobody:  # bound and not listening: nobody else gets this port, and it refuses
        nobody.bind(("127.0.0.1", 0))
        line = refused(run(data_dir, f"http://127.0.0.1:{nobody.getsockname()[1]}"))
    assert "expected an address that starts with http:// or" in refused(run(data_dir, "ftp://example.org"))
    assert "cannot reach" in line and f"save it as {data_dir}/RTE.zip and run the same command again" in line

    (data_dir / "RTE.zip").write_bytes(rte())
    assert run(data_dir, server).returncode == 0
    assert names(data_dir) == sorted(["RTE.zip", *COMPLETE])


def test_a_finished_task_is_downloaded_again_only_with_force(server: Server, data_dir: Path) -> None:
    server.files["RTE.zip"] = rte("old")
    done = run(data_dir, server)
    assert done.returncode == 0 and "train 2,490, dev 277, test 3,000 rows" in done.stdout
    assert "RTE.zip: 100%" in done.stderr and "warning" not in done.stderr
    (data_dir / "RTE" / "notes.txt").write_text("mine")
    server.files["RTE.zip"] = rte("new")
    server.log.clear()

    assert "is complete" in run(data_dir, server).stdout
    assert server.log == []
    assert (data_dir / "RTE/dev.tsv").read_bytes() == tsv("dev", 277, "old")

    assert run(data_dir, server, "--force").returncode == 0
    assert (data_dir / "RTE/dev.tsv").read_bytes() == tsv("dev", 277, "new")
    assert names(data_dir) == sorted([*COMPLETE, "RTE/notes.txt"])
