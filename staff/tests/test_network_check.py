"""benchmark.checks.network end to end, at reduced size: real nodes, real bytes."""

import json
import subprocess
import sys

import pytest

from cluster.emulate import why_not
from common.paths import ROOT

REASON = why_not() if sys.platform == "linux" else "network namespaces are Linux's"
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(REASON), reason=REASON)]


def check(*words: str) -> tuple[int, dict]:
    command = [sys.executable, "-m", "benchmark.checks.network", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return done.returncode, json.loads(done.stdout.splitlines()[-1])


def test_the_tiny_model_s_traffic_is_as_expected_on_two_nodes():
    code, found = check("--parts", "tiny", "--nodes", "2", "--steps", "4")

    assert [row["batch"] for row in found["tiny"]] == [64, 32, 16] * 4  # two algorithms, two ranks
    assert all(row["payload_ratio"] > row["framed_ratio"] for row in found["tiny"])
    assert all(abs(row["framed_ratio"] - 1) < 0.03 for row in found["tiny"])  # 0.01 on a machine that is quiet
    assert code == (0 if found["holds"] else 1)


def test_an_all_reduce_never_beats_the_link():
    _, found = check("--parts", "rate", "--nodes", "2")

    for row in found["rate"]:
        assert 0.3 < row["wire"] < 1.05
        assert row["ratio"] > 1
