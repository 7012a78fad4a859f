"""What the stages of a pipeline keep for backward, measured with real processes."""

import pytest

from benchmark.checks.activation_memory import measure


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
