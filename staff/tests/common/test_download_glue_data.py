"""The downloader against a real HTTP server: whole files, files cut off, wrong ones and none; MRPC from its parts."""

import contextlib
import functools
import hashlib
import io
import socket
import sys
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from unittest import mock

import pytest

import download_glue_data
from common.errors import InputError, exit_on_input_error

PAIRS = {"train": 2_490, "dev": 277, "test": 3_000}
COMPLETE = ["RTE/dev.tsv", "RTE/test.tsv", "RTE/train.tsv"]


class Server(ThreadingHTTPServer):
    """Serves `files` by the last part of the address, and counts the questions."""

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


def run(data_dir: Path, mirror: str, *arguments: str) -> tuple[int, str, str]:
    """Run the downloader in this process: its exit code, and what it printed."""
    words, code = ["download_glue_data.py", "--data_dir", str(data_dir), "--mirror", mirror, *arguments], 0
    out, err = io.StringIO(), io.StringIO()
    with mock.patch.object(sys, "argv", words), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            exit_on_input_error(download_glue_data.main)
        except SystemExit as end:
            code = int(end.code or 0)
    return code, out.getvalue(), err.getvalue()


def refused(data_dir: Path, mirror: str, *arguments: str) -> str:
    """The one line that explains why the run stopped."""
    code, _, err = run(data_dir, mirror, *arguments)
    line = err.splitlines()[-1]
    assert code == 2 and "Traceback" not in err and line.startswith("error: "), err
    return line


def names(folder: Path) -> list[str]:
    """All files below `folder`, and its empty folders."""
    paths = (path for path in folder.rglob("*") if path.is_file() or not any(path.iterdir()))
    return sorted(str(path.relative_to(folder)) for path in paths)


def test_a_finished_task_is_downloaded_again_only_with_force(server: Server, data_dir: Path) -> None:
    server.files["RTE.zip"] = rte("old")
    code, out, err = run(data_dir, server.url)
    assert code == 0 and "train 2,490, dev 277, test 3,000 rows" in out
    assert "RTE.zip: 100%" in err and "warning" not in err
    (data_dir / "RTE" / "notes.txt").write_text("mine")
    server.files["RTE.zip"] = rte("new")

    assert "is complete" in run(data_dir, server.url)[1]
    assert server.asked == 1
    assert (data_dir / "RTE/dev.tsv").read_bytes() == tsv("dev", 277, "old")

    assert run(data_dir, server.url, "--force")[0] == 0
    assert (data_dir / "RTE/dev.tsv").read_bytes() == tsv("dev", 277, "new")
    assert names(data_dir) == sorted([*COMPLETE, "RTE/notes.txt"])
    (data_dir / "RTE" / "dev.tsv").unlink()
    assert "has test.tsv and no dev.tsv: move it away" in refused(data_dir, server.url)


HEADER = "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String\n"
MRPC = {
    "msr_paraphrase_train.txt": HEADER.encode() + b"1\t10\t11\tonly one sentence\n",
    "msr_paraphrase_test.txt": HEADER.encode(), "dev_ids.tsv": b"",
}  # fmt: skip


@pytest.mark.parametrize(("files", "complaint"), [
    ({"RTE.zip": rte()[:-1_000]}, "RTE.zip cannot be unpacked"),
    ({"RTE.zip": rte()[:20_000] + bytes(8) + rte()[20_008:]}, "RTE.zip cannot be unpacked"),
    ({"RTE.zip": b"<html>please log in</html>"}, "RTE.zip cannot be unpacked (File is not a zip file)"),
    ({"RTE.zip": archive({"RTE/train.tsv": tsv("train", 3, "")})}, "RTE.zip contains no RTE/dev.tsv"),
    (MRPC, "msr_paraphrase_train.txt, line 2: expected 5 columns, got 4"),
    (MRPC, "the connection broke"),
], ids=["truncated", "changed", "html", "without dev", "broken row", "broken connection"])  # fmt: skip
def test_what_is_wrong_is_refused_and_nothing_of_it_kept(
    server: Server, data_dir: Path, files: dict[str, bytes], complaint: str
) -> None:
    server.files = files
    server.send_at_most = 9 if "connection" in complaint else None

    assert complaint in refused(data_dir, server.url, "--tasks", "MRPC" if "dev_ids.tsv" in files else "rte")
    assert names(data_dir) == []


