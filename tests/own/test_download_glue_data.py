"""The downloader against a real HTTP server: whole files, files cut off, wrong ones and none; MRPC from its parts."""

import contextlib
import functools
import hashlib
import io
import os
import socket
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
from common.errors import InputError, exit_on_input_error

SHARED_MRPC = Path(os.environ.get("COS598D_DATA", "no-such-folder")) / "glue" / "MRPC"
PAIRS = {"train": 2_490, "dev": 277, "test": 3_000}
COMPLETE = ["RTE/dev.tsv", "RTE/test.tsv", "RTE/train.tsv"]


class Server(ThreadingHTTPServer):
    """Serves `files` by the last part of the address, and counts the questions."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.asked = 0
        self.send_at_most: int | None = None  # then hangs up
        self.url = f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.asked += 1
        content = self.server.files.get(self.path.rsplit("/", 1)[-1])
        if content is None:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[: self.server.send_at_most])

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "*")
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
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
def rte(word: str = "old") -> bytes:
    """RTE.zip with the real task's numbers of rows."""
    return archive({f"RTE/{split}.tsv": tsv(split, count, word) for split, count in PAIRS.items()})


class Done(NamedTuple):
    """The end of a run of the downloader."""

    returncode: int
    stdout: str
    stderr: str


def run(data_dir: Path, mirror: str, *arguments: str) -> Done:
    """Run the downloader in this process."""
    words, code = ["download_glue_data.py", "--data_dir", str(data_dir), "--mirror", mirror, *arguments], 0
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


def test_a_finished_task_is_downloaded_again_only_with_force(server: Server, data_dir: Path) -> None:
    server.files["RTE.zip"] = rte("old")
    done = run(data_dir, server.url)
    assert done.returncode == 0 and "train 2,490, dev 277, test 3,000 rows" in done.stdout
    assert "RTE.zip: 100%" in done.stderr and "warning" not in done.stderr
    (data_dir / "RTE" / "notes.txt").write_text("mine")
    server.files["RTE.zip"] = rte("new")

    assert "is complete" in run(data_dir, server.url).stdout
    assert server.asked == 1
    assert (data_dir / "RTE/dev.tsv").read_bytes() == tsv("dev", 277, "old")

    assert run(data_dir, server.url, "--force").returncode == 0
    assert (data_dir / "RTE/dev.tsv").read_bytes() == tsv("dev", 277, "new")
    assert names(data_dir) == sorted([*COMPLETE, "RTE/notes.txt"])
    (data_dir / "RTE" / "dev.tsv").unlink()
    assert "has test.tsv and no dev.tsv: move it away" in refused(run(data_dir, server.url))


def test_a_download_that_breaks_leaves_nothing_behind(server: Server, data_dir: Path) -> None:
    server.files["RTE.zip"] = rte()
    server.send_at_most = len(rte()) // 2
    assert "the connection broke" in refused(run(data_dir, server.url))
    assert names(data_dir) == []


def test_without_an_answer_the_manual_way_is_told_and_works(server: Server, data_dir: Path) -> None:
    line = refused(run(data_dir, server.url))
    assert "the server answered 404" in line and "by hand: fetch https://" in line
    with socket.socket() as nobody:  # bound and not listening: nobody else gets this port, and it refuses
        nobody.bind(("127.0.0.1", 0))
        line = refused(run(data_dir, f"http://127.0.0.1:{nobody.getsockname()[1]}"))
    assert "cannot reach" in line and f"save it as {data_dir}/RTE.zip and run the same command again" in line
    assert "expected an address that starts with http:// or" in refused(run(data_dir, "ftp://example.org"))

    (data_dir / "RTE.zip").write_bytes(rte())
    assert run(data_dir, server.url).returncode == 0
    assert names(data_dir) == sorted(["RTE.zip", *COMPLETE])


@pytest.mark.parametrize(
    "content, complaint",
    [
        (rte()[:-1_000], "RTE.zip cannot be unpacked"),
        (rte()[:20_000] + bytes(8) + rte()[20_008:], "RTE.zip cannot be unpacked"),
        (b"<html>please log in</html>", "RTE.zip cannot be unpacked (File is not a zip file)"),
        (archive({"RTE/train.tsv": tsv("train", 3, "")}), "RTE.zip contains no RTE/dev.tsv"),
    ],
    ids=["truncated", "changed", "html", "without dev"],
)
def test_wrong_content_is_refused_and_not_kept(server: Server, data_dir: Path, content: bytes, complaint: str) -> None:
    server.files["RTE.zip"] = content
    assert complaint in refused(run(data_dir, server.url))
    assert names(data_dir) == []


