"""What comes out of a hand-in, and what is refused: in one line, with nothing left behind."""

import os
import stat
import tarfile
import zipfile
from pathlib import Path

import pytest

from common.errors import InputError
from staff.grade import unpack as limits
from staff.grade.unpack import unpack


def zipped(folder: Path, *names: str, content: bytes = b"x", mode: int = 0, method: int = zipfile.ZIP_DEFLATED) -> Path:
    """A zip with these entries; the folders among them are empty."""
    with zipfile.ZipFile(folder / "hand-in.zip", "w", method) as archive:
        for name in names:
            entry = zipfile.ZipInfo(name)
            entry.external_attr, entry.compress_type = mode << 16, method
            archive.writestr(entry, b"" if name.endswith(("/", "\\")) or name == "task1" else content)
    return folder / "hand-in.zip"


def files_in(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


RUN = "task1/run.py"
HIDDEN = "1 file ignored (hidden files and caches): "
ENTRIES: dict[str, tuple[list[str], list[str]]] = {  # the names in a zip, as tools write them; what the student is told
    "hidden files, and those of macOS": (["__MACOSX/a/._run.py", ".DS_Store", ".git/config"], [f"{HIDDEN}.git/config"]),
    "folders of Windows": (["task1\\"], []),
    "a folder after its file, and without its end": (["task1/", "task1"], []),
    "the folder itself, and the root": (["./", ".\\", "/"], []),
    "an environment of any name": (["e/pyvenv.cfg", "e/lib/x.py"], [
        "2 files ignored (a Python environment): e/pyvenv.cfg, e/lib/x.py"
    ]),
}  # fmt: skip


@pytest.mark.parametrize("case", ENTRIES)
@pytest.mark.parametrize("file", [RUN, f"./{RUN}", RUN.replace("/", "\\")])
def test_a_zip_of_any_tool_is_read(tmp_path, case, file):
    names, notes = ENTRIES[case]

    assert unpack(zipped(tmp_path, file, *names), tmp_path / "out") == notes
    assert files_in(tmp_path / "out") == [RUN]


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:xz", "w:bz2"])
def test_a_tar_and_a_folder_are_read_and_their_links_and_devices_left_out(tmp_path, mode):
    (tmp_path / "in/task1/deep").mkdir(parents=True)
    (tmp_path / "in/task1/deep/run.py").write_text("x")
    (tmp_path / "in/link").symlink_to("/etc/passwd")
    (tmp_path / "in/outside").symlink_to("/etc")
    os.mkfifo(tmp_path / "in/pipe")
    with tarfile.open(tmp_path / "hand-in", mode) as tar:
        tar.add(tmp_path / "in", ".")

    for given in ("in", "hand-in"):
        (note,) = unpack(tmp_path / given, tmp_path / f"out-{given}")

        assert note.startswith("3 files ignored (links and devices): ") and "link" in note and "pipe" in note
        assert files_in(tmp_path / f"out-{given}") == ["task1/deep/run.py"]


@pytest.mark.parametrize(
    ("content", "got"),
    [(b"", "an empty file"), (b"PK\x03\x04 cut", "a damaged zip"), (b"Rar!\x1a\x07", "a RAR archive"),
     (b"7z\xbc\xaf\x27\x1c", "a 7z archive"), (b"%PDF-1.7", "a PDF"), (b"import torch", "neither")],
)  # fmt: skip
def test_what_is_no_archive_is_called_by_its_kind_and_name_also_in_a_students_folder(tmp_path, content, got):
    (tmp_path / "Ada_4711_assignsubmission_file_").mkdir()
    for path in (tmp_path / "hw.zip", tmp_path / "Ada_4711_assignsubmission_file_/hw.zip"):
        path.write_bytes(content)

        with pytest.raises(InputError, match=f"^hw.zip: expected a folder, zip or tar, got {got}; "):
            unpack(path if path.parent == tmp_path else path.parent, tmp_path / "out")


@pytest.mark.parametrize("kind", [stat.S_IFLNK, stat.S_IFCHR, stat.S_IFBLK, stat.S_IFIFO, stat.S_IFSOCK])
def test_links_and_devices_of_a_zip_are_left_out(tmp_path, kind):
    notes = unpack(zipped(tmp_path, "task1/x", content=b"/etc/passwd", mode=kind | 0o644), tmp_path / "out")

    assert (files_in(tmp_path / "out"), notes) == ([], ["1 file ignored (links and devices): task1/x"])


ELSEWHERE = "expected relative paths that stay inside the submission"


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize(
    "name, message",
    [
        *((name, ELSEWHERE) for name in ("../x", "a/../../x", "/tmp/x", "..\\x", "C:\\x")),
        ("task1/" + "\U00020000" * 100 + ".py", "names of at most 255 bytes"),
        ("good.py", "every file once"),
    ],
)
def test_a_name_that_no_file_may_have_is_refused_without_a_path_of_ours_and_nothing_stays(tmp_path, name, message):
    with pytest.raises(InputError, match=message) as refused:
        unpack(zipped(tmp_path, "good.py", name), tmp_path / "out")

    assert str(tmp_path) not in str(refused.value)
    assert list((tmp_path / "out").iterdir()) == [] and not (tmp_path / "x").exists()
    if message == ELSEWHERE and "\\" not in name:
        with tarfile.open(tmp_path / "tar", "w") as tar:
            tar.addfile(tarfile.TarInfo(name))
        with pytest.raises(InputError, match=message):
            unpack(tmp_path / "tar", tmp_path / "out")


@pytest.mark.parametrize(
    "names, size, message",
    [
        (["zeros"], limits.LARGEST_FILE + 1, "files of at most 16 MiB.*zeros"),
        ([f"f{n}" for n in range(5)], limits.LARGEST_FILE, "64 MiB in all"),
        ([f"env/f{n}" for n in range(limits.MOST_FILES + 1)], 0, "at most 2,000 files.*2,001 of them in 'env'"),
        ([f"f{n}/" for n in range(limits.MOST_ENTRIES + 1)], 0, "at most 20,000 entries"),
        (["/".join("abcdefghijklm")], 1, "paths of at most 12 parts"),
    ],
)
def test_files_bytes_and_entries_are_counted_as_they_come_out(tmp_path, names, size, message):
    with pytest.raises(InputError, match=message):
        unpack(zipped(tmp_path, *names, content=bytes(size)), tmp_path / "out")


NO_ZIP = {"nothing": b"", "text": b"no zip at all", "a beginning": b"PK\5\6" + bytes(18)[:10]}


@pytest.mark.parametrize("content", [*NO_ZIP, "truncated", "bzip2"])
def test_what_is_no_zip_or_has_no_bound_is_refused_in_one_line(tmp_path, content):
    path = zipped(tmp_path, "a.py", content=os.urandom(5000), method=zipfile.ZIP_BZIP2 if content == "bzip2" else 8)
    if content != "bzip2":
        without_its_beginning = path.read_bytes()[1000:]
        path.write_bytes(NO_ZIP.get(content, without_its_beginning))

    with pytest.raises(InputError) as refused:
        unpack(path, tmp_path / "out")

    assert "\n" not in str(refused.value) and ("deflate" in str(refused.value)) == (content == "bzip2")


def test_a_folder_that_holds_one_archive_counts_as_this_archive(tmp_path):
    (tmp_path / "First Last_1234_assignsubmission_file_").mkdir()
    folder = zipped(tmp_path, RUN).rename(tmp_path / "First Last_1234_assignsubmission_file_/mine.zip").parent

    unpack(folder, tmp_path / "out")

    assert files_in(tmp_path / "out") == [RUN]


@pytest.mark.parametrize("link", [os.symlink, os.link])
@pytest.mark.parametrize("inside", [False, True])
def test_a_link_to_another_submission_is_refused(tmp_path, link, inside):
    (tmp_path / "mine").mkdir()
    link(zipped(tmp_path, RUN), tmp_path / "mine/link.zip")

    if inside and link is os.symlink:
        assert unpack(tmp_path / "mine", tmp_path / "out") == ["1 file ignored (links and devices): link.zip"]
    else:
        with pytest.raises(InputError, match=r"a (hard )?link"):
            unpack(tmp_path / "mine" if inside else tmp_path / "mine/link.zip", tmp_path / "out")


def test_a_link_to_another_submission_s_folder_is_refused_and_files_are_never_unpacked_into_a_folder_with_others(
    tmp_path,
):
    (tmp_path / "other/task1").mkdir(parents=True)
    (tmp_path / "mine").symlink_to(tmp_path / "other")

    with pytest.raises(InputError, match="got a link"):
        unpack(tmp_path / "mine", tmp_path / "out")
    with pytest.raises(InputError, match="empty folder"):
        unpack(zipped(tmp_path, RUN), tmp_path)

    assert (tmp_path / "other/task1").is_dir()


def test_a_hard_link_to_a_file_outside_is_left_out_and_one_inside_is_copied(tmp_path):
    (tmp_path / "another.py").write_text("secret")
    (tmp_path / "in").mkdir()
    (tmp_path / "in/mine.py").write_text("mine")
    os.link(tmp_path / "in/mine.py", tmp_path / "in/again.py")
    os.link(tmp_path / "another.py", tmp_path / "in/theirs.py")

    (note,) = unpack(tmp_path / "in", tmp_path / "out")

    assert files_in(tmp_path / "out") == ["again.py", "mine.py"]
    assert [path.stat().st_nlink for path in (tmp_path / "out").iterdir()] == [1, 1]
    assert "copy it with cp -r first): theirs.py" in note
