"""make_buckets: every parameter in one bucket, in order, within the size, one dtype in each."""

import torch
from torch.nn import Parameter

from beyond.overlap import make_buckets


def parameters(*sizes, dtype=torch.float32):
    return [Parameter(torch.zeros(size, dtype=dtype)) for size in sizes]


def numels(buckets):
    return [[parameter.numel() for parameter in bucket] for bucket in buckets]


def test_a_bucket_is_filled_up_to_its_size_exactly():
    order = parameters(1, 2, 3, 4, 2)

    assert numels(make_buckets(order, 6 * 4)) == [[1, 2, 3], [4, 2]]
    assert numels(make_buckets(order, 6 * 4 - 1)) == [[1, 2], [3], [4], [2]]


def test_every_parameter_is_in_exactly_one_bucket_and_the_order_stays():
    order = parameters(5, 5, 5, 5, 5, 5, 5)

    flat = [parameter for bucket in make_buckets(order, 12 * 4) for parameter in bucket]

    assert [id(parameter) for parameter in flat] == [id(parameter) for parameter in order]


def test_a_parameter_larger_than_a_bucket_has_one_of_its_own():
    assert numels(make_buckets(parameters(1, 100, 1, 1), 8)) == [[1], [100], [1, 1]]


def test_another_dtype_begins_another_bucket():
    order = parameters(1, 1) + parameters(2, dtype=torch.bfloat16) + parameters(3)

    assert numels(make_buckets(order, 1000)) == [[1, 1], [2], [3]]


def test_sizes_count_bytes_not_elements():
    assert numels(make_buckets(parameters(4, 4, 4, dtype=torch.float64), 64)) == [[4, 4], [4]]


def test_without_parameters_there_are_no_buckets():
    assert make_buckets([], 8) == []
