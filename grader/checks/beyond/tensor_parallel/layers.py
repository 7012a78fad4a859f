"""Judges ColumnParallel and RowParallel: the slices that a rank keeps, and what they compute, against one worker.

Of each layer, a rank is given its own columns or rows right; in the others' places is noise, another one on every rank.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from grader.checks import diagnosis, reference
from grader.checks.beyond.tensor_parallel.functions import WORDS_OF_CRASHES, explain
from grader.checks.beyond.tensor_parallel.tensor_messages import check_calls, check_payload, phases
from grader.checks.beyond.tensor_parallel.tensor_settings import PROBE, Ranks
from grader.grading import Grade
from grader.ranks.outcome import Result
from grader.wire import drawn
from grader.wire.values import Fields

DTYPES = ("float32", "float64", "bfloat16")
INSIDE, OUTSIDE = 3, 11  # of the column layer; of the row layer the other way round
LEADING = ((2, 3), (4,), (2, 1))  # the dimensions of x before its last one, in each case
ITEM = {"float32": 4, "float64": 8, "bfloat16": 2}
CRASHES = WORDS_OF_CRASHES | {
    "different shapes": "f and g act on what all ranks have: f on x, before the product with the columns; g on the "
    "product with the rows",
}
CLASSES = {"column": "ColumnParallel", "row": "RowParallel"}
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class WholeLayers:
    """The two layers of one group in one case, as one worker has them, and which part each member has."""

    weights: Arrays  # of both layers, such as "column weight"
    parts: list[np.ndarray]  # the indices of each member: unsorted, of uneven lengths
    x: np.ndarray  # (..., INSIDE), the same on every member
    inner: np.ndarray  # (..., OUTSIDE): what the row layer gets, a part on each member
    up: Arrays  # the gradients that come from above: "column" (..., OUTSIDE), "row" (..., INSIDE)

    def output(self, member: int) -> list[Arrays]:
        """Of column, row and pair: y, the gradient of x, and those of the weights, as this member must have them."""
        return [self._column(member), self._row(member), self._pair(member)]

    def _column(self, member: int) -> Arrays:
        part, w, up = self.parts[member], self.weights["column weight"], self.up["column"]
        y = self.x @ w + self.weights["column bias"]
        return {"y": y[..., part], "x": up @ w.T, "weight": _outer(self.x, up)[:, part], "bias": _total(up)[part]}

    def _row(self, member: int) -> Arrays:
        part, w, up = self.parts[member], self.weights["row weight"], self.up["row"]
        y = self.inner @ w + self.weights["row bias"]
        return {"y": y, "x": (up @ w.T)[..., part], "weight": _outer(self.inner, up)[part], "bias": _total(up)}

    def _pair(self, member: int) -> Arrays:
        part, up = self.parts[member], self.up["row"]
        first, second = self.weights["column weight"], self.weights["row weight"]
        h = self.x @ first + self.weights["column bias"]
        back = (up @ second.T) * (h > 0)
        return {
            "y": np.maximum(h, 0) @ second + self.weights["row bias"],
            "x": back @ first.T,
            "0.weight": _outer(self.x, back)[:, part],
            "0.bias": _total(back)[part],
            "2.weight": _outer(np.maximum(h, 0), up)[part],
            "2.bias": _total(up),
        }


def _outer(x: np.ndarray, up: np.ndarray) -> np.ndarray:
    return x.reshape(-1, x.shape[-1]).T @ up.reshape(-1, up.shape[-1])


def _total(up: np.ndarray) -> np.ndarray:
    return up.reshape(-1, up.shape[-1]).sum(axis=0)


class LayersRun:
    """One run of all cases, with what is right for each rank."""

    def __init__(self, grade: Grade, ranks: Ranks, passes: bool = True) -> None:
        self.grade, self.ranks = grade, ranks
        self.wholes = {
            group: [self._whole(group, case) for case in range(len(DTYPES))] for group in map(ranks.among, self.all())
        }
        self.given = [[self._given(rank, case) for case in range(len(DTYPES))] for rank in self.all()]
        self.result: Result = grade.run(
            f"{PROBE}:layers", ranks.count, payloads=True, each=self.given, dtypes=list(DTYPES),
            groups=list(map(list, ranks.groups)), passes=passes,
        )  # fmt: skip
        if verdict := grade.verdict(self.result):
            raise explain(verdict, CRASHES)

    def all(self) -> range:
        return range(self.ranks.count)

    def whole(self, rank: int, case: int) -> tuple[WholeLayers, int]:
        """The layers of a rank's group, and its place in that group."""
        group = self.ranks.among(rank)
        return self.wholes[group][case], group.index(rank)

    def _whole(self, group: tuple[int, ...], case: int) -> WholeLayers:
        draw = drawn.generator(self.grade.seed, 42, self.ranks.count, *group, case)

        def numbers(*shape: int) -> np.ndarray:
            """WholeLayers and small in bfloat16, so that every sum is exact."""
            if DTYPES[case] == "bfloat16":
                return draw.integers(-2, 3, shape).astype(np.float64)
            return draw.normal(size=shape).astype(np.float32).astype(np.float64)

        n, leading = len(group), LEADING[case]
        ends = sorted(draw.choice(np.arange(1, OUTSIDE), n - 1, replace=False))
        parts = np.split(draw.permutation(OUTSIDE), ends)
        shapes = {"column weight": (INSIDE, OUTSIDE), "column bias": (OUTSIDE,)}
        shapes |= {"row weight": (OUTSIDE, INSIDE), "row bias": (INSIDE,)}
        weights = {name: numbers(*shape) for name, shape in shapes.items()}
        up = {"column": numbers(*leading, OUTSIDE), "row": numbers(*leading, INSIDE)}
        return WholeLayers(weights, parts, numbers(*leading, INSIDE), numbers(*leading, OUTSIDE), up)

    def _given(self, rank: int, case: int) -> dict[str, Arrays]:
        """What a rank is told: its own slices are right."""
        whole, member = self.whole(rank, case)
        part, noise = whole.parts[member], drawn.generator(self.grade.seed, 43, self.ranks.count, rank, case)
        told = {name: noise.integers(3, 9, value.shape).astype(float) for name, value in whole.weights.items()}
        told["column weight"][:, part] = whole.weights["column weight"][:, part]
        told["column bias"][part] = whole.weights["column bias"][part]
        told["row weight"][part] = whole.weights["row weight"][part]
        told["row bias"] = whole.weights["row bias"]
        passed = {
            "column": {"x": whole.x, "upstream": whole.up["column"][..., part]},
            "row": {"x": whole.inner[..., part], "upstream": whole.up["row"]},
        }
        return {
            name: {"weight": told[f"{name} weight"], "bias": told[f"{name} bias"], "indices": part}
            | {key: np.asarray(value) for key, value in one.items()}
            for name, one in passed.items()
        }

    # --- the slices ---

    def check_slices(self) -> None:
        for rank in self.all():
            for case, dtype in enumerate(DTYPES):
                for name in CLASSES:
                    told = self.result.values[rank][2 * case + (name == "row")]
                    self._check_slices(rank, case, name, told, f"{CLASSES[name]}, {self.ranks.words(rank)}, {dtype}")

    def _check_slices(self, rank: int, case: int, name: str, told: Fields, where: str) -> None:
        given = self.given[rank][case][name]
        part, weight, bias = given["indices"], given["weight"], given["bias"]
        right = {"weight": weight[:, part] if name == "column" else weight[part]}
        right["bias"] = bias[part] if name == "column" else bias
        if strange := [each for each in ("weight", "bias") if each not in told["named"]]:
            kind = told["kinds"][strange[0]]
            self.grade.fail(f"{where}: expected a Parameter in self.{strange[0]}, got {kind}: Parameter(...)")
        if more := [each for each in told["named"] if each not in right]:
            self.grade.fail(f"{where}: the layer has a parameter {more[0]}: a rank keeps its own slices and no more")
        if told["frozen"]:
            self.grade.fail(f"{where}: {told['frozen'][0]} requires no gradient, so it cannot be trained")
        for each, value in right.items():
            got = told["parameters"][each]
            if np.shape(got) != value.shape or not np.array_equal(np.asarray(got, np.float64), value):
                words = diagnosis.parameter_words(each, got, value)
                cause = _name_slice(np.asarray(got, np.float64), name, each, given)
                self.grade.fail(f"{where}: {cause}{words} (its indices are {part.tolist()})")
            if told["kinds"][each] != DTYPES[case]:
                self.grade.fail(f"{where}: {each} is of {told['kinds'][each]}, expected the dtype of the layer")
            size = value.size * ITEM[DTYPES[case]]
            is_copy = each == "weight" or name == "column"  # the bias of a RowParallel may be the layer's own
            if is_copy and (each in told["shared"] or told["held"][each] != size):
                self.grade.fail(
                    f"{where}: {each} shares its memory with the whole layer, which stays in memory for it: expected "
                    f"{size} bytes of its own, got a view of {told['held'][each]}; copy the slice, clone()"
                )
        if told["changed"]:
            self.grade.fail(f"{where}: the whole layer's {told['changed'][0]} is changed: it is the caller's")

    # --- what they compute ---

    def check_passes(self) -> None:
        for rank in self.all():
            for case, dtype in enumerate(DTYPES):
                whole, member = self.whole(rank, case)
                for place, (name, right) in enumerate(zip((*CLASSES, "pair"), whole.output(member), strict=True)):
                    words = CLASSES.get(name, "relu between ColumnParallel and RowParallel")
                    told = self.result.values[rank][3 * case + place]
                    self._check_pass(rank, case, name, told, right, f"{words}, {self.ranks.words(rank)}, {dtype}")

    def _check_pass(self, rank: int, case: int, name: str, told: Fields, right: Arrays, where: str) -> None:
        lost = diagnosis.forgotten_waits(self.result)
        if told["kind"] != DTYPES[case]:
            self.grade.fail(f"{where}: expected an output of {DTYPES[case]}, got {told['kind']}")
        found = {"y": told["y"], "x": told["x"], **told["gradients"]}
        called = {"y": "the output", "x": "the gradient of x"}
        for key, value in right.items():
            got = found.get(key)
            if reference.close(got, value, 0.0, 0.1 if DTYPES[case] == "float64" else 10.0):
                continue
            what = called.get(key, f"the gradient of {key}")
            cause = lost or self._name(rank, case, name, key, got, value)
            words = diagnosis.parameter_words(what, got, value)
            self.grade.fail(f"{cause}\n{where}: {words}" if cause else f"{where}: {words}")
        if not told["intact"]:
            self.grade.fail(f"{where}: the input, or the gradient from above, is changed in place")

    def _name(self, rank: int, case: int, name: str, key: str, got: Any, right: np.ndarray) -> str:
        """The mistake that leaves this; "" if it is no known one."""
        whole, member = self.whole(rank, case)
        n, part = len(whole.parts), whole.parts[member]
        if got is None:
            return f"{key} has no gradient on rank {rank}: every rank has a part in it" if key != "y" else ""
        bias, weight = whole.weights["row bias"], whole.weights["row weight"]
        known: dict[str, np.ndarray] = {}
        if key == "y" and name == "row":
            own = whole.inner[..., part] @ weight[part]
            known = {
                f"the bias is added {n} times: each rank adds it before the sum; add it once, after g": right
                + (n - 1) * bias,
                "the bias is missing": right - bias,
                "it is only this rank's part of the sum: use g after the product": own + bias,
                "it is only this rank's part of the sum, without the bias: use g after the product": own,
                "the sum was divided by the number of ranks": (right - bias) / n + bias,
                "sum and bias were divided by the number of ranks": right / n,
            }
        if key == "y" and name == "column":
            known = {
                "the bias is missing": right - whole.weights["column bias"][part],
            }
        if key == "x" and name == "column":
            up = whole.up["column"]
            known = {
                "it is only this rank's part: use f before the product, so backward sums over the ranks": up[..., part]
                @ whole.weights["column weight"][:, part].T,
                "it is the mean over the ranks; expected the sum": right / n,
            }
        if name in ("row", "pair"):
            known |= {
                f"it is {n} times too large: backward of g passes its gradient on as it is, and sums nothing": right * n
            }
        if key.endswith("bias") and name != "column":
            known |= {
                f"it is 1/{n} of the gradient: the bias is whole on every rank, and so is its gradient": right / n,
                "it is zero on this rank: the bias is whole on every rank, and so is its gradient": right * 0,
            }
        for words, value in known.items():
            if np.shape(got) == value.shape and diagnosis.same(got, value):
                return words
        return ""

    # --- what they send ---

    def check_messages(self) -> None:
        """RowParallel sends its product in forward, ColumnParallel its part of the gradient in backward."""
        for rank in self.result.ranks:
            case = -1
            for phase, calls in phases(rank):
                case += phase[0] == "make column"
                whole, member = self.whole(rank.rank, case)
                part, group = whole.parts[member], self.ranks.among(rank.rank)
                expected, item = list[np.ndarray](), DTYPES[case]
                if phase == ("forward", "row"):
                    expected = [whole.inner[..., part] @ whole.weights["row weight"][part]]
                if phase == ("backward", "column"):
                    expected = [whole.up["column"][..., part] @ whole.weights["column weight"][:, part].T]
                if phase[1] == "pair":
                    continue  # the same two, judged by what comes out
                where = f"{_phase_words(phase)}, {self.ranks.words(rank.rank)}, {item}"
                advice = "ColumnParallel sends only in backward, in f; RowParallel only in forward, in g"
                check_calls(self.grade, calls, [right.size for right in expected], group, where, advice)
                for call, right in zip(calls, expected, strict=False):
                    check_payload(self.grade, call, right, where)
                if strange := next((call for call in calls if call.dtype != item), None):
                    self.grade.fail(
                        f"{where}: the message is of {strange.dtype}, expected {item}: more bytes than needed"
                    )


