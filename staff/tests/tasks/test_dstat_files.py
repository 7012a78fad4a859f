"""Files of dstat, dool and pcp dstat, as these tools write them: read through task4_traffic's public functions."""

import json
from pathlib import Path

import pytest

from common.errors import InputError
from task4_traffic.compare import observed_by_dstat
from task4_traffic.dstat import read_dstat

DSTAT, OLD_DOOL, DOOL, PCP = "Dstat 0.7.4", "dool 1.2.0", "dool 1.3.4", "pcp-dstat 6.0.3"


def head(title, options="", groups='"net/eth1",,"net/total",', names='"recv","send","recv","send"'):
    """The lines before the rows; with an empty title those of a run that was appended to a file."""
    first = f'"{title} CSV output"\n"Author:","Somebody",,,,"URL:","http://example.org/"\n' if title else "\n\n"
    command = f'"Cmdline:","{title.split()[0] if title else "dool"} {options} --output t.csv 1"'
    return f'{first}"Host:","vm",,,,"User:","u"\n{command},,,,"Date:","31 Dec 2025 23:59:58 UTC"\n{groups}\n{names}\n'


ROWS = "99999,99999,1,1\n800,80,801,81\n800,80,801,81\n"
EPOCH = {"groups": '"epoch","net/eth1",', "names": '"epoch","recv","send"'}

FILES = {  # the text; bytes received and sent on eth1, and seconds, of each run
    "dstat writes bytes": (head(DSTAT) + ROWS, [(1600, 160, 2)]),
    "dool before 1.3 writes bytes": (head(OLD_DOOL) + ROWS, [(1600, 160, 2)]),
    "dool writes bits": (head(DOOL) + ROWS, [(200, 20, 2)]),
    "dool with --bytes": (head(DOOL, "--bytes") + ROWS, [(1600, 160, 2)]),
    "an appended run": (head(DSTAT) + ROWS + head("") + "0,0,0,0\n5,6,7,8\n", [(1600, 160, 2), (5, 6, 1)]),
    "an appended run in another unit": (head(DOOL, "--bytes") + ROWS + head("") + ROWS, [(1600, 160, 2), (200, 20, 2)]),
    "a last row that was cut off": (head(DSTAT) + ROWS + "12,", [(1600, 160, 2)]),
    "a delay of two seconds": (head(DSTAT, "-n 2").replace("t.csv 1", "t.csv 2") + ROWS, [(3200, 320, 4)]),
    "rows that are missing are seen by the clock": (
        head(DSTAT, **EPOCH) + "1700000050,0,0\n1700000055,100,10\n", [(500, 50, 5)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_every_run_in_a_file_is_read_in_its_own_unit(tmp_path, name):
    text, expected = FILES[name]
    (tmp_path / "t.csv").write_text(text, newline="")

    runs = read_dstat(tmp_path / "t.csv", "eth1")

    assert [(run[-1].received, run[-1].sent, run[-1].time - run[0].time) for run in runs] == expected


REFUSED = {  # the text, and what the message says
    "another file": ("a,b\n1,2\n", "expected rows of dstat --output or dool --output, got none"),
    "no column for the interface": (head(DSTAT, groups='"net/eth0",,"net/total",') + ROWS, "got eth0, total"),
    "no network": (head(DSTAT, groups='"total cpu usage",,,') + ROWS, "start it with --net"),
    "a value too few in the middle": (head(DSTAT) + "1,2\n1,2\n" + ROWS, "line 8: expected 4 values.*got 2"),
    "no number": (head(DSTAT) + ROWS + "x,80,0,0\n", "line 10: expected a number for recv, got 'x'"),
    "no title, and so no unit": (head("").strip() + "\n" + ROWS, "pass --unit bytes or --unit bits"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_is_refused_with_file_line_and_reason(tmp_path, name):
    text, message = REFUSED[name]
    (tmp_path / "t.csv").write_text(text)

    with pytest.raises(InputError, match=rf"t\.csv.*{message}"):
        read_dstat(tmp_path / "t.csv", "eth1")


def test_a_unit_that_is_given_decides(tmp_path):
    (tmp_path / "t.csv").write_text(head("").strip() + "\n" + ROWS)

    (run,) = read_dstat(tmp_path / "t.csv", "eth1", "bits")

    assert (run[-1].received, run[-1].sent) == (200, 20)


def compared(folder: Path, options: str, kernel: int) -> str:
    """Five seconds at 800 units sent per second, beside a window of three seconds."""
    rows = "".join(f"{second},0,800\n" for second in range(6))
    (folder / "t.csv").write_text(head(DOOL, options, **EPOCH) + rows)
    (folder / "traffic_0.json").write_text(json.dumps({"windows": [{"begin": 1.0, "end": 4.0, "sent": kernel}]}))
    return observed_by_dstat(folder / "t.csv", "eth1", folder, 0)


def test_a_file_is_compared_with_the_kernel_in_the_same_window(tmp_path):
    assert "t.csv: 2,400 bytes sent" in compared(tmp_path, "--bytes", 2400)
    assert "--unit" not in compared(tmp_path, "--bytes", 2400)


@pytest.mark.parametrize(("options", "kernel", "advice"), [("--bytes", 300, "--unit bits"), ("", 2400, "--unit bytes")])
def test_a_factor_of_8_beside_the_kernel_is_said(tmp_path, options, kernel, advice):
    assert advice in compared(tmp_path, options, kernel)


@pytest.mark.parametrize("window", [(-1, 1), (1, 9)])
def test_a_training_that_is_not_covered_is_refused(tmp_path, window):
    compared(tmp_path, "", 1)
    traffic = {"windows": [{"begin": window[0], "end": window[1], "sent": 80}]}
    (tmp_path / "traffic_0.json").write_text(json.dumps(traffic))

    with pytest.raises(InputError, match="no run in this file covers the training"):
        observed_by_dstat(tmp_path / "t.csv", "eth1", tmp_path, 0)
