"""Tensor parallelism, b.11: f and g, ColumnParallel and RowParallel, against one worker that has the whole layer.

Each rank's own columns or rows of a layer are correct; all other entries are noise that differs from rank to rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
import pytest

from grader.arithmetic import EXACT
from grader.compare import Expected, check
from grader.grading import Grade
from grader.in_rank import in_rank, run
from grader.ranks.outcome import Result
from grader.wire import drawn
from grader.wire.values import Fields
from tests.beyond import tensor_shared as shared
from tests.beyond.tensor_shared import HINTS, PAIRS, THREE, TWO, Given, Ranks, numbers, tolerance
from tests.beyond.toy_shared import BYTES

if TYPE_CHECKING:  # what a function finds in a rank
    from grader.inside.tools import Context, copy_of, dtype_of, nn, own_group, torch
    from tests.beyond.tensor_in_rank import both_ways, conv1d, described, laid_out

graded = pytest.mark.graded
FILE, IN_RANK = "beyond/tensor_parallel.py", "tests/beyond/tensor_in_rank.py"
F, G = "to_slices", "sum_slices"
NAMES = {
    F: "f (to_slices)", G: "g (sum_slices)", "column": "ColumnParallel", "row": "RowParallel",
    "pair": "relu between ColumnParallel and RowParallel",
}  # fmt: skip
PLAIN = (("float32", "plain"), ("float64", "plain"), ("bfloat16", "plain"))  # dtype and layout of the tensors
STRIDED = (("float32", "expanded"), ("float32", "holes"), ("float32", "transposed"))
SHAPES = ((3, 4), (2, 5), (4, 2))  # of x, in each case
INSIDE, OUTSIDE = 3, 11  # of the column layer; of the row layer the other way round
LEADING = ((2, 3), (4,), (2, 1))  # the dimensions of x before its last one, in each case
ZERO = 1  # the case in which what the last rank of a group must send is zero
DIRECTIONS = "f sums in backward and g in forward; the other direction passes on what it gets"
ONE_SUM = "ColumnParallel sends only in backward, in f; RowParallel only in forward, in g"


# --- what a rank does ---


@in_rank(uses=[IN_RANK])
def functions(context: Context, lesson: ModuleType, inputs: Fields) -> object:
    """Yield, for f and for g, what forward and backward give in each case, and in two calls with different groups."""
    group = own_group(context)
    for name in ("to_slices", "sum_slices"):
        function, cases = getattr(lesson, name), []
        for (dtype, layout), given in zip(context.arguments["cases"], inputs["cases"], strict=True):
            x, upstream = (laid_out(given[key].to(getattr(torch, dtype)), layout) for key in ("x", "upstream"))
            x.requires_grad_()
            context.event("forward", of=name)
            y = function(x, group)
            context.event("backward", of=name)
            case = {"dtype": dtype_of(y), "y": copy_of(y), "x": copy_of(x)}
            (gradient,) = torch.autograd.grad(y, x, upstream)
            context.event("ended")
            with torch.no_grad():
                case["y without graph"] = copy_of(function(x.detach(), group))
            cases.append(case | {"gradient": copy_of(gradient), "upstream": copy_of(upstream)})
            cases[-1]["gradient's dtype"] = dtype_of(gradient)
        leaves = [pair["x"].clone().requires_grad_() for pair in inputs["twice"]]
        results = [function(x, among) for x, among in zip(leaves, (group, None), strict=True)]
        for y, pair in zip(results, inputs["twice"], strict=True):
            y.backward(pair["upstream"])
        yield {"cases": cases, "twice": [copy_of(leaf.grad) for leaf in leaves]}


@in_rank(uses=[IN_RANK])
def layers(context: Context, lesson: ModuleType, inputs: list[Fields]) -> object:
    """Yield what both layers keep in each case, and what they compute alone and with a relu between them."""
    group = own_group(context)
    for dtype, given in zip(context.arguments["dtypes"], inputs, strict=True):
        report, modules = {}, {}
        for name, kind in (("column", lesson.ColumnParallel), ("row", lesson.RowParallel)):
            one = {key: tensor.to(getattr(torch, dtype)) for key, tensor in given[name].items() if key != "indices"}
            whole = conv1d(one["weight"], one["bias"])
            context.event("__init__", of=name)
            modules[name] = kind(whole, given[name]["indices"], group)
            report[f"{name} keeps"] = described(modules[name], whole, one)
            x, upstream = one["x"], one["upstream"]
            if context.arguments["computes"]:
                report[name] = both_ways(context, name, modules[name], x, upstream)
        if context.arguments["computes"]:
            pair = nn.Sequential(modules["column"], nn.ReLU(), modules["row"])
            first = given["column"]["x"].to(upstream.dtype)
            report["pair"] = both_ways(context, "pair", pair, first, upstream)
        yield report


# --- f and g ---


def functions_run(grade: Grade, ranks: Ranks, cases: tuple = PLAIN) -> tuple[Result, list[Fields]]:
    """Run f and g; return the result and each rank's inputs. `twice` is drawn in the dtype that it has there."""

    def pair(draw: np.random.Generator, dtype: str, layout: str, shape: tuple[int, ...]) -> dict[str, np.ndarray]:
        tensors = {key: numbers(draw, dtype, shape, largest=9) for key in ("x", "upstream")}
        rows = {key: np.broadcast_to(value[:1], shape).copy() for key, value in tensors.items()}
        return rows if layout == "expanded" else tensors

    inputs = []
    for rank in range(ranks.count):
        draw = drawn.generator(grade.seed, 41, ranks.count, rank)
        own_cases = [pair(draw, dtype, layout, shape) for (dtype, layout), shape in zip(cases, SHAPES, strict=True)]
        if rank == ranks.count - 1 and cases is PLAIN:
            for key in ("x", "upstream"):
                own_cases[1][key].flat[0] = np.inf
                own_cases[2][key] *= 0
        twice = [{key: value.astype(np.float32) for key, value in pair(draw, "float32", "plain", (2, 3)).items()}
                 for _ in range(2)]  # fmt: skip
        inputs.append({"cases": own_cases, "twice": twice})
    return run(grade, functions, inputs, HINTS, cases=cases, groups=ranks.groups), inputs


