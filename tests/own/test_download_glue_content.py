"""What the downloader does with what came: checks, unpacking, row counts, and MRPC assembled from its parts."""

import hashlib
import os
from pathlib import Path

import pytest

import download_glue_data
from common.errors import InputError
from tests.own import glue_server
from tests.own.glue_server import COMPLETE, PAIRS, Server, archive, names, refused, rte, run, tsv

SHARED_MRPC = Path(os.environ.get("COS598D_DATA", "no-such-folder")) / "glue" / "MRPC"


server, data_dir = glue_server.server, glue_server.data_dir  # fixtures


@pytest.mark.parametrize(
    "content, complaint",
    [
        (rte()[:-1_000], "cannot be unpacked"),
        (b"<html>please log in</html>", "cannot be unpacked (File is not a zip file)"),
        (archive({"RTE/train.tsv": tsv("train", 3, "")}), "contains no RTE/dev.tsv"),
        (archive({"RTE/train.tsv": b"", "RTE/dev.tsv": b"", "../evil.tsv": b""}), "contains a path outside of itself"),
    ],
    ids=["truncated", "html", "without dev", "parent folder"],
)
def test_wrong_content_is_refused_and_not_kept(server: Server, data_dir: Path, content: bytes, complaint: str) -> None:
    server.files["RTE.zip"] = content
    line = refused(run(data_dir, server))
    assert complaint in line
    assert f"{server.url}/RTE.zip" in line
    assert all(name.startswith("cache/") or name == "glue_data" for name in names(data_dir.parent))


def test_an_archive_that_would_unpack_to_too_much_is_refused(
    server: Server, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download_glue_data, "LARGEST_TASK", 100_000)
    server.files["RTE.zip"] = rte()
    data_dir.mkdir()
    with pytest.raises(InputError, match=r"would unpack to [0-9,]+ bytes, more than 100,000"):
        download_glue_data.install("RTE", data_dir, server.url, force=False)
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
    done = run(data_dir, server, "--tasks", "cola,RTE")
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
    data_dir.mkdir()
    (data_dir / "dev_ids.tsv.part").write_bytes(b"10\t11")  # of an earlier version: without a known sum, not resumed
    done = run(data_dir, server, "--tasks", "MRPC")
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
    line = refused(run(data_dir, server, "--tasks", "MRPC"))
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
