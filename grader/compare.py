"""Compares values with the expected ones. If one differs, names the known mistake that leaves exactly this value.

    expected[rank, "parameter 0"] = Expected(mean, mistakes={"did you divide by world_size?": total})
    check(grade, "on rank {rank}, ", got, expected, result)

A lesson says what is right and which mistake leaves which value; only this file makes messages of that.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from grader.arithmetic import FLOAT32, Tolerance, close, common_factor, difference, matches
from grader.grading import Grade
from grader.ranks.outcome import Result
from grader.ranks.phrases import short

Key = Any  # what a value is, such as "parameter 3", or (rank, what)
Left = Any  # the value that a mistake leaves, or a function without arguments that computes it


@dataclass(frozen=True)
class Expected:
    """What a value must be, and which known mistake leaves which other value.

    Args:
        value: an array is compared as numbers, None means that there must be nothing, anything else must be equal.
        message: the whole sentence for a wrong value; {got} and {expected} are filled in. Of an array: where no known
            mistake fits.
        name: what messages call the value; by default its key.
        mistakes: sentence -> what this mistake leaves. It may spare some values and ranks: the message says which.
            {name} is filled in.
        everywhere: mistakes that count only if they explain every value of the table, the right ones included.
        tolerance: how far off a number may be.
    """

    value: Any
    message: str = ""
    name: str = ""
    mistakes: Mapping[str, Left] = field(default_factory=dict)
    everywhere: Mapping[str, Left] = field(default_factory=dict)
    tolerance: Tolerance = FLOAT32

    @property
    def is_array(self) -> bool:
        return isinstance(self.value, np.ndarray | np.generic)  # a sum over all dimensions leaves no ndarray

    def is_right(self, got: Any) -> bool:
        return close(got, self.value, self.tolerance) if self.is_array else _equal(got, self.value)

    def explained_by(self, sentence: str, got: Any) -> bool:
        """Return whether a known mistake leaves this."""
        left = self.everywhere[sentence] if sentence in self.everywhere else self.mistakes[sentence]
        left = left() if callable(left) else left
        return matches(got, left, self.tolerance) if self.is_array else _equal(got, left)


def check(
    grade: Grade, where: str, got: Mapping[Key, Any], expected: Mapping[Key, Expected], result: Result | None = None
) -> None:
    """Fail with the first value that is not as expected, in the order of `expected`, and with its cause if it is known.

    `where` begins the message and may hold {rank}. With `result`, handles that nobody waited for are a cause.
    """
    wrong = [key for key, one in expected.items() if not one.is_right(got.get(key))]
    if not wrong:
        return
    key, one, value = wrong[0], expected[wrong[0]], got.get(wrong[0])
    rank, name = key if isinstance(key, tuple) else ("", key)
    where, name = where.replace("{rank}", str(rank)), one.name or str(name)
    if one.is_array:
        cause = (result and forgotten_waits(result)) or explain(got, expected, wrong) or Cause(one.message)
        text = cause.text.replace("{name}", name)
        grade.fail(text, where + difference(name, value, one.value), cause.kind)
    sentence = next((sentence for sentence in one.mistakes if one.explained_by(sentence, value)), one.message)
    if not sentence:
        grade.fail(observed=f"{where}{name}: expected {_in_words(one.value)}, got {_in_words(value)}")
    text = sentence.replace("{name}", name)
    text = text.replace("{got}", _in_words(value)).replace("{expected}", _in_words(one.value))
    grade.fail(where + text, kind=sentence)


class Cause(NamedTuple):
    """Why values are wrong: for this run, and `kind`, the same without what differs between runs; see verdicts.py."""

    text: str
    kind: str = ""


def _equal(got: object, expected: object) -> bool:
    """Return whether both are equal, and of one type: 1 is not True."""
    return type(got) is type(expected) and bool(np.all(got == expected))


def _in_words(value: Any) -> str:
    """Return a value as text, without the brackets of a list with one item."""
    is_single = isinstance(value, list) and len(value) == 1
    return short(str(value[0] if is_single else value))


# --- which mistake leaves what is wrong ---


def explain(got: Mapping[Key, Any], expected: Mapping[Key, Expected], all_wrong: Sequence[Key]) -> Cause | None:
    """Return the first mistake that explains all wrong values which have the same known mistakes as the first of them,
    and what it has spared; None if none does."""
    first = expected[all_wrong[0]]
    known = first.mistakes.keys()
    alike = {key: one for key, one in expected.items() if one.is_array and one.mistakes.keys() == known}
    wrong = [key for key in all_wrong if key in alike]
    causes: Iterable[tuple[str, Iterable[Key]]] = (
        *((sentence, alike) for sentence in first.everywhere),
        *((sentence, wrong) for sentence in first.mistakes),
    )
    for sentence, keys in causes:
        if all(alike[key].explained_by(sentence, got.get(key)) for key in keys):
            return Cause(sentence + spared(wrong, alike), sentence)
    return None if first.message else _general_cause(got, alike, wrong)


def _general_cause(got: Mapping[Key, Any], alike: Mapping[Key, Expected], wrong: Sequence[Key]) -> Cause | None:
    """Return a cause that fits any values: they are nan, swapped, all off by one factor, or differ between ranks."""
    if all(matches(got.get(key), np.full(alike[key].value.shape, np.nan)) for key in wrong):
        return Cause("{name} is nan, as what an asynchronous call receives is before its wait(): is it used too early?")
    if all(any(key != other and matches(got.get(key), alike[other].value) for other in alike) for key in wrong):
        return Cause("each has the value of another one: are they in the same order on every worker?")
    largest = max((one.tolerance for one in alike.values()), key=lambda tolerance: tolerance.total)
    factor = common_factor([(got.get(key), alike[key].value) for key in wrong], largest)
    if factor is not None and abs(factor - 1) > 0.01:
        text = f"{{name}} is {factor:.3f} times what is expected{spared(wrong, alike)}"
        return Cause(text, "all are off by one factor")
    for key in (key for key in wrong if isinstance(key, tuple)):
        others = [other for other in alike if other[1:] == key[1:] and matches(alike[key].value, alike[other].value)]
        if any(not matches(got.get(key), got.get(other)) for other in others):
            return Cause("the workers have different results")
    return None


def spared(wrong: Sequence[Key], alike: Mapping[Key, Expected]) -> str:
    """Say which tensors and which ranks a mistake has spared; "" if it has spared none."""
    if not all(isinstance(key, tuple) for key in alike):
        return ""
    ranks, all_ranks = (list(dict.fromkeys(key[0] for key in keys)) for keys in (wrong, alike))
    names, all_names = (list(dict.fromkeys(key[1] for key in keys)) for keys in (wrong, alike))
    text = ""
    if len(names) < len(all_names):
        small = [name for name in all_names if np.ndim(alike[all_ranks[0], name].value) < 2]
        if names == small:
            text = "; only tensors with fewer than two dimensions (biases, LayerNorm): they were left out"
        elif names == all_names[-len(names) :]:
            text = f"; from {names[0]} on: does something end the loop early, or is the last bucket never sent?"
        elif names == all_names[: len(names)]:
            text = "; all but the last: do you wait only for the last handle, or is a line outside the loop?"
        else:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            text = f"; only {', '.join(map(str, names[:3]))}{more}"
    if len(ranks) < len(all_ranks):
        listed = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
        text += "; only on ranks other than 0" if ranks == all_ranks[1:] else f"; only on {listed}"
    return text


def forgotten_waits(result: Result) -> Cause | None:
    """Return which handles of async_op=True nobody has waited for; None if there are none."""
    for rank in result.ranks:
        lost = [call for call in rank.calls if call.asynchronous and not call.waited]
        if lost:
            first = f"{lost[0].name} #{lost[0].number} ({lost[0].where})"
            which = f"the asynchronous handle of {first}"
            if len(lost) > 1:
                which = f"{len(lost)} asynchronous handles, the first is that of {first}"
            return Cause(
                f"rank {rank.rank} never calls wait() on {which}", "an asynchronous handle is never waited for"
            )
    return None


def with_inputs(table: Mapping[str, Callable[..., Left]], *inputs: object) -> dict[str, Left]:
    """Return a table of mistakes in which each function gets these inputs when its value is needed."""
    return {sentence: lambda left=left: left(*inputs) for sentence, left in table.items()}
