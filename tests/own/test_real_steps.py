"""A real run of `make check`: how a worker leaves the others. Two workers that train: test_traffic.py."""

import sys

import pytest

from tests.own.stopping_ranks import run_ranks

pytestmark = pytest.mark.real


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_rank_that_has_finished_waits_for_the_other_and_stops_with_it(tmp_path):
    stopped = run_ranks(tmp_path, "leaves_out", 0, 2, "(3, 3, 3)")  # the last call of rank 1 has no partner

    assert stopped.codes == [3, 3]
    assert stopped.conclusion == "rank 0 has made 17 all_reduces, rank 1 18: it left one out in iteration 3"
