"""The fixture `server`, which can resume, cut, stall or refuse a file; RTE archives for it to serve; and a run."""

import contextlib
import functools
import hashlib
import io
import sys
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest

import download_glue_data
from common.errors import exit_on_input_error

SCRIPT = Path(download_glue_data.__file__)
PAIRS = {"train": 2_490, "dev": 277, "test": 3_000}
COMPLETE = ["RTE/dev.tsv", "RTE/test.tsv", "RTE/train.tsv"]


class Server(ThreadingHTTPServer):
    """Serves `files` by the last part of the address, keeps a log of (Range header, bytes sent), and misbehaves."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.log: list[tuple[str | None, int]] = []
        self.status = 200
        self.content_type = "application/zip"
        self.ranges = True  # understands the Range header
        self.send_at_most: int | None = None  # then hangs up, or first waits for go_on
        self.go_on: threading.Event | None = None
        self.url = f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        asked = self.headers.get("Range")
        content = self.server.files.get(self.path.rsplit("/", 1)[-1])
        if content is None or self.server.status != 200:
            self.send_error(404 if content is None else self.server.status)
            self.server.log.append((asked, 0))
            return
        start = int(asked.removeprefix("bytes=").removesuffix("-")) if asked and self.server.ranges else 0
        if start and start >= len(content):
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(content)}")
            self.end_headers()
            self.server.log.append((asked, 0))
            return
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Type", self.server.content_type)
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        body = content[start:][: self.server.send_at_most]
        self.wfile.write(body)
        self.server.log.append((asked, len(body)))
        if self.server.go_on:
            self.server.go_on.wait(60)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Server]:
    """A running server, and an empty cache."""
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setenv("COS598D_CACHE", str(tmp_path / "cache"))
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            if server.go_on:
                server.go_on.set()
            server.shutdown()
            thread.join()


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    return tmp_path / "glue_data"


def tsv(split: str, rows: int, word: str) -> bytes:
    """Text in RTE's layout that hardly compresses, so that half of the archive is in the middle of something."""
    words = [hashlib.sha256(f"{word} {split} {row}".encode()).hexdigest() for row in range(rows)]
    return b"index\tsentence1\tsentence2\tlabel\n" + b"".join(
        f"{row}\t{text[:32]}\t{text[32:]}\tentailment\n".encode() for row, text in enumerate(words)
    )


def archive(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in members.items():
            file.writestr(name, content)
    return buffer.getvalue()


@functools.cache
def rte(word: str = "old", **rows: int) -> bytes:
    """RTE.zip with the real task's numbers of rows, or with those given."""
    return archive({f"RTE/{split}.tsv": tsv(split, count, word) for split, count in (PAIRS | rows).items()})


def command(data_dir: Path, *arguments: str) -> list[str]:
    return [sys.executable, str(SCRIPT), "--data_dir", str(data_dir), *arguments]


class Done(NamedTuple):
    """The end of a run of the downloader."""

    returncode: int
    stdout: str
    stderr: str


def run(data_dir: Path, server: Server | str, *arguments: str) -> Done:
    """Run the downloader in this process."""
    url = server if isinstance(server, str) else server.url
    words, code = command(data_dir, "--mirror", url, *arguments)[1:], 0
    out, err = io.StringIO(), io.StringIO()
    with mock.patch.object(sys, "argv", words), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            exit_on_input_error(download_glue_data.main)
        except SystemExit as end:
            code = int(end.code or 0)
    return Done(code, out.getvalue(), err.getvalue())


def names(folder: Path) -> list[str]:
    """All files below `folder`, and its empty folders."""
    paths = (path for path in folder.rglob("*") if path.is_file() or not any(path.iterdir()))
    return sorted(str(path.relative_to(folder)) for path in paths)


def refused(done: Done) -> str:
    """The one line that explains why the run stopped."""
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    line = done.stderr.splitlines()[-1]
    assert line.startswith("error: ")
    return line
