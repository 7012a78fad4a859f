"""--timeline on emulated nodes: the parts add up there, too, and a slower link shows where it must."""

import json
import sys

import pytest

from cluster.emulate import bits_per_second, on_nodes, why_not
from cluster.launch import run_silently
from cluster.random_bert import random_bert
from common.timeline.parts import parts
from tests.own.test_timeline import SCRIPTS, check_parts

NODES = 2
pytestmark = [
    pytest.mark.proof,
    pytest.mark.skipif(bool(why_not()) if sys.platform == "linux" else True, reason="needs emulated nodes"),
]


def run(name, folder, rate="1gbit", *flags):
    """Run a script on emulated nodes; return its timeline."""
    script, _, more = SCRIPTS[name]
    words = [script, *"--timeline 2 --max_steps 5 --dropout 0 --output_dir".split(), folder, *more, *flags]
    words += ["--per_gpu_train_batch_size", 4] if "glue" in script else []
    run_silently(script, on_nodes(NODES, rate, [sys.executable, *map(str, words)]))
    return check_parts(folder, NODES)


@pytest.mark.parametrize("name", ["2a", "2b", "3", "3_gpt2", "gpipe", "zero3"])
def test_on_nodes_the_parts_add_up_to_the_step(tmp_path, name):
    assert 0 < run(name, tmp_path / "run").clock_error < 0.01


def test_a_slower_link_makes_communication_longer_and_nothing_else_can(tmp_path):
    model = ("--model_name_or_path", random_bert("1M"))

    def communication(rate):
        timeline = run("2b", tmp_path / rate, rate, *model)
        parameters = json.loads((tmp_path / rate / "rank0.json").read_text())["parameters"]
        least = 4 * parameters * 8 / bits_per_second(rate)  # 2 (N-1)/N S with two ranks
        return min(row.exposed + row.waiting for row in parts(timeline)), least

    slow, least = communication("100mbit")
    fast, _ = communication("1gbit")

    assert slow > 0.8 * least  # a link may run ahead by a burst
    assert slow > fast