def check_functions(grade: Grade, ranks: Ranks, cases: tuple = PLAIN) -> None:
    """Check what f and g pass on, what each adds up, and that they change no tensor of others."""
    result, inputs = functions_run(grade, ranks, cases)
    for rank, values in enumerate(result.values):
        for name, got in zip((F, G), values, strict=True):
            where = f"{NAMES[name]}, {ranks.words(rank)}"
            for number, (dtype, layout) in enumerate(cases):
                everyone, members = [one["cases"][number] for one in inputs], ranks.among(rank)
                given = [everyone[member] for member in members]
                expected = expected_of_function(name, everyone, given, members.index(rank), dtype)
                strides = f" (its tensors are {layout})" if layout != "plain" else ""
                check(grade, f"{where}, {dtype}{strides}: ", got["cases"][number], expected, result)
            for number, group in enumerate((ranks.among(rank), tuple(range(ranks.count)))):
                upstreams = [inputs[other]["twice"][number]["upstream"] for other in group]
                right = np.sum(upstreams, axis=0) if name == F else upstreams[group.index(rank)]
                message = (
                    f"each call keeps its own group in ctx: call {number + 1} of two with different groups is wrong"
                )
                gradient = {"the gradient": got["twice"][number]}
                check(grade, f"{where}: ", gradient, {"the gradient": Expected(right, message)}, result)


def expected_of_function(name: str, everyone: Given, given: Given, own: int, dtype: str) -> dict[str, Expected]:
    """Return what one case of f or g must give on member `own` of a group. `given`: the inputs of its members."""
    xs, upstreams = ([one[key] for one in given] for key in ("x", "upstream"))
    y = np.sum(xs, axis=0) if name == G else xs[own]
    gradient = np.sum(upstreams, axis=0) if name == F else upstreams[own]
    forward, backward = (shared.mistakes_of(direction, everyone, given, own) for direction in ("forward", "backward"))
    in_place = "others still use it; make a copy first, clone()"
    message = "{name} is not the sum over the group" if name == G else "{name} is not what this rank was given"
    return {
        "dtype": Expected(dtype, "expected a tensor of {expected} from forward, got {got}"),
        "x": Expected(xs[own], f"forward changes x in place: {in_place}", tolerance=EXACT),
        "upstream": Expected(upstreams[own], f"backward changes its gradient in place: {in_place}", tolerance=EXACT),
        "y": Expected(y, message, "the result", forward, tolerance=tolerance(dtype)),
        "y without graph": Expected(y, "", "the result under no_grad", forward, tolerance=tolerance(dtype)),
        "gradient": Expected(gradient, "", "the gradient", backward, tolerance=tolerance(dtype)),
        "gradient's dtype": Expected(dtype, "expected a gradient of {expected} from backward, got {got}"),
    }