def test_a_file_from_the_published_address_must_have_its_sum(
    server: Server, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download_glue_data, "HOST", server.url)
    server.files["QNLIv2.zip"] = archive({f"QNLI/{split}.tsv": tsv(split, 3, "") for split in PAIRS})
    data_dir.mkdir()
    with pytest.raises(InputError, match="is not the published file"):
        download_glue_data.install("QNLI", data_dir, None, force=False)
    assert names(data_dir) == []

    published = hashlib.sha256(server.files["QNLIv2.zip"]).hexdigest()
    monkeypatch.setitem(download_glue_data.SHA256, "QNLI.zip", published)
    download_glue_data.install("QNLI", data_dir, None, force=False)
    assert names(data_dir) == ["QNLI/dev.tsv", "QNLI/test.tsv", "QNLI/train.tsv"]


def test_a_mirror_may_have_fewer_rows_and_no_test_file_but_that_is_said(server: Server, data_dir: Path) -> None:
    server.files["RTE.zip"] = rte()
    server.files["CoLA.zip"] = archive(
        {"CoLA/train.tsv": b"gj04\t1\t\tA row.\n" * 8_550, "CoLA/dev.tsv": b"x\n" * 1_043}
    )
    done = run(data_dir, server.url, "--tasks", "cola,RTE")
    assert done.returncode == 0
    assert "warning: CoLA/train.tsv has 8,550 rows, GLUE's has 8,551" in done.stderr
    assert "CoLA/dev.tsv" not in done.stderr  # no header there: 1,043 lines are 1,043 rows
    assert names(data_dir) == ["CoLA/dev.tsv", "CoLA/train.tsv", *COMPLETE]


BOM = "\N{BYTE ORDER MARK}"
HEADER = "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String\n"


def test_mrpc_is_assembled_from_its_parts(server: Server, data_dir: Path) -> None:
    rows = ['1\t10\t11\t" An open quote\tSaid " no one\n', "0\t20\t21\tÉté\tsummer \n", "1\t30\t31\tlast\tline"]
    server.files["msr_paraphrase_train.txt"] = (BOM + HEADER + "".join(rows)).encode()
    server.files["msr_paraphrase_test.txt"] = (BOM + HEADER + '1\t40\t41\t"a\tb\n0\t50\t51\tc\td').encode()
    server.files["dev_ids.tsv"] = b"20\t21\n99\t98\n"
    done = run(data_dir, server.url, "--tasks", "MRPC")
    assert done.returncode == 0, done.stderr
    folder = data_dir / "MRPC"
    assert (folder / "train.tsv").read_text("utf-8") == BOM + HEADER + rows[0] + rows[2] + "\n"
    assert (folder / "dev.tsv").read_text("utf-8") == BOM + HEADER + rows[1]
    assert (folder / "test.tsv").read_text("utf-8") == (
        "index\t#1 ID\t#2 ID\t#1 String\t#2 String\n" + '0\t40\t41\t"a\tb\n1\t50\t51\tc\td\n'
    )
    assert names(data_dir) == sorted(f"MRPC/{name}" for name in [*server.files, "train.tsv", "dev.tsv", "test.tsv"])


def test_a_broken_row_of_mrpc_is_named_and_nothing_is_installed(server: Server, data_dir: Path) -> None:
    server.files["msr_paraphrase_train.txt"] = HEADER.encode() + b"1\t10\t11\tonly one sentence\n"
    server.files["msr_paraphrase_test.txt"] = HEADER.encode()
    server.files["dev_ids.tsv"] = b""
    line = refused(run(data_dir, server.url, "--tasks", "MRPC"))
    assert "msr_paraphrase_train.txt, line 2: expected 5 columns, got 4" in line
    assert not (data_dir / "MRPC").exists()


@pytest.mark.skipif(not SHARED_MRPC.is_dir(), reason="needs the real MRPC files: set COS598D_DATA")
def test_the_real_mrpc_parts_give_the_real_files(tmp_path: Path) -> None:
    download_glue_data.assemble_mrpc([SHARED_MRPC / name for name in download_glue_data.MRPC_PARTS], tmp_path)
    for name in ("dev.tsv", "test.tsv"):
        assert (tmp_path / name).read_bytes() == (SHARED_MRPC / name).read_bytes()
    ours = (tmp_path / "train.tsv").read_bytes().splitlines(keepends=True)
    (left_out,) = [line for line in ours if line.startswith(b"1\t2750203\t2750153\t")]
    ours.remove(left_out)
    assert b"".join(ours) == (SHARED_MRPC / "train.tsv").read_bytes()
