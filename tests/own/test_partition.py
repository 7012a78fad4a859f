"""The given lines of pipeline/partition.py; its region is graded in tests/pipeline/test_split.py."""

import pytest
import torch
from torch import nn

from common.errors import InputError
from pipeline.partition import WithDevice, _retrieve_device, _split_module


class Residual(nn.Sequential):
    """It has a forward of its own, so it stays whole."""

    def forward(self, x):
        return x + super().forward(x)


def test_nested_sequentials_are_opened_and_a_label_holds_for_what_lies_in_it():
    a, b, c, d = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2), Residual(nn.Linear(2, 2))
    inner = nn.Sequential(a, nn.Sequential(b, WithDevice(c, "cpu:1")))

    partitions, _ = _split_module(nn.Sequential(WithDevice(inner, "cpu:0"), nn.Sequential(WithDevice(d, "cpu:1"))))

    assert [list(partition) for partition in partitions] == [[a, b], [c, d]]


def test_a_label_counts_more_than_where_the_parameters_lie():
    assert _retrieve_device(nn.Linear(2, 2)) == torch.device("cpu")
    assert _retrieve_device(WithDevice(nn.Linear(2, 2), "cpu:3")) == torch.device("cpu:3")
    assert _retrieve_device(nn.ReLU()) is None


def test_a_layer_on_two_devices_is_refused():
    layer = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2, device="meta")])

    with pytest.raises(InputError, match="one device, got ModuleList on cpu, meta"):
        _retrieve_device(layer)