def check_functions_messages(grade: Grade, ranks: Ranks) -> None:
    """Check that g sends in forward and f in backward, each its rank's own tensor, once."""
    result, inputs = functions_run(grade, ranks)
    for rank, given in enumerate(inputs):
        for (name, key), direction in (((F, "upstream"), "backward"), ((G, "x"), "forward")):
            for way in ("forward", "backward"):
                calls = shared.of_phase(result, rank, way, name)
                for case, tensors in zip(calls, given["cases"], strict=True):
                    payload = tensors[key] if way == direction else None
                    where = f"{NAMES[name]}, {way}, {ranks.words(rank)}"
                    shared.check_sum(grade, where, rank, case, payload, ranks.among(rank), DIRECTIONS)


# --- the layers ---


class WholeLayers:
    """The two layers of one group in one case, as one worker has them, and the part of each member."""

    def __init__(self, seed: int, count: int, group: tuple[int, ...], case: int) -> None:
        draw, dtype, leading = drawn.generator(seed, 42, count, *group, case), list(BYTES)[case], LEADING[case]
        ends = sorted(draw.choice(np.arange(1, OUTSIDE), len(group) - 1, replace=False))
        self.parts = np.split(
            draw.permutation(OUTSIDE), ends
        )  # each member's indices: not sorted, of different lengths
        shapes = ((INSIDE, OUTSIDE), (OUTSIDE,), (OUTSIDE, INSIDE), (INSIDE,))
        self.a, self.c, self.b, self.d = (numbers(draw, dtype, shape, 2) for shape in shapes)  # x A + c, inner B + d
        sizes = (INSIDE, OUTSIDE, OUTSIDE, INSIDE)
        self.x, self.inner, self.up_column, self.up_row = (numbers(draw, dtype, (*leading, size), 2) for size in sizes)
        if case == ZERO and len(group) > 1:
            self.inner[..., self.parts[-1]] = self.up_column[..., self.parts[-1]] = 0

    def given(self, member: int, noise: np.random.Generator) -> dict[str, dict[str, np.ndarray]]:
        """Return the inputs of one member: its own slices are correct, all else is noise."""
        part = self.parts[member]
        a, c, b = (noise.integers(3, 9, whole.shape).astype(np.float64) for whole in (self.a, self.c, self.b))
        a[:, part], c[part], b[part] = self.a[:, part], self.c[part], self.b[part]
        return {
            "column": {"weight": a, "bias": c, "indices": part, "x": self.x, "upstream": self.up_column[..., part]},
            "row": {"weight": b, "bias": self.d, "indices": part, "x": self.inner[..., part], "upstream": self.up_row},
        }

    def products(self, member: int) -> dict[tuple[str, str], np.ndarray]:
        """Return what a member must send: its part of the gradient of x in backward, its product in forward."""
        part = self.parts[member]
        return {
            ("backward", "column"): self.up_column[..., part] @ self.a[:, part].T,
            ("forward", "row"): self.inner[..., part] @ self.b[part],
        }

    def outputs(self, member: int) -> dict[str, dict[str, tuple[np.ndarray, Fields]]]:
        """Return layer -> name of a value -> the right value on a member, and mistake -> what it leaves instead."""
        part, n, up, up_row = self.parts[member], len(self.parts), self.up_column, self.up_row
        h, y = self.x @ self.a + self.c, self.inner @ self.b + self.d
        back = (up_row @ self.b.T) * (h > 0)
        own, own_gradient = self.products(member)["forward", "row"], self.products(member)["backward", "column"]

        def in_g(right: np.ndarray) -> tuple[np.ndarray, Fields]:
            words = f"{{name}} is {n} times too large: backward of g passes its gradient on as it is, and sums nothing"
            return right, {words: right * n}

        def whole_bias(right: np.ndarray) -> tuple[np.ndarray, Fields]:
            words = (
                f"{{name}} is 1/{n} of what is expected: the bias is whole on every rank; add it once, after g, and "
                "divide neither it nor its gradient"
            )
            return right, in_g(right)[1] | {words: right / n}

        use_f = "{name} is only this rank's part: use f before the product, so backward sums over the ranks"
        n_biases = y + (n - 1) * self.d
        in_row = {
            f"the bias is added {n} times: each rank adds it before the sum; add it once, after g": n_biases,
            "the bias is missing": y - self.d,
            "{name} is only this rank's part of the sum: use g after the product": own + self.d,
            "the sum was divided by the number of ranks": (y - self.d) / n + self.d,
        }
        return {
            "column": {
                "y": (h[..., part], {"the bias is missing": (self.x @ self.a)[..., part]}),
                "x": (up @ self.a.T, {use_f: own_gradient}),
                "weight": (outer(self.x, up)[:, part], {}),
                "bias": (total(up)[part], {}),
            },
            "row": {
                "y": (y, in_row),
                "x": in_g((up_row @ self.b.T)[..., part]),
                "weight": in_g(outer(self.inner, up_row)[part]),
                "bias": whole_bias(total(up_row)),
            },
            "pair": {
                "y": (np.maximum(h, 0) @ self.b + self.d, {}),
                "x": in_g(back @ self.a.T),
                "0.weight": in_g(outer(self.x, back)[:, part]),
                "0.bias": in_g(total(back)[part]),
                "2.weight": in_g(outer(np.maximum(h, 0), up_row)[part]),
                "2.bias": whole_bias(total(up_row)),
            },
        }


