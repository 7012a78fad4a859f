"""Judges f and g: what each passes on, what each adds up, and that nobody else's tensor changes."""

from collections.abc import Mapping, Sequence

import numpy as np

from grader.checks import diagnosis, reference
from grader.checks.beyond.tensor_parallel.tensor_messages import check_calls, check_payload, phases
from grader.checks.beyond.tensor_parallel.tensor_settings import PROBE, Ranks
from grader.grading import Grade
from grader.ranks.outcome import Result
from grader.verdicts import Crashed, Verdict, Wrong
from grader.wire import drawn
from grader.wire.values import Fields

PLAIN = (("float32", "plain"), ("float64", "plain"), ("bfloat16", "plain"))
STRIDED = (("float32", "expanded"), ("float32", "holes"), ("float32", "transposed"))
SHAPES = ((3, 4), (2, 5), (4, 2))
F, G = "to_slices", "sum_slices"
NAMES = {F: "f (to_slices)", G: "g (sum_slices)"}
WORDS_OF_CRASHES = {
    "returned an incorrect number of gradients": "backward returns a value for each input of forward, without ctx: the "
    "gradient of x, and None for the group",
    "a gradient different than None at position 2": "return the gradient of x first, then None for the group",
    "not to have been used": "backward returns None for x: return its gradient first, then None for the group",
    "does not require grad": "the result is cut off from the graph: forward computes from x itself, not from x.data "
    "or under no_grad",
    "is out of bounds for dimension": "the weight is (in, out): columns are along its second dimension, rows along the "
    "first",
    "has no attribute 'group'": "keep the group in ctx, in forward: backward gets only ctx and the gradient",
    "a tensor with holes": "all_reduce needs a tensor without holes: make a copy, clone(), and pass that",
    "more than one element of the written-to tensor": "an expanded gradient cannot be written to: make a copy first, "
    "clone(), and pass that to all_reduce",
}
Cases = Sequence[tuple[str, str]]  # (dtype, layout) of the tensors
Given = list[dict[str, np.ndarray]]  # of each case: x and upstream


def explain(verdict: Verdict, known: Mapping[str, str]) -> Verdict:
    """Torch's words, with the reason before them."""
    reasons = [reason for words, reason in known.items() if words in str(verdict)]
    is_students = isinstance(verdict, Crashed | Wrong) and reasons
    return type(verdict)(f"{reasons[0]}\n{verdict}") if is_students else verdict