def test_without_an_answer_the_manual_way_is_told_and_works(server: Server, data_dir: Path) -> None:
    line = refused(data_dir, server.url)
    assert "the server answered 404" in line and "by hand: fetch https://" in line
    with socket.socket() as nobody:  # bound and not listening: nobody else gets this port, and it refuses
        nobody.bind(("127.0.0.1", 0))
        line = refused(data_dir, f"http://127.0.0.1:{nobody.getsockname()[1]}")
    assert "cannot reach" in line and f"save it as {data_dir}/RTE.zip and run the same command again" in line
    assert "expected an address that starts with http:// or" in refused(data_dir, "ftp://example.org")
    assert "expected all or names out of CoLA,SST-2" in refused(data_dir, server.url, "--tasks", "RTX")

    (data_dir / "RTE.zip").write_bytes(rte())
    assert run(data_dir, server.url)[0] == 0
    assert names(data_dir) == sorted(["RTE.zip", *COMPLETE])


def test_a_file_from_the_published_address_must_have_its_sum(server: Server, data_dir: Path) -> None:
    server.files["QNLIv2.zip"] = archive({f"QNLI/{split}.tsv": tsv(split, 3, "") for split in PAIRS})
    published = hashlib.sha256(server.files["QNLIv2.zip"]).hexdigest()
    data_dir.mkdir()
    with mock.patch.object(download_glue_data, "HOST", server.url):
        with pytest.raises(InputError, match="is not the published file"):
            download_glue_data.install("QNLI", data_dir, None, force=False)
        assert names(data_dir) == []
        with mock.patch.dict(download_glue_data.SHA256, {"QNLI.zip": published}):
            download_glue_data.install("QNLI", data_dir, None, force=False)
    assert names(data_dir) == ["QNLI/dev.tsv", "QNLI/test.tsv", "QNLI/train.tsv"]


def test_a_mirror_may_have_fewer_rows_and_no_test_file_but_that_is_said(server: Server, data_dir: Path) -> None:
    server.files["RTE.zip"] = rte()
    train, dev = b"gj04\t1\t\tA row.\n" * 8_550, b"x\n" * 1_043  # no header: 1,043 lines are 1,043 rows
    server.files["CoLA.zip"] = archive({"CoLA/train.tsv": train, "CoLA/dev.tsv": dev})
    code, _, err = run(data_dir, server.url, "--tasks", "cola,RTE")
    assert code == 0 and "CoLA/dev.tsv" not in err
    assert "warning: CoLA/train.tsv has 8,550 rows, GLUE's has 8,551" in err
    assert names(data_dir) == ["CoLA/dev.tsv", "CoLA/train.tsv", *COMPLETE]


def test_mrpc_is_assembled_from_its_parts(server: Server, data_dir: Path) -> None:
    mark = "\N{BYTE ORDER MARK}"
    rows = ['1\t10\t11\t" An open quote\tSaid " no one\n', "0\t20\t21\tÉté\tsummer \n", "1\t30\t31\tlast\tline"]
    server.files["msr_paraphrase_train.txt"] = (mark + HEADER + "".join(rows)).encode()
    server.files["msr_paraphrase_test.txt"] = (mark + HEADER + '1\t40\t41\t"a\tb\n0\t50\t51\tc\td').encode()
    server.files["dev_ids.tsv"] = b"20\t21\n99\t98\n"

    assert run(data_dir, server.url, "--tasks", "MRPC")[0] == 0
    for split, text in {
        "train": mark + HEADER + rows[0] + rows[2] + "\n",
        "dev": mark + HEADER + rows[1],
        "test": "index\t#1 ID\t#2 ID\t#1 String\t#2 String\n" + '0\t40\t41\t"a\tb\n1\t50\t51\tc\td\n',
    }.items():
        assert (data_dir / f"MRPC/{split}.tsv").read_text("utf-8") == text
    assert names(data_dir) == sorted(f"MRPC/{name}" for name in [*server.files, "train.tsv", "dev.tsv", "test.tsv"])