def outer(x: np.ndarray, upstream: np.ndarray) -> np.ndarray:
    """Return the gradient of a weight."""
    return x.reshape(-1, x.shape[-1]).T @ upstream.reshape(-1, upstream.shape[-1])


def total(upstream: np.ndarray) -> np.ndarray:
    """Return the gradient of a bias."""
    return upstream.reshape(-1, upstream.shape[-1]).sum(axis=0)


class LayersRun:
    """One run of both layers in all cases, with what is right for each rank."""

    def __init__(self, grade: Grade, ranks: Ranks, computes: bool) -> None:
        self.grade, self.ranks = grade, ranks
        self.wholes = {
            group: [WholeLayers(grade.seed, ranks.count, group, case) for case in range(len(BYTES))]
            for group in map(ranks.among, range(ranks.count))
        }
        self.inputs = [[self._given(rank, case) for case in range(len(BYTES))] for rank in range(ranks.count)]
        arguments: Fields = {"dtypes": list(BYTES), "groups": ranks.groups, "computes": computes}
        self.result = run(grade, layers, self.inputs, HINTS, **arguments)

    def whole(self, rank: int, case: int) -> tuple[WholeLayers, int]:
        """Return the layers of a rank's group, and its place in that group."""
        group = self.ranks.among(rank)
        return self.wholes[group][case], group.index(rank)

    def _given(self, rank: int, case: int) -> dict[str, dict[str, np.ndarray]]:
        whole, member = self.whole(rank, case)
        return whole.given(member, drawn.generator(self.grade.seed, 43, self.ranks.count, rank, case))

    def check_kept(self) -> None:
        """Check that each layer keeps copies of this rank's columns or rows as its only parameters."""
        for rank, values in enumerate(self.result.values):
            for case, dtype in enumerate(BYTES):
                for name in ("column", "row"):
                    expected = expected_slices(name, dtype, self.inputs[rank][case][name])
                    where = f"{NAMES[name]}, {self.ranks.words(rank)}, {dtype}: "
                    check(self.grade, where, values[case][f"{name} keeps"], expected)

    def check_computed(self) -> None:
        """Check that outputs and gradients are those of one worker."""
        shared.check_groups(self.grade, self.result, self.ranks)
        called = {"y": "the output", "x": "the gradient of x"}
        for rank, values in enumerate(self.result.values):
            for case, dtype in enumerate(BYTES):
                whole, member = self.whole(rank, case)
                for layer, outputs in whole.outputs(member).items():
                    got = values[case][layer]
                    expected = {"dtype": Expected(dtype, "expected an output of {expected}, got {got}")}
                    for key, (right, mistakes) in outputs.items():
                        none = f"{key} has no gradient on rank {rank}: every rank has a part in it"
                        message, name = none if got[key] is None else "", called.get(key, f"the gradient of {key}")
                        expected[key] = Expected(right, message, name, mistakes, tolerance=tolerance(dtype, 10.0))
                    expected["intact"] = Expected(True, "the input, or the gradient from above, is changed in place")
                    where = f"{NAMES[layer]}, {self.ranks.words(rank)}, {dtype}: "
                    check(self.grade, where, got, expected, self.result)

    def check_messages(self) -> None:
        """Check that RowParallel sends its product in forward, ColumnParallel its part of the gradient in backward, and
        neither anything else."""
        ways = [(event, name) for name in ("column", "row") for event in ("__init__", "forward", "backward")]
        for rank in range(self.ranks.count):
            for event, name in ways:
                for case, phase in enumerate(shared.of_phase(self.result, rank, event, name)):
                    whole, member = self.whole(rank, case)
                    dtype = list(BYTES)[case]
                    payload = whole.products(member).get((event, name))  # None: nothing may be sent
                    where = f"{NAMES[name]}, {event}, {self.ranks.words(rank)}, {dtype}"
                    shared.check_sum(self.grade, where, rank, phase, payload, self.ranks.among(rank), ONE_SUM)
                    if strange := next((call for call in phase.calls if call.dtype != dtype), None):
                        words = f"the message is of {strange.dtype}, expected {dtype}: more bytes than needed"
                        self.grade.fail(f"{where}: {words}")


