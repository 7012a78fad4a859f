"""What comes out of a hand-in, and what is refused."""

import os
import stat
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from common.errors import InputError
from staff.grade.unpack import unpack


def packed(folder: Path, fill: Callable[[zipfile.ZipFile], object], method: int = zipfile.ZIP_DEFLATED) -> Path:
    with zipfile.ZipFile(folder / "hand-in.zip", "w", method) as archive:
        fill(archive)
    return folder / "hand-in.zip"


def special(name: str, mode: int, content: str = "") -> Callable[[zipfile.ZipFile], object]:
    entry = zipfile.ZipInfo(name)
    entry.external_attr = mode << 16
    return lambda archive: archive.writestr(entry, content)


MACS = ("__MACOSX/a/task2a/._run.py", "a/.DS_Store")


def test_plain_files_come_out_and_hidden_ones_do_not(tmp_path):
    path = packed(
        tmp_path, lambda zip: [zip.writestr(name, "x") for name in ("a/task2a/run.py", "a/.git/config", *MACS)]
    )

    notes = unpack(path, tmp_path / "out")

    assert [file.name for file in (tmp_path / "out").rglob("*") if file.is_file()] == ["run.py"]
    assert notes == ["1 file ignored (hidden files and caches): a/.git/config"]


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
    path = packed(tmp_path, lambda zip: (zip.writestr("good.py", "x"), zip.writestr(name, "x")))

    with pytest.raises(InputError, match=message) as refused:
        unpack(path, tmp_path / "out")

    assert str(tmp_path) not in str(refused.value)
    assert list((tmp_path / "out").iterdir()) == []
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("kind", [stat.S_IFLNK, stat.S_IFCHR, stat.S_IFBLK, stat.S_IFIFO, stat.S_IFSOCK])
def test_links_and_devices_are_left_out(tmp_path, kind):
    notes = unpack(packed(tmp_path, special("task1/x", kind | 0o644, "/etc/passwd")), tmp_path / "out")

    assert not [path for path in (tmp_path / "out").rglob("*") if not path.is_dir()]
    assert notes == ["1 file ignored (links and devices): task1/x"]


@pytest.mark.parametrize(
    "limit, most, fill, message",
    [
        ("LARGEST_FILE", 2 << 20, lambda zip: zip.writestr("zeros", bytes(3 << 20)), "files of at most 2 MiB.*zeros"),
        ("MOST_BYTES", 3 << 20, lambda zip: [zip.writestr(f"f{i}", bytes(1 << 20)) for i in range(4)], "3 MiB in all"),
        (
            "MOST_FILES",
            5,
            lambda zip: [zip.writestr(f"env/f{i}", "") for i in range(6)],
            "at most 5 files.*6 of them in 'env'",
        ),
        ("MOST_ENTRIES", 5, lambda zip: [zip.mkdir(f"f{i}") for i in range(6)], "at most 5 entries"),
    ],
)
def test_files_bytes_and_entries_are_counted_as_they_come_out(tmp_path, monkeypatch, limit, most, fill, message):
    monkeypatch.setattr(f"staff.grade.unpack.{limit}", most)
    path = packed(tmp_path, fill)
    assert path.stat().st_size < 1 << 14

    with pytest.raises(InputError, match=message):
        unpack(path, tmp_path / "out")


