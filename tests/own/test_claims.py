"""Sentences of the READMEs, measured; `python -m benchmark.checks.claims --help` lists those about communication."""

import json
import subprocess
import sys

import pytest

from benchmark.checks import claims
from benchmark.checks.activation_memory import measure
from benchmark.checks.delayed_links import network
from benchmark.checks.network import beside_b15, time_messages
from benchmark.checks.ranks import on_ranks
from cluster.emulate import why_not
from common.paths import ROOT

# `beside` is left out: on a busy machine its seconds say nothing.
NAMES = [name for name in claims.CLAIMS if name != "beside"]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_sentence_holds(name):
    if name in claims.NEED_NODES and (reason := why_not()):
        pytest.skip(reason)
    command = [sys.executable, "-m", "benchmark.checks.claims", "--only", name]

    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)

    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert list(json.loads(done.stdout.splitlines()[-1])) == [name]


def test_of_each_pattern_b_15_gets_the_latency_that_its_messages_have():
    measured = {"message": 0.021, "answer": 0.0105, "gather": 0.0215, "scatter": 0.0215, "gather_scatter": 0.022}

    rows = beside_b15(4, measured | {"all_reduce": 0.126})

    assert [row["b.15"] for row in rows] == pytest.approx([0.042, 0.021, 0.126])
    assert [row["measured"] for row in rows] == pytest.approx([0.043, 0.022, 0.126])


@pytest.mark.proof
def test_gather_and_scatter_wait_for_less_than_the_ring_on_links_with_a_delay():
    kind, reason = network()
    if not kind:
        pytest.skip(reason)

    times = on_ranks(time_messages, 3, delay_ms=20.0, rounds=2)[0]

    # 20 ms one way: no operation can be faster, however fast the machine is, and a busy one only adds to it.
    assert times["message"] > 0.038 and times["answer"] > 0.018
    assert times["all_reduce"] > 4 * 0.038
    assert times["gather_scatter"] < times["all_reduce"]


@pytest.mark.proof
def test_1f1b_keeps_as_many_micro_batches_as_stages_follow_and_gpipe_keeps_all():
    rows = {(row.schedule, row.stage): row for row in measure(2, [3])}

    assert {key: row.alive for key, row in rows.items()} == {
        ("gpipe", 0): 3,
        ("gpipe", 1): 3,
        ("1f1b", 0): 2,
        ("1f1b", 1): 1,
    }
    assert all(abs(row.measured / row.expected - 1) <= 0.02 for row in rows.values()), rows
