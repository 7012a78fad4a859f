"""Given lines of the ring, the reducer and ZeRO-3 that their regions' graders do not see; no other rank takes part."""

import pytest
import torch
from torch import nn

from beyond import ring
from beyond.overlap import GradientReducer
from beyond.sharded_model import ShardedModel
from staff.tests.gpu.fake_group import joined

MATRIX = torch.arange(35.0).view(5, 7)


def chain():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(3, 3, bias=False) for _ in range(3)))


@pytest.mark.parametrize("tensor", [torch.tensor(3.0), MATRIX, MATRIX.t()], ids=["number", "matrix", "transposed"])
def test_the_ring_takes_any_shape_and_strides(monkeypatch, tensor):
    def double(flat):  # what two equal ranks would do
        assert flat.dim() == 1 and flat.is_contiguous()
        return [flat.mul_(2)]

    monkeypatch.setattr(ring, "reduce_scatter", double)
    monkeypatch.setattr(ring, "all_gather", lambda chunks: None)
    summed = tensor.clone()

    ring.all_reduce(summed)

    assert summed.stride() == tensor.stride()
    assert torch.equal(summed, 2 * tensor)


def test_a_second_backward_before_finish_is_refused():
    with joined(0, 2):
        model = chain()
        GradientReducer(model, bucket_bytes=1)
        model(torch.ones(2, 3)).sum().backward()

        with pytest.raises(RuntimeError, match=r"a second backward before finish\(\); use no_sync\(\)"):
            model(torch.ones(2, 3)).sum().backward()


@pytest.mark.parametrize("blocks", [chain(), [*chain(), nn.ReLU()]], ids=["nothing outside", "an empty block"])
def test_a_model_that_cannot_be_sharded_by_block_is_refused(blocks):
    with pytest.raises(ValueError, match="expected trainable parameters in each block, and some outside"):
        ShardedModel(nn.Sequential(*blocks), list(blocks), torch.optim.Adam)