def expected_slices(name: str, dtype: str, given: Mapping[str, np.ndarray]) -> dict[str, Expected]:
    """Return what a layer must keep of the whole layer."""
    part, axis = given["indices"], 1 if name == "column" else 0
    right = {"weight": np.take(given["weight"], part, axis), "bias": given["bias"]}
    if name == "column":
        right["bias"] = given["bias"][part]
    expected = {}
    for key in right:
        message = f"expected a Parameter in self.{key}, got {{got}}: Parameter(...)"
        expected[f"{key}'s class"] = Expected("Parameter", message)
    expected["more"] = Expected([], "there is a parameter {got}: keep only this rank's slices, in weight and bias")
    expected["frozen"] = Expected([], "{got} requires no gradient, so it cannot be trained")
    for key, value in right.items():
        cut = key == "weight" or name == "column"  # the bias of a RowParallel is whole
        mistakes = wrong_slices(name, key, given, axis if key == "weight" else 0) if cut else {}
        no_row = "the bias of a RowParallel is the layer's, whole and not divided: it belongs to no row"
        called = f"{key} (its indices are {part.tolist()})"
        expected[key] = Expected(value, "" if cut else no_row, called, mistakes, tolerance=EXACT)
        expected[f"{key}'s dtype"] = Expected(dtype, f"{key} is of {{got}}, expected the dtype of the layer")
        if cut:
            message = (
                f"{key} shares its memory with the whole layer, which stays in memory for it: expected {{expected}} "
            )
            message += "bytes of its own, got a view of {got}; copy the slice, clone()"
            expected[f"{key} bytes"] = Expected(value.size * BYTES[dtype], message)
        training = f"{key} is the layer's own, so that training changes the caller's layer: copy it, clone()"
        expected[f"{key} is shared"] = Expected(False, training)
    return expected | {
        "changed": Expected([], "your code changes the whole layer's {got}, which belongs to the caller")
    }


def wrong_slices(name: str, key: str, given: Mapping[str, np.ndarray], axis: int) -> dict[str, np.ndarray]:
    """Return mistake -> the slice that it takes instead."""
    whole, part = given[key], given["indices"]
    first, ordered = np.arange(len(part)), np.sort(part)
    return {
        f"the {key} is whole: take this rank's {name}s": whole,
        f"the first {len(part)} {name}s were taken; the indices say which ones": np.take(whole, first, axis),
        f"the {name}s are sorted; expected them in the order of the indices": np.take(whole, ordered, axis),
    }


# --- the graded tests ---


@graded("b.11")
def test_f_and_g_sum_in_one_direction_and_pass_on_in_the_other(grade: Grade) -> None:
    for ranks in shared.ALL:
        check_functions(grade, ranks)
    check_functions(grade, TWO, STRIDED)


@graded("b.11")
def test_only_one_tensor_travels_in_each_direction(grade: Grade) -> None:
    for ranks in (THREE, PAIRS):
        check_functions_messages(grade, ranks)


@graded("b.11")
def test_a_rank_keeps_copies_of_its_columns_or_rows(grade: Grade) -> None:
    grade.imports_only_allowed(FILE)
    for ranks in shared.ALL:
        LayersRun(grade, ranks, computes=False).check_kept()


@graded("b.11")
def test_both_layers_compute_what_one_worker_computes(grade: Grade) -> None:
    for ranks in shared.ALL:
        layers_run = LayersRun(grade, ranks, computes=True)
        layers_run.check_computed()
        layers_run.check_messages()
