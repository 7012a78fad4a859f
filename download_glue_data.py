"""Download GLUE tasks: `python download_glue_data.py --data_dir glue_data` brings RTE, --tasks brings others.

A file is downloaded, checked and unpacked in a hidden folder; then the task's folder gets its name in one step. So a
folder with its final name is complete.

SHA256 has the sums of the published files as two public dataset libraries record them (huggingface/datasets and
tensorflow/datasets); a file from the published address must have its sum. A mirror may serve repacked archives, or
fewer rows on purpose. There, only the archive's own CRCs must match; a different sum is a note, and a different number
of rows is a warning.
"""

import common.workers.environment  # isort: skip  # noqa: F401 (stops with a message if torch is missing)

import argparse
import hashlib
import http.client
import os
import shutil
import sys
import tempfile
import urllib.error
import urllib.request
import zipfile
import zlib
from pathlib import Path

from tqdm import tqdm

from common.errors import InputError, exit_on_input_error

HOST = "https://dl.fbaipublicfiles.com"
TIMEOUT = 30.0  # seconds without a byte until the connection counts as broken

MRPC_PARTS = ("msr_paraphrase_train.txt", "msr_paraphrase_test.txt", "dev_ids.tsv")
SHA256 = {
    "CoLA.zip": "f212fcd832b8f7b435fb991f101abf89f96b933ab400603bf198960dfc32cbff",
    "SST-2.zip": "d67e16fb55739c1b32cdce9877596db1c127dc322d93c082281f64057c16deaa",
    "STS-B.zip": "e60a6393de5a8b5b9bac5020a1554b54e3691f9d600b775bd131e613ac179c85",
    "QQP.zip": "40e7c862c04eb26ee04b67fd900e76c45c6ba8e6d8fab4f8f1f8072a1a3fbae0",
    "MNLI.zip": "e7c1d896d26ed6caf700110645df426cc2d8ebf02a5ab743d5a5c68ac1c83633",
    "QNLI.zip": "e634e78627a29adaecd4f955359b22bf5e70f2cbd93b493f2d624138a0c0e5f5",
    "RTE.zip": "6bf86de103ecd335f3441bd43574d23fef87ecc695977a63b82d5efb206556ee",
    "WNLI.zip": "ae0e8e4d16f4d46d4a0a566ec7ecceccfd3fbfaa4a7a4b4e02848c0f2561ac46",
    "msr_paraphrase_train.txt": "60a9b09084528f0673eedee2b69cb941920f0b8cd0eeccefc464a98768457f89",
    "msr_paraphrase_test.txt": "a04e271090879aaba6423d65b94950c089298587d9c084bf9cd7439bd785f784",
    "dev_ids.tsv": "971d7767d81b997fd9060ade0ec23c4fc31cbb226a55d1bd4a1bac474eb81dc7",
}
PUBLISHED_AS = {  # the other files are at HOST/glue/data/NAME
    "QQP.zip": "glue/data/QQP-clean.zip",
    "QNLI.zip": "glue/data/QNLIv2.zip",
    "msr_paraphrase_train.txt": "senteval/senteval_data/msr_paraphrase_train.txt",
    "msr_paraphrase_test.txt": "senteval/senteval_data/msr_paraphrase_test.txt",
    "dev_ids.tsv": "glue/data/mrpc_dev_ids.tsv",
}
ROWS = {  # without the header
    "CoLA": {"train": 8_551, "dev": 1_043, "test": 1_063},
    "SST-2": {"train": 67_349, "dev": 872, "test": 1_821},
    "MRPC": {"train": 3_668, "dev": 408, "test": 1_725},
    "STS-B": {"train": 5_749, "dev": 1_500, "test": 1_379},
    "QQP": {"train": 363_846, "dev": 40_430, "test": 390_965},
    "MNLI": {"train": 392_702, "dev_matched": 9_815, "dev_mismatched": 9_832}
    | {"test_matched": 9_796, "test_mismatched": 9_847},
    "QNLI": {"train": 104_743, "dev": 5_463, "test": 5_463},
    "RTE": {"train": 2_490, "dev": 277, "test": 3_000},
    "WNLI": {"train": 635, "dev": 71, "test": 146},
}
# Test files have no labels: nobody trains or evaluates on them, and a mirror may leave them out.
NEEDED = {task: {split for split in rows if not split.startswith("test")} for task, rows in ROWS.items()}
MIRROR_LAYOUT = """what must lie under --mirror URL:
  URL/NAME.zip with NAME/train.tsv, NAME/dev.tsv and, if wanted, NAME/test.tsv inside
  (MNLI: train, dev_matched, dev_mismatched, test_matched, test_mismatched);
  for MRPC its three parts: URL/msr_paraphrase_train.txt, URL/msr_paraphrase_test.txt, URL/dev_ids.tsv
by hand, where this machine has no network:
  fetch NAME.zip (or the three parts) elsewhere, put it into --data_dir, run the same command again"""


