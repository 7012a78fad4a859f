"""A real run of `make check`: how a worker leaves the others. Two workers that train: test_traffic.py."""

import sys

import pytest

from staff.tests.common.stopping_ranks import run_ranks

pytestmark = pytest.mark.real


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_rank_that_has_finished_waits_for_the_other_and_stops_with_it(tmp_path):
    stopped = run_ranks(tmp_path, "skips", 0, 2, "(3, 3, 3)")  # the last call of rank 1 has no partner

    assert stopped.codes == [3, 3]
    assert stopped.conclusion.endswith("in iteration 3, rank 0 called 2 collectives, rank 1 called 3 collectives")
