"""Values: what comes back from a rank is what it was, and what is no message is refused."""

import numpy as np
import pytest

from grader.wire import values

pytestmark = pytest.mark.medium

RANKS = 2


def test_values_come_back_as_they_were(play):
    source = """
        def go(context):
            return {
                "plain": [None, True, 3, 2.5, float("inf"), "ä", {"deep": [[]]}, (1, 2)],
                "scalar": torch.tensor(2.5), "empty": torch.zeros(0, 3), "bool": torch.tensor([True, False]),
                "strided": torch.arange(6).view(2, 3).t(), "column": torch.arange(6).view(3, 2)[:, :1],
                "half": torch.tensor([1.5], dtype=torch.bfloat16),
                "parameter": torch.nn.Parameter(torch.ones(2)), "array": context.arguments["x"] * 2,
            }
    """

    got = play(source, 1, x=np.arange(4.0)).values[0]

    assert got["plain"] == [None, True, 3, 2.5, float("inf"), "ä", {"deep": [[]]}, [1, 2]]
    assert got["scalar"].shape == ()
    assert got["empty"].shape == (0, 3)
    assert got["bool"].tolist() == [True, False]
    assert got["strided"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert got["column"].tolist() == [[0], [2], [4]]
    assert got["half"].tolist() == [1.5]
    assert got["parameter"].tolist() == [1, 1]
    assert got["array"].tolist() == [0, 2, 4, 6]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("{1, 2}", "a set cannot be sent"),
        ("{1: 2}", "strings as keys"),
        ("torch.zeros(2, dtype=torch.complex64)", "complex64 cannot be sent"),
        ("torch.ones(2, device='meta')", "on meta cannot be sent"),
        ("torch.eye(2).to_sparse()", "no plain memory"),
        ("torch.zeros(1).expand(1 << 23)", "16 MiB"),
        ("10**4000", "an integer of 13288 bits cannot be sent"),
        ("'x' * (20 << 20)", "MiB of text"),
        ("[a := [], a.append(a)]", "contains itself"),
    ],
)
def test_a_value_that_cannot_be_sent_is_an_error_of_the_rank(play, value, words):
    result = play(f"def go(context):\n    return {value}\n", 1)

    assert result.outcome == "raised"
    assert words in result.explain()


@pytest.mark.parametrize(("old", "new"), [
    ("[3]", "[9]"), ("[3]", "[-1]"), ("[3]", "[1.5]"), ('{"array": ["int64", [3], 0]}', "9" * 4000),
    ("int64", "object"), ("array", "pickle"), (" 0]", " 8]"), ("]", ""),
])  # fmt: skip
def test_a_forged_message_is_refused(old, new):
    good = values.pack({"a": np.arange(3)})
    length, _ = values.LENGTHS.unpack_from(good)
    header, body = good[values.LENGTHS.size :][:length].decode(), bytes(24)

    assert values.unpack(header.encode(), body, values.to_array)["a"].tolist() == [0, 0, 0]
    with pytest.raises(values.MessageError):
        values.unpack(header.replace(old, new).encode(), body, values.to_array)