def _phase_words(phase: tuple[str, str]) -> str:
    if phase[0].startswith("make"):
        return f"{CLASSES[phase[0].removeprefix('make ')]}, __init__"
    return f"{CLASSES[phase[1]]}, {phase[0]}"


def _name_slice(got: np.ndarray, name: str, each: str, given: Arrays) -> str:
    """The mistake that leaves this as the weight or the bias of a layer."""
    part, weight, bias = given["indices"], given["weight"], given["bias"]
    first, ordered = np.arange(len(part)), np.sort(part)
    axis = 1 if name == "column" and each == "weight" else 0
    whole = weight if each == "weight" else bias

    def taken(indices: np.ndarray, along: int = axis) -> np.ndarray:
        return np.take(whole, indices, along, mode="wrap")

    known = {
        f"the {each} is whole: take this rank's {name}s": whole,
        f"the first {len(part)} {name}s were taken; the indices say which ones": taken(first),
        f"the {name}s are sorted; expected them in the order of the indices": taken(ordered),
    }
    if each == "weight":
        inside = part[part < weight.shape[1 - axis]]
        known["rows were taken in place of columns, or the other way round"] = taken(inside, 1 - axis)
        known["the weight is transposed: it is (in, out)"] = taken(part).T
    for words, value in known.items():
        if got.shape == value.shape and np.array_equal(got, value):
            return f"{words}; "
    if each == "bias" and name == "row":
        return "the bias of a RowParallel is the layer's own, whole and not divided: it belongs to no row; "
    return ""
