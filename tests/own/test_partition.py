"""The given lines of pipeline/partition.py; its region is graded in tests/pipeline/test_split.py."""

import pytest
import torch
from torch import nn

from common.errors import InputError
from pipeline.partition import WithDevice, _assemble_partition, _retrieve_device, _split_module


def test_layers_that_lie_nowhere_form_one_partition_on_the_cpu():
    partitions, devices = _split_module(nn.Sequential(nn.ReLU(), nn.Tanh()))

    assert len(partitions) == 1
    assert devices == [torch.device("cpu")]


def test_a_nested_sequential_is_opened_and_its_label_holds_for_what_lies_in_it():
    a, b, c, d = (nn.Linear(2, 2) for _ in range(4))
    inner = nn.Sequential(a, nn.Sequential(b, WithDevice(c, "cpu:1")))

    partitions, _ = _split_module(nn.Sequential(WithDevice(inner, "cpu:0"), nn.Sequential(WithDevice(d, "cpu:1"))))

    assert [list(partition) for partition in partitions] == [[a, b], [c, d]]


def test_a_sequential_with_a_forward_of_its_own_stays_whole():
    class Residual(nn.Sequential):
        def forward(self, x):
            return x + super().forward(x)

    block = Residual(nn.Linear(2, 2))

    partitions, _ = _split_module(nn.Sequential(block))

    assert list(partitions[0]) == [block]


def test_a_label_counts_more_than_where_the_parameters_lie():
    assert _retrieve_device(nn.Linear(2, 2)) == torch.device("cpu")
    assert _retrieve_device(WithDevice(nn.Linear(2, 2), "cpu:3")) == torch.device("cpu:3")
    assert _retrieve_device(nn.ReLU()) is None


def test_a_layer_on_two_devices_is_refused():
    layer = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2, device="meta")])

    with pytest.raises(InputError, match="one device, got ModuleList on cpu, meta"):
        _retrieve_device(layer)


def test_a_partition_is_assembled_from_the_layers_themselves():
    a, b, c = (nn.Linear(2, 2) for _ in range(3))

    partition = _assemble_partition([WithDevice(nn.Sequential(a, b), "cpu:0"), c])

    assert list(partition) == [a, b, c]
