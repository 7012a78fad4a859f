"""The downloader against a real HTTP server: complete, resumed, cut, changed, interrupted, refused, twice at once."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import download_glue_data
from tests.own.glue_server import COMPLETE, PAIRS, Server, command, names, refused, rte, run, running_server, tsv

pytestmark = pytest.mark.medium


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setenv("COS598D_CACHE", str(tmp_path / "cache"))
    with running_server() as server:
        yield server


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    return tmp_path / "glue_data"


def run_until_the_middle(data_dir: Path, server: Server) -> int:
    """Leave a first half of RTE.zip behind, as a broken connection does; returns its length."""
    half = server.send_at_most = len(server.files["RTE.zip"]) // 2
    assert run(data_dir, server).returncode == 2
    assert (data_dir / "RTE.zip.part").stat().st_size == half
    server.send_at_most = None
    server.log.clear()
    return half


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "what the test waits for did not happen"
        time.sleep(0.005)


def test_a_task_is_downloaded_and_unpacked(server: Server, data_dir: Path) -> None:
    server.files["RTE.zip"] = rte()
    done = run(data_dir, server)
    assert done.returncode == 0, done.stderr
    assert names(data_dir) == COMPLETE
    assert (data_dir / "RTE/train.tsv").read_bytes() == tsv("train", 2_490, "old")
    assert "train 2,490, dev 277, test 3,000 rows" in done.stdout
    assert "RTE.zip: 100%" in done.stderr  # the progress bar
    assert "warning" not in done.stderr


def test_a_broken_download_goes_on_where_it_stopped(server: Server, data_dir: Path) -> None:
    server.files["RTE.zip"] = rte()
    half = run_until_the_middle(data_dir, server)
    assert run(data_dir, server).returncode == 0
    assert server.log == [(f"bytes={half}-", len(rte()) - half)]  # only the rest was sent
    assert names(data_dir) == COMPLETE


def test_a_connection_that_breaks_leaves_only_the_part(server: Server, data_dir: Path) -> None:
    server.files["RTE.zip"] = rte()
    server.send_at_most = 1_000
    line = refused(run(data_dir, server))
    assert "the connection broke" in line
    assert "run this again to continue" in line
    assert names(data_dir) == ["RTE.zip.part"]


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
        wait_until(lambda: part.exists() and part.stat().st_size == server.send_at_most)
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
        wait_until(lambda: holds_a_lock_file_open(second.pid) or len(server.log) > 1)
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
    [PAIRS, PAIRS | {"train": 2_600}, {"train": 10, "dev": 10, "test": 10}],
    ids=["same numbers of rows", "longer", "shorter than what is there"],
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


def test_a_run_interrupted_after_the_last_byte_does_not_download_again(server: Server, data_dir: Path) -> None:
    server.files["RTE.zip"] = rte()
    data_dir.mkdir()
    (data_dir / "RTE.zip.part").write_bytes(rte())
    assert run(data_dir, server).returncode == 0
    assert sum(sent for _, sent in server.log) == 0
    assert names(data_dir) == COMPLETE


def test_a_login_page_does_not_replace_what_has_come_already(server: Server, data_dir: Path) -> None:
    server.files["RTE.zip"] = rte()
    half = run_until_the_middle(data_dir, server)
    server.files["RTE.zip"], server.content_type, server.ranges = b"<html>please log in</html>", "text/html", False
    assert "got a web page" in refused(run(data_dir, server))
    assert (data_dir / "RTE.zip.part").read_bytes() == rte()[:half]


@pytest.mark.parametrize("status", [404, 503])
def test_a_refusal_of_the_server_is_told_with_the_manual_way(server: Server, data_dir: Path, status: int) -> None:
    server.status = status
    server.files["RTE.zip"] = rte()
    line = refused(run(data_dir, server))
    assert f"the server answered {status}" in line
    assert "by hand: fetch https://" in line
    assert names(data_dir) == []


def test_without_a_server_the_manual_way_is_told_and_works(server: Server, data_dir: Path) -> None:
    with socket.socket() as nobody:  # bound and not listening: nobody else gets this port, and it refuses
        nobody.bind(("127.0.0.1", 0))
        line = refused(run(data_dir, f"http://127.0.0.1:{nobody.getsockname()[1]}"))
    assert "cannot reach" in line
    assert f"save it as {data_dir}/RTE.zip and run the same command again" in line

    (data_dir / "RTE.zip").write_bytes(rte())
    assert subprocess.run(command(data_dir), check=False).returncode == 0
    assert names(data_dir) == sorted(["RTE.zip", *COMPLETE])


def test_a_finished_task_is_downloaded_again_only_with_force(server: Server, data_dir: Path) -> None:
    server.files["RTE.zip"] = rte("old")
    assert run(data_dir, server).returncode == 0
    (data_dir / "RTE" / "notes.txt").write_text("mine")
    server.files["RTE.zip"] = rte("new")
    server.log.clear()

    assert "is complete" in run(data_dir, server).stdout
    assert server.log == []
    assert (data_dir / "RTE/dev.tsv").read_bytes() == tsv("dev", 277, "old")

    assert run(data_dir, server, "--force").returncode == 0
    assert (data_dir / "RTE/dev.tsv").read_bytes() == tsv("dev", 277, "new")
    assert names(data_dir) == sorted([*COMPLETE, "RTE/notes.txt"])


def test_a_folder_that_holds_only_some_of_the_files_is_left_alone(server: Server, data_dir: Path) -> None:
    server.files["RTE.zip"] = rte()
    (data_dir / "RTE").mkdir(parents=True)
    (data_dir / "RTE" / "train.tsv").write_text("mine")
    assert "has train.tsv and no dev.tsv: move it away" in refused(run(data_dir, server))
    assert (data_dir / "RTE" / "train.tsv").read_text() == "mine"
    assert server.log == []


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        (["--tasks", "RTE,SQuAD"], "--tasks: expected all or names out of CoLA,SST-2,MRPC"),
        (["--mirror", "ftp://example.org"], "--mirror: expected an address that starts with http:// or https://"),
    ],
)
def test_a_wrong_flag_is_told_in_one_line(data_dir: Path, arguments: list[str], complaint: str) -> None:
    done = subprocess.run(command(data_dir, *arguments), capture_output=True, text=True, check=False)
    assert complaint in refused(done)
    assert len(done.stderr.splitlines()) == 1
    assert not data_dir.exists()


def test_a_data_dir_that_is_a_file_is_told_in_one_line(server: Server, data_dir: Path) -> None:
    data_dir.write_text("mine")
    assert f"cannot write {data_dir}" in refused(run(data_dir, server))
    assert data_dir.read_text() == "mine"


def test_help_documents_what_a_mirror_must_hold(data_dir: Path) -> None:
    text = subprocess.run(command(data_dir, "--help"), capture_output=True, text=True, check=True).stdout
    for name in ("URL/NAME.zip", "NAME/train.tsv", *download_glue_data.MRPC_PARTS):
        assert name in text