def download(url: str, file: Path) -> None:
    """Download `url` into `file`. Raises InputError if there is no such file or the connection broke."""
    try:
        with (
            urllib.request.urlopen(url, timeout=TIMEOUT) as response,
            open(file, "wb") as target,
            tqdm.wrapattr(response, "read", total=response.length, desc=file.name) as source,
        ):
            shutil.copyfileobj(source, target)
            if response.length:  # bytes that were announced and have not come
                raise InputError(f"{url}: the connection broke")
    except urllib.error.HTTPError as error:
        error.close()
        raise InputError(f"{url}: the server answered {error.code} {error.reason}") from error
    except (urllib.error.URLError, TimeoutError, ConnectionError, http.client.HTTPException) as error:
        raise InputError(f"cannot reach {url} ({getattr(error, 'reason', error)})") from error


def obtain(name: str, data_dir: Path, mirror: str | None, scratch: Path) -> Path:
    """The path of `name`: in `data_dir` if the user put it there, else in `scratch`, downloaded.

    Raises InputError if what comes from the published address is not the published file.
    """
    by_hand, file = data_dir / name, scratch / name
    published = f"{HOST}/{PUBLISHED_AS.get(name, f'glue/data/{name}')}"
    if not by_hand.exists():
        try:
            download(f"{mirror.rstrip('/')}/{name}" if mirror else published, file)
        except InputError as error:
            advice = f"by hand: fetch {published}, save it as {by_hand} and run the same command again, or see --mirror"
            raise InputError(f"{error}; {advice}") from error
    path = by_hand if by_hand.exists() else file
    with path.open("rb") as opened:
        is_published = hashlib.file_digest(opened, "sha256").hexdigest() == SHA256[name]
    if path == file and not mirror and not is_published:
        raise InputError(f"{published}: is not the published file (its sha256 differs); try again, or see --mirror")
    if not is_published:
        print(f"note: {name} is not byte for byte the published file", file=sys.stderr)
    return path


def unpack(path: Path, task: str, folder: Path) -> None:
    """Write the task's TSV files into `folder`, under no name that comes from the archive. Raises InputError."""
    try:
        with zipfile.ZipFile(path) as archive:
            there = set(archive.namelist())
            splits = [split for split in ROWS[task] if f"{task}/{split}.tsv" in there]
            if missing := NEEDED[task] - set(splits):
                raise InputError(f"{path.name} contains no {task}/{min(missing)}.tsv, which is required")
            for split in splits:
                with archive.open(f"{task}/{split}.tsv") as source, open(folder / f"{split}.tsv", "wb") as file:
                    shutil.copyfileobj(source, file)  # compares the CRC
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, UnicodeDecodeError) as error:
        raise InputError(f"{path.name} cannot be unpacked ({error}) and must be downloaded again") from error


def assemble_mrpc(parts: list[Path], folder: Path) -> None:
    """Split Microsoft's train file into GLUE's train and dev by the list of dev ids; take the labels off its test file.

    Rows are copied as bytes, not parsed as CSV: their quotes are not balanced. The byte order mark stays at the head of
    train.tsv and dev.tsv, as in GLUE's own. All 3,668 train rows are kept; some copies lack one (2750203, 2750153).
    """
    texts = [part.read_bytes() for part in parts]
    train, test, dev_ids = (text.splitlines() for text in texts)
    for name, lines in zip(MRPC_PARTS, (train, test), strict=False):
        for number, line in enumerate(lines or [b""], start=1):
            if (columns := line.count(b"\t") + 1) != 5:
                raise InputError(f"{name}, line {number}: expected 5 columns, got {columns}; download it again")
    ids = {tuple(line.split(b"\t")) for line in dev_ids}
    header, *rows = train
    is_dev = [tuple(row.split(b"\t")[1:3]) in ids for row in rows]
    without_label = [line.split(b"\t", 1)[1] for line in test]
    for name, text in zip(MRPC_PARTS, texts, strict=True):
        (folder / name).write_bytes(text)
    for split, lines in {
        "train": [header] + [row for row, dev in zip(rows, is_dev, strict=True) if not dev],
        "dev": [header] + [row for row, dev in zip(rows, is_dev, strict=True) if dev],
        "test": [b"index\t" + without_label[0]] + [b"%d\t%s" % pair for pair in enumerate(without_label[1:])],
    }.items():
        (folder / f"{split}.tsv").write_bytes(b"\n".join(lines) + b"\n")