class FunctionsRun:
    """One run of f and g, with what each rank was given."""

    def __init__(self, grade: Grade, ranks: Ranks, cases: Cases = PLAIN) -> None:
        self.grade, self.ranks, self.cases = grade, ranks, cases
        draws = [drawn.generator(grade.seed, 41, ranks.count, rank) for rank in range(ranks.count)]
        self.given: list[Given] = [[_draw(draw, *case) for case in zip(cases, SHAPES, strict=True)] for draw in draws]
        self.twice: list[Given] = [[_draw(draw, ("float32", "plain"), (2, 3)) for _ in range(2)] for draw in draws]
        each = [{"cases": one, "twice": two} for one, two in zip(self.given, self.twice, strict=True)]
        self.result: Result = grade.run(
            f"{PROBE}:functions", ranks.count, payloads=True, each=each, cases=list(map(list, cases)),
            groups=list(map(list, ranks.groups)),
        )  # fmt: skip
        if verdict := grade.verdict(self.result):
            raise explain(verdict, WORDS_OF_CRASHES)

    def check(self) -> None:
        for name in (F, G):
            for rank in range(self.ranks.count):
                for case in range(len(self.cases)):
                    self._check_case(name, rank, case, self.result.values[rank][name][case])
                self._check_twice(name, rank, self.result.values[rank]["twice"][name])

    def _all(self, rank: int, case: int, key: str) -> list[np.ndarray]:
        """What the ranks of the group were given, in its order, as float64."""
        return [np.asarray(self.given[other][case][key], np.float64) for other in self.ranks.among(rank)]

    def _check_case(self, name: str, rank: int, case: int, told: Fields) -> None:
        dtype, layout = self.cases[case]
        where = f"{NAMES[name]}, {self.ranks.words(rank)}, {dtype}"
        if told["kind"] != dtype:
            self.grade.fail(f"{where}: expected a tensor of {dtype} from forward, got {told['kind']}")
        own = self.ranks.among(rank).index(rank)
        every = {key: self._all(rank, case, key) for key in ("x", "upstream")}
        lost = diagnosis.forgotten_waits(self.result)
        for key, words in (("x", "forward changes x in place"), ("upstream", "backward changes its gradient in place")):
            if not _equal(told[key], every[key][own]):
                self.grade.fail(f"{where}: {words}: others still use it; make a copy first, clone()")
        sums = {"x": name == G, "upstream": name == F}
        for key, got, direction in (
            ("x", told["y"], "forward"),
            ("x", told["without gradients"], "forward under no_grad"),
            ("upstream", told["gradient"], "backward"),
        ):
            right = np.sum(every[key], axis=0) if sums[key] else every[key][own]
            if _close(got, right, dtype):
                continue
            words = diagnosis.parameter_words("the result", got, right)
            cause = f"{lost}\n" if lost else ""
            self.grade.fail(
                f"{cause}{where}, {direction}: {_name(got, every[key], own, sums[key])}; {words}"
                + (f" (its tensors are {layout})" if layout != "plain" else "")
            )
        if told["gradient kind"] != dtype:
            self.grade.fail(f"{where}: expected a gradient of {dtype} from backward, got {told['gradient kind']}")

    def _check_twice(self, name: str, rank: int, got: list[np.ndarray]) -> None:
        """Two calls with different groups: each backward sums over its own."""
        for number, among in enumerate((self.ranks.among(rank), tuple(range(self.ranks.count)))):
            given = [np.asarray(self.twice[other][number]["upstream"], np.float64) for other in among]
            right = np.sum(given, axis=0) if name == F else given[among.index(rank)]
            if len(got) != 2 or not _close(got[number], right, "float32"):
                self.grade.fail(
                    f"{NAMES[name]}, {self.ranks.words(rank)}: after two calls with different groups, backward of call "
                    f"{number + 1} gives a different gradient: each call keeps its own group in ctx"
                )

    def check_messages(self) -> None:
        """g sends in forward, f in backward: what the rank has, once."""
        sends = {("forward", G): "x", ("backward", F): "upstream"}
        for rank in self.result.ranks:
            seen = dict.fromkeys((phase, name) for phase in ("forward", "backward") for name in (F, G))
            cases = dict.fromkeys(seen, 0)
            for phase, calls in phases(rank):
                if phase not in cases:
                    continue
                case, cases[phase] = cases[phase], cases[phase] + 1
                expected = [np.asarray(self.given[rank.rank][case][sends[phase]], np.float64)] if phase in sends else []
                where = f"{NAMES[phase[1]]}, {phase[0]}, {self.ranks.words(rank.rank)}"
                advice = "f sums in backward and g in forward; the other direction passes on what it gets"
                sizes = [right.size for right in expected]
                check_calls(self.grade, calls, sizes, self.ranks.among(rank.rank), where, advice)
                for call, right in zip(calls, expected, strict=False):
                    check_payload(self.grade, call, right, where)


def _draw(draw: np.random.Generator, case: tuple[str, str], shape: tuple[int, int]) -> dict[str, np.ndarray]:
    """x and upstream; whole numbers, so that sums in bfloat16 are exact."""
    found = {}
    for key in ("x", "upstream"):
        value = draw.integers(-9, 10, shape).astype(float) if case[0] == "bfloat16" else draw.normal(size=shape)
        rows = np.broadcast_to(value[:1], shape) if case[1] == "expanded" else value
        found[key] = np.array(rows, np.float64 if case[0] == "float64" else np.float32)
    return found


def _equal(got: np.ndarray | None, right: np.ndarray) -> bool:
    return got is not None and np.array_equal(np.asarray(got, np.float64), right)


def _close(got: np.ndarray | None, right: np.ndarray, dtype: str) -> bool:
    return reference.close(got, right, 0.0, 1e-5 if dtype == "float64" else 1.0)


def _name(got: np.ndarray | None, given: list[np.ndarray], own: int, sums: bool) -> str:
    """The mistake that leaves this; `given` is of all ranks."""
    total, n = np.sum(given, axis=0), len(given)
    known = {
        "it is only this rank's tensor; expected the sum over the group": given[own],
        "it is the sum over the group; expected what this rank was given, as it is": total,
        "it is the mean; expected the sum": total / n,
        f"it is this rank's, {n} times; expected the sum over the group": given[own] * n,
        f"it is this rank's, divided by {n}": given[own] / n,
        "it is zero": total * 0,
        "its sign is reversed": -(total if sums else given[own]),
        "this rank's own part is missing from the sum": total - given[own],
    }
    for words, value in known.items():
        if got is not None and np.shape(got) == value.shape and diagnosis.same(got, value):
            return words
    return "it is not the sum over the group" if sums else "it is not what this rank was given"