def names_in(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


ENTRIES = {  # the names of a zip's entries, as different tools write them; the files that come out
    "folders of Windows": (["task1\\", "task1\\run.py"], ["task1/run.py"]),
    "nested folders of Windows": (["a\\", "a\\task1\\", "a\\task1\\run.py"], ["a/task1/run.py"]),
    "a folder after its file": (["task1/run.py", "task1/"], ["task1/run.py"]),
    "a folder without its end": (["task1", "task1/run.py"], ["task1/run.py"]),
    "the folder itself": (["./", "./task1/run.py"], ["task1/run.py"]),
    "the folder itself, of Windows": ([".\\", ".\\task1\\run.py"], ["task1/run.py"]),
    "the root": (["/", "task1/run.py"], ["task1/run.py"]),
    "an environment of any name": (["my_env/pyvenv.cfg", "my_env/lib/x.py", "task1/run.py"], ["task1/run.py"]),
}


@pytest.mark.parametrize("case", ENTRIES)
def test_a_zip_of_any_tool_is_read(tmp_path, case):
    names, files = ENTRIES[case]
    content = {name: "" if name.endswith(("/", "\\")) or name == "task1" else "x" for name in names}

    unpack(packed(tmp_path, lambda zip: [zip.writestr(*one) for one in content.items()]), tmp_path / "out")

    assert names_in(tmp_path / "out") == files


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:xz", "w:bz2"])
def test_a_tar_is_read_and_its_links_are_left_out(tmp_path, mode):
    (tmp_path / "task1").mkdir()
    (tmp_path / "task1/run.py").write_text("x")
    (tmp_path / "task1/link").symlink_to("/etc/passwd")
    with tarfile.open(tmp_path / "hand-in", mode) as tar:
        tar.add(tmp_path / "task1", "task1")

    notes = unpack(tmp_path / "hand-in", tmp_path / "out")

    assert names_in(tmp_path / "out") == ["task1/run.py"]
    assert notes == ["1 file ignored (links and devices): task1/link"]


@pytest.mark.parametrize("name", ["../x", "/tmp/x", "a/../../x"])
def test_a_tar_writes_nothing_elsewhere(tmp_path, name):
    with tarfile.open(tmp_path / "hand-in", "w") as tar:
        tar.addfile(tarfile.TarInfo(name))

    with pytest.raises(InputError, match=ELSEWHERE):
        unpack(tmp_path / "hand-in", tmp_path / "out")


def test_a_folder_that_holds_one_archive_counts_as_this_archive(tmp_path):
    (tmp_path / "First Last_1234_assignsubmission_file_").mkdir()
    path = packed(tmp_path, lambda zip: zip.writestr("task1/run.py", "x"))
    folder = path.rename(tmp_path / "First Last_1234_assignsubmission_file_" / "mine.zip").parent

    unpack(folder, tmp_path / "out")

    assert names_in(tmp_path / "out") == ["task1/run.py"]


@pytest.mark.parametrize("link", [os.symlink, os.link])
@pytest.mark.parametrize("inside", [False, True])
def test_a_link_to_another_submission_is_refused(tmp_path, link, inside):
    other = packed(tmp_path, lambda zip: zip.writestr("task1/run.py", "x"))
    (tmp_path / "mine").mkdir()
    link(other, tmp_path / "mine/link.zip")

    if inside and link is os.symlink:
        assert unpack(tmp_path / "mine", tmp_path / "out") == ["1 file ignored (links and devices): link.zip"]
    else:
        with pytest.raises(InputError, match=r"a (hard )?link"):
            unpack(tmp_path / "mine" if inside else tmp_path / "mine/link.zip", tmp_path / "out")


def test_a_link_to_another_submission_s_folder_is_refused(tmp_path):
    (tmp_path / "other/task1").mkdir(parents=True)
    (tmp_path / "mine").symlink_to(tmp_path / "other")

    with pytest.raises(InputError, match="got a link"):
        unpack(tmp_path / "mine", tmp_path / "out")


def test_a_way_of_packing_that_has_no_bound_is_refused(tmp_path):
    path = packed(tmp_path, lambda zip: zip.writestr("f", bytes(1000)), zipfile.ZIP_BZIP2)

    with pytest.raises(InputError, match="deflate"):
        unpack(path, tmp_path / "out")


@pytest.mark.parametrize("content", [b"", b"no zip at all", b"PK\5\6" + bytes(18)[:10]])
def test_what_is_no_zip_is_refused_in_one_line(tmp_path, content):
    (tmp_path / "hand-in.zip").write_bytes(content)

    with pytest.raises(InputError) as refused:
        unpack(tmp_path / "hand-in.zip", tmp_path / "out")

    assert "\n" not in str(refused.value)


def test_a_truncated_zip_is_refused(tmp_path):
    path = packed(tmp_path, lambda zip: zip.writestr("a.py", os.urandom(5000)))
    path.write_bytes(path.read_bytes()[1000:])

    with pytest.raises(InputError):
        unpack(path, tmp_path / "out")


def test_a_folder_gives_its_files_and_none_of_its_links(tmp_path):
    hand_in = tmp_path / "hand-in"
    (hand_in / "task1").mkdir(parents=True)
    (hand_in / "task1" / "a.py").write_text("a")
    (hand_in / "task1" / "link").symlink_to("/etc/passwd")
    (hand_in / "outside").symlink_to("/etc")
    os.mkfifo(hand_in / "pipe")

    notes = unpack(hand_in, tmp_path / "out")

    assert [str(p.relative_to(tmp_path / "out")) for p in (tmp_path / "out").rglob("*")] == ["task1", "task1/a.py"]
    assert notes == ["3 files ignored (links and devices): outside, pipe, task1/link"]


def test_a_folder_that_holds_files_is_not_unpacked_into(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("kept")

    with pytest.raises(InputError, match="empty folder"):
        unpack(packed(tmp_path, lambda zip: zip.writestr("a", "x")), tmp_path / "out")

    assert (tmp_path / "out" / "mine").read_text() == "kept"


def test_a_hard_link_to_a_file_outside_is_left_out_and_one_inside_is_copied(tmp_path):
    (tmp_path / "another.py").write_text("secret")
    (tmp_path / "in").mkdir()
    (tmp_path / "in/mine.py").write_text("mine")
    os.link(tmp_path / "in/mine.py", tmp_path / "in/again.py")
    os.link(tmp_path / "another.py", tmp_path / "in/theirs.py")

    notes = unpack(tmp_path / "in", tmp_path / "out")

    assert sorted(os.listdir(tmp_path / "out")) == ["again.py", "mine.py"]
    assert [path.stat().st_nlink for path in (tmp_path / "out").iterdir()] == [1, 1]
    assert (
        "1 file ignored (hard links to files outside of the submission; copy it with cp -r first): theirs.py" in notes
    )
