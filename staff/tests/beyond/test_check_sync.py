"""The check of b.18 on steps that ranks have really made: the graders' own steps are computed by formulas."""

import math

import pytest
import torch

from beyond.check_sync import Call, check
from grader.verdicts import Verdict
from staff.grade.submissions import write_files
from staff.proofs.bank import changed_files, copy_tree, load_bank
from staff.tests.grader.inline_student import view_of
from tests.gradients.test_averaging import PLAIN, averaged

TEST = "test_all_reduce_leaves_the_mean_on_every_worker"


def complaint(result, gradients):
    """What the check says about the two steps of a run."""
    calls = [
        [
            Call(call.name, math.prod(call.shape), getattr(torch, call.dtype), call.root, call.complete and call.waited)
            for call in rank.calls
            if call.dtype
        ]
        for rank in result.ranks
    ]
    for step in range(PLAIN.n_calls):
        before = [{f"parameter {k}": torch.tensor(one) for k, one in enumerate(own[step])} for own in gradients]
        left = [{name: value[step][name] for name in before[0]} for value in result.values]
        after = [{name: None if one is None else torch.tensor(one) for name, one in own.items()} for own in left]
        if found := check(before, after, calls):
            return found
    return None


@pytest.mark.medium
def test_the_check_complains_about_the_bank_s_wrong_averages_and_about_no_right_one(tmp_path):
    copy_tree(tmp_path)
    looked_at = {True: 0, False: 0}
    for entry in load_bank():
        if set(entry.bodies) != {"2b.1"} or entry.patch or (entry.is_mistake and TEST not in entry.fails):
            continue
        write_files(changed_files(entry), tmp_path)
        try:
            found = complaint(*averaged(view_of(tmp_path, "2b.1"), "sync_gradients", 3, PLAIN))
        except Verdict:
            continue  # some rank has not returned: there is no step to look at
        assert bool(found) == entry.is_mistake, (entry.name, found)
        looked_at[entry.is_mistake] += 1
    assert looked_at[True] >= 12 and looked_at[False] >= 8
