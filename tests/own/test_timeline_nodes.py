"""--timeline on emulated nodes: the parts add up there, too, and a slower link shows where it must."""

import json
import subprocess
import sys

import pytest

from cluster.emulate import bits_per_second, why_not
from cluster.pictures import PICTURES, in_words
from cluster.random_bert import random_bert
from common.paths import ROOT
from common.timeline.parts import NAMES, parts
from common.timeline.trace import read_trace

NODES = 2
GLUE = ("--do_train", "--per_gpu_train_batch_size", "4")
GPT2 = ("--batch_size", "8")
SCRIPTS = {
    "2a": ("task2a_gather_scatter/run_glue.py", GLUE),
    "2b": ("task2b_allreduce/run_glue.py", GLUE),
    "3": ("task3_ddp/run_glue.py", GLUE),
    "3_gpt2": ("task3_ddp/run_gpt2.py", GPT2),
    "gpipe": ("pipeline/run_gpt2.py", ("--schedule", "gpipe", *GPT2)),
    "zero3": ("beyond/run_gpt2.py", ("--strategy", "zero3", *GPT2)),
}
on_nodes = [
    pytest.mark.medium,
    pytest.mark.proof,
    pytest.mark.skipif(bool(why_not()) if sys.platform == "linux" else True, reason="needs emulated nodes"),
]


def run(name, folder, rate="1gbit", *flags):
    """Run a script on emulated nodes; return the records of all ranks, and the timeline."""
    script, more = SCRIPTS[name]
    words = [
        script,
        "--timeline",
        "2",
        "--max_steps",
        "5",
        "--dropout",
        "0",
        "--output_dir",
        str(folder),
        *more,
        *flags,
    ]
    place = ["--master_ip", "10.10.1.1", "--world_size", str(NODES), "--local_rank", "{rank}"]
    nodes = ["-m", "cluster.emulate", "--nodes", str(NODES), "--rate", rate, "--", sys.executable]
    done = subprocess.run(
        [sys.executable, *nodes, *words, *place], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    records = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(NODES)]
    return records, read_trace(folder / "timeline.json")


def marked(test):
    for mark in on_nodes:
        test = mark(test)
    return test


@marked
@pytest.mark.parametrize("name", list(SCRIPTS))
def test_on_nodes_the_parts_add_up_to_the_step(tmp_path, name):
    records, timeline = run(name, tmp_path / "run")

    assert 0 < timeline.clock_error < 0.01
    for record in records:
        for row in record["timeline"]["steps"]:
            measured = record["iterations"][row["step"]]["seconds"]
            assert sum(row[part] for part in NAMES) == pytest.approx(measured, rel=0.01)
            assert all(row[part] >= -1e-6 for part in (*NAMES, "hidden")), row


@marked
def test_a_slower_link_makes_communication_longer_and_nothing_else_can(tmp_path):
    model = ("--model_name_or_path", str(random_bert("1M")))

    def communication(rate):
        records, timeline = run("2b", tmp_path / rate, rate, *model)
        sent = 4 * records[0]["parameters"]  # 2 (N-1)/N S with two ranks
        return min(row.exposed + row.waiting for row in parts(timeline)), sent * 8 / bits_per_second(rate)

    slow, least = communication("100mbit")
    fast, _ = communication("1gbit")

    assert slow > 0.8 * least  # a link may run ahead by a burst
    assert slow > fast


def test_a_rate_is_written_as_people_write_it():
    assert [in_words(rate) for rate in ("1gbit", "2.5gbit", "100mbit", "64kbit", "none")] == [
        "1 Gbit/s", "2.5 Gbit/s", "100 Mbit/s", "64 kbit/s", "none",
    ]  # fmt: skip


def test_every_picture_is_in_the_readme_beside_it():
    for picture in PICTURES:
        folder = (ROOT / picture.file).parent
        assert "](timeline.png)" in (folder / "README.md").read_text(encoding="utf-8"), picture.file
        assert (ROOT / picture.file).is_file() and (ROOT / picture.script).is_file()
