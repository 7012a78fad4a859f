"""Download GLUE tasks: `python download_glue_data.py --data_dir glue_data` brings RTE, --tasks brings others.

A file is NAME.part until it is complete and checked; then it is unpacked in a hidden folder, which is renamed in one
step. So a file with its final name is complete. After an interrupted run, the same command continues where it stopped.

SHA256 has the sums of the published files as two public dataset libraries record them (huggingface/datasets and
tensorflow/datasets); a file from the published address must have its sum. A mirror may serve repacked
archives, or fewer rows on purpose. There, only the archive's own CRCs must match; a different sum is a note, and a
different number of rows is a warning.
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
from pathlib import Path, PurePosixPath

from tqdm import tqdm

from common.errors import InputError, exit_on_input_error
from common.paths import cache_dir, locked

HOST = "https://dl.fbaipublicfiles.com"
CHUNK = 1 << 16  # bytes asked for at once
TIMEOUT = 30.0  # seconds without a byte until the connection counts as broken
LARGEST_TASK = 2 << 30  # bytes a task may have after unpacking

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


class DamagedFileError(InputError):
    """A file is whole by its length, but is not what it should be."""


def download(url: str, part: Path) -> None:
    """Download what is missing in `part`, or all of it if the server cannot continue from there.

    Raises InputError if there is no file (`part` does not change) or the connection broke (`part` keeps what arrived).
    """
    have = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        response = urllib.request.urlopen(request, timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 416 and have:  # nothing comes after what we have: it is complete, or check() finds it is not
            return
        raise InputError(f"{url}: the server answered {error.code} {error.reason}") from error
    except (OSError, http.client.HTTPException) as error:
        raise InputError(f"cannot reach {url} ({getattr(error, 'reason', error)})") from error
    with response:
        if response.headers.get_content_type() == "text/html":
            raise InputError(f"{url}: got a web page, not the file (the login page of this network?)")
        goes_on = response.headers.get("Content-Range", "").startswith(f"bytes {have}-")
        if not save(response, part, have if goes_on else 0):
            raise InputError(f"{url}: the connection broke; {part} keeps what arrived; run this again to continue")


def save(response: http.client.HTTPResponse, part: Path, kept: int) -> bool:
    """Write the answer after the first `kept` bytes (all or none of `part`); False if it is shorter than announced."""
    total = None if response.length is None else kept + response.length
    with (
        open(part, "ab" if kept else "wb", buffering=0) as file,  # unbuffered: even a killed run loses nothing
        tqdm(total=total, initial=kept, desc=part.stem, unit="B", unit_scale=True) as bar,
    ):
        while True:
            try:
                chunk = response.read1(CHUNK)  # read() would wait for the whole chunk and lose it if the line broke
            except (OSError, http.client.HTTPException):
                return False
            if not chunk:
                return total is None or file.tell() == total
            file.write(chunk)
            bar.update(len(chunk))


def obtain(name: str, data_dir: Path, mirror: str | None) -> Path:
    """The path of a checked file: `name` where the user put it into `data_dir`, else `name`.part, now complete."""
    by_hand, part = data_dir / name, data_dir / f"{name}.part"
    published = f"{HOST}/{PUBLISHED_AS.get(name, f'glue/data/{name}')}"
    url = f"{mirror.rstrip('/')}/{name}" if mirror else published
    manually = f"by hand: fetch {published}, save it as {by_hand} and run the same command again, or see --mirror"
    if by_hand.exists():
        check(by_hand, name, must_be_published=False)
        return by_hand
    if mirror and name in MRPC_PARTS:
        part.unlink(missing_ok=True)  # a text has no CRC: halves of two versions would not be noticed
    while True:
        resumed = part.exists()
        try:
            download(url, part)
            check(part, name, must_be_published=mirror is None)
            return part
        except DamagedFileError as error:
            part.unlink()  # going on from wrong bytes would never make them right
            if not resumed:
                raise InputError(f"{url}: {error}; {manually}") from error
            print(f"{error}: has it changed on the server? Starting again.", file=sys.stderr)
        except InputError as error:
            raise InputError(f"{error}; {manually}") from error


def check(path: Path, name: str, must_be_published: bool) -> None:
    """Raise DamagedFileError unless `path` is the published file or, where that is not asked for, a sound one."""
    with path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() == SHA256[name]:
            return
    if must_be_published:
        raise DamagedFileError(f"{path} is not the published file (its sha256 differs)")
    if name.endswith(".zip"):
        unpack(path, name.removesuffix(".zip"), None)
    print(f"note: {name} is not byte for byte the published file", file=sys.stderr)


def unpack(path: Path, task: str, folder: Path | None) -> None:
    """Write the task's TSV files into `folder`, or only read them where it is None; zipfile compares the CRCs.

    Nothing else is unpacked, and under no name that comes from the archive. Raises DamagedFileError.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            for split, member in find_members(archive, task).items():
                target = folder / f"{split}.tsv" if folder else os.devnull
                with archive.open(member) as source, open(target, "wb") as file:
                    shutil.copyfileobj(source, file)
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, UnicodeDecodeError, OSError) as error:
        raise DamagedFileError(f"{path} cannot be unpacked ({error}) and must be downloaded again") from error


def find_members(archive: zipfile.ZipFile, task: str) -> dict[str, zipfile.ZipInfo]:
    """Return the name of each split in the archive. Raises DamagedFileError."""
    members = {member.filename: member for member in archive.infolist()}
    for name in members:
        path = PurePosixPath(name.replace("\\", "/"))
        if path.is_absolute() or ".." in path.parts:
            raise DamagedFileError(f"{archive.filename} contains a path outside of itself, {name!r}")
    splits = {split: members[place] for split in ROWS[task] if (place := f"{task}/{split}.tsv") in members}
    if missing := NEEDED[task] - splits.keys():
        raise DamagedFileError(f"{archive.filename} contains no {task}/{min(missing)}.tsv, which is required")
    if (unpacked := sum(member.file_size for member in splits.values())) > LARGEST_TASK:
        raise DamagedFileError(f"{archive.filename} would unpack to {unpacked:,} bytes, more than {LARGEST_TASK:,}")
    return splits


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
    """Put the finished task into `data_dir`/`task`, unless it is there already.

    Of two runs at once the second waits at the lock, and then finds the task finished.
    """
    folder = data_dir / task
    lock = hashlib.sha256(bytes(folder.resolve())).hexdigest()[:16]
    with locked(cache_dir("locks") / lock):
        there = {split for split in ROWS[task] if (folder / f"{split}.tsv").exists()}
        missing = NEEDED[task] - there
        if not force and there and missing:
            raise InputError(f"{folder} has {min(there)}.tsv and no {min(missing)}.tsv: move it away, or use --force")
        if not force and not missing:
            print(f"{folder} is complete (--force downloads it again)")
            return
        files = [obtain(name, data_dir, mirror) for name in (MRPC_PARTS if task == "MRPC" else [f"{task}.zip"])]
        with tempfile.TemporaryDirectory(prefix=f".{task}-", dir=data_dir) as scratch:
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
        for file in files:
            if file.suffix == ".part":
                file.unlink()
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
        print(f"\ninterrupted: run the same command again to continue from {config.data_dir}/*.part", file=sys.stderr)
        sys.exit(130)
    except OSError as error:
        raise InputError(f"cannot write {error.filename or config.data_dir}: {error.strerror}") from error


if __name__ == "__main__":
    exit_on_input_error(main)
