"""Which ranks drop the same units: none in data parallel training; in a tensor group, those with equal activations.

Masks depend on the random numbers alone, so each rank runs in this process, in a group that moves nothing. The state of
the generator stands for the mask: it is the same exactly if the masks are.
"""

import hashlib

import pytest
import torch
from torch import nn
from torch.nn import functional

from staff.tests.gpu.fake_group import script

pytestmark = pytest.mark.medium

FLAGS = ("--no_cuda", "--dropout", "0.1")
SHORT = ("--batch_size", "8", "--model_max_length", "16")  # so little that no operation takes several threads


def generator():
    """The state of the random numbers, as a short text."""
    return hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest()[:16]


@pytest.fixture
def masks(tmp_path, monkeypatch):
    """Run a script as each rank; return the masks that it drew in two steps, in the order of the calls."""
    drawn: dict[str, list[str]] = {}
    forward, attend = nn.Dropout.forward, functional.scaled_dot_product_attention

    def watched_forward(self, x):
        if self.training and self.p > 0:
            drawn["activations"].append(generator())
        return forward(self, x)

    def watched_attend(*arguments, dropout_p=0.0, **keywords):
        if dropout_p > 0:
            drawn["attention"].append(generator())
        return attend(*arguments, dropout_p=dropout_p, **keywords)  # type: ignore[misc]

    monkeypatch.setattr(nn.Dropout, "forward", watched_forward)
    monkeypatch.setattr(functional, "scaled_dot_product_attention", watched_attend)

    def run(module, *flags, world_size=2):
        masks_by_rank = []
        for rank in range(world_size):
            drawn.update(activations=[], attention=[])
            script(module, tmp_path, rank, world_size, *FLAGS, *flags)
            masks_by_rank.append(drawn.copy())
        return masks_by_rank

    return run


def differ(first, second):
    pairs = [*zip(first["activations"], second["activations"], strict=True)]
    pairs += zip(first["attention"], second["attention"], strict=True)
    return bool(pairs) and all(a != b for a, b in pairs)


def test_a_tensor_group_drops_the_same_activations_and_each_rank_its_own_attention_weights(masks):
    ranks = masks("beyond.run_gpt2", "--strategy", "grid", "--grid", "data=2,tensor=2", *SHORT, world_size=4)

    assert ranks[0]["activations"] == ranks[1]["activations"] != []
    assert ranks[2]["activations"] == ranks[3]["activations"]
    assert differ(ranks[0], ranks[2]) and differ(ranks[1], ranks[3])
    attention = [state for rank in ranks for state in rank["attention"]]
    assert len(set(attention)) == len(attention)