def install(task: str, data_dir: Path, mirror: str | None, force: bool) -> None:
    """Put the finished task into `data_dir`/`task`, unless it is there already."""
    folder = data_dir / task
    there = {split for split in ROWS[task] if (folder / f"{split}.tsv").exists()}
    missing = NEEDED[task] - there
    if not force and there and missing:
        raise InputError(f"{folder} has {min(there)}.tsv and no {min(missing)}.tsv: move it away, or use --force")
    if not force and not missing:
        print(f"{folder} is complete (--force downloads it again)")
        return
    with tempfile.TemporaryDirectory(prefix=f".{task}-", dir=data_dir) as scratch:
        names = MRPC_PARTS if task == "MRPC" else (f"{task}.zip",)
        files = [obtain(name, data_dir, mirror, Path(scratch)) for name in names]
        staged = Path(scratch) / task
        staged.mkdir()
        if task == "MRPC":
            assemble_mrpc(files, staged)
        else:
            unpack(files[0], task, staged)
        counts = count_rows(task, staged)
        if not folder.exists():
            staged.rename(folder)
        else:
            for file in staged.iterdir():
                os.replace(file, folder / file.name)
    print(f"{folder}: {counts} rows; train on it with --task_name {task} --data_dir {folder}")


def count_rows(task: str, folder: Path) -> str:
    """The rows of each split in words; warns where they are not GLUE's."""
    counts = []
    for split, expected in ROWS[task].items():
        if not (path := folder / f"{split}.tsv").exists():
            continue
        with path.open("rb") as file:
            rows = sum(1 for _ in file) - (task != "CoLA" or split == "test")  # CoLA's train and dev have no header
        if not expected <= rows <= expected + (3 if task == "QQP" else 0):  # QQP is found with 363,849 too
            print(f"warning: {task}/{split}.tsv has {rows:,} rows, GLUE's has {expected:,}", file=sys.stderr)
        counts.append(f"{split} {rows:,}")
    return ", ".join(counts)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Download GLUE tasks.", epilog=MIRROR_LAYOUT, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data_dir", type=Path, default=Path("glue_data"), help="folder for the data, with one folder per task"
    )
    parser.add_argument("--tasks", default="RTE", help=f"all, or names separated by commas: {','.join(ROWS)}")
    parser.add_argument("--mirror", metavar="URL", help="download from here instead of the published addresses")
    parser.add_argument("--force", action="store_true", help="download a finished task again and replace its files")
    config = parser.parse_args()
    known = {task.lower(): task for task in ROWS}
    names = list(known) if config.tasks == "all" else [name.strip().lower() for name in config.tasks.split(",")]
    if unknown := [name for name in names if name not in known]:
        raise InputError(f"--tasks: expected all or names out of {','.join(ROWS)}, got {unknown[0]!r}")
    config.tasks = [known[name] for name in names]
    if config.mirror and not config.mirror.startswith(("http://", "https://")):
        raise InputError(f"--mirror: expected an address that starts with http:// or https://, got {config.mirror!r}")
    return config


def main() -> None:
    config = parse_arguments()
    try:
        config.data_dir.mkdir(parents=True, exist_ok=True)
        for task in config.tasks:
            install(task, config.data_dir, config.mirror, config.force)
    except KeyboardInterrupt:
        sys.exit(130)
    except OSError as error:
        raise InputError(f"cannot write {error.filename or config.data_dir}: {error.strerror}") from error


if __name__ == "__main__":
    exit_on_input_error(main)
