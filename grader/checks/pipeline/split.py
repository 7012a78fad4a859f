"""Judges _split_module: which layers form a partition, on which device, and that they are the layers themselves.

A case is drawn from its answer: first the partitions, then layers that belong in them. Weights and inputs are drawn as
well, and what each partition computes is compared with what numpy computes for its layers.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from grader.checks.pipeline.waits import mark
from grader.grading import Grade
from grader.ranks.phrases import short
from grader.wire.values import Fields

Layer = Fields
Place = tuple[str, list[int]]  # a device and the numbers of its layers
WRONG_DEVICES = (
    "the layers are divided correctly, but the devices are wrong: return the device of each partition's layers"
)
WIDTH = 3  # features of a layer
EXAMPLES = 4
MOST = 60  # partitions, or layers in one, of which a message tells


@dataclass
class Case:
    """A model, how it must be cut, and the numbers of the layers without a device."""

    layers: list[Layer]
    places: list[Place]
    homeless: set[int] = field(default_factory=set)

    @property
    def nested(self) -> bool:
        return any("layers" in layer for layer in self.layers)


def layer(on: str = "cpu", label: str = "") -> Layer:
    """A layer with parameters on a device ("": it has none), with a label or without."""
    return {"on": on, "label": label}


def nest(*layers: Layer, label: str = "") -> Layer:
    return {"layers": list(layers), "label": label}


NOWHERE = layer("")


def case(*partitions: tuple[str, Sequence[Layer]]) -> Case:
    """A flat model from its partitions: a device, and the layers that belong there."""
    layers: list[Layer] = []
    places: list[Place] = []
    for device, own in partitions:
        places.append((device, [*range(len(layers), len(layers) + len(own))]))
        layers += own
    return Case(layers, places, {number for number, one in enumerate(layers) if one == NOWHERE})


def labelled(*partitions: tuple[str, int]) -> Case:
    """Each partition has so many layers with the label of its device."""
    return case(*((device, [layer(label=device)] * count) for device, count in partitions))


def drawn(places: Sequence[Place]) -> str:
    """`cpu:0: 0 1 | cpu:1: 2`"""
    parts = [f"{device}: {' '.join(map(str, numbers)) or '(nothing)'}" for device, numbers in places]
    return short(" | ".join(parts) or "none", 600)


def check(grade: Grade, cases: list[Case]) -> None:
    """Every model is cut as its case says, and once more when it is cut again."""
    models = [case.layers for case in cases]
    each = [_numbers(grade, one) for one in cases]
    (results,) = grade.values("grader.probes.pipeline.split:split", 1, models=models, each=[each], mark=mark(each))
    for one, numbers, result in zip(cases, each, results, strict=True):
        if isinstance(result, str):
            grade.fail(f"expected a list of partitions and a list of devices, got {short(result, 200)}")
        _check_form(grade, result)
        got = [(str(device), part[1:]) for device, part in zip(result["devices"], result["partitions"], strict=True)]
        if got != one.places:
            cut = f"  layers   {describe(one.layers)}\n  expected {drawn(one.places)}\n  got      {drawn(got)}"
            grade.fail(f"{_cause(one, got)}\n{cut}")
        if result["model_changed"]:
            grade.fail(
                "the model that was given is changed: its modules are the caller's, and the optimizer, a checkpoint or "
                "a second Pipe still needs them; iterate over _layers(modules) without changing the model"
            )
        if result["changed"] or result["other"]:
            what = "changes what the first has returned" if result["changed"] else "gives a different result"
            grade.fail(f"a second call for the same model {what}: begin every call with empty lists")
        _check_outputs(grade, one, numbers, result["outputs"])


def _leaves(layers: Sequence[Layer]) -> Iterator[Layer]:
    for one in layers:
        yield from _leaves(one["layers"]) if "layers" in one else [one]


def _numbers(grade: Grade, one: Case) -> dict[str, np.ndarray]:
    """An input, and for every layer a matrix and a vector."""
    count = sum(len(numbers) for _, numbers in one.places)
    shapes = {"x": (EXAMPLES, WIDTH), "weights": (count, WIDTH, WIDTH), "biases": (count, WIDTH)}
    return {name: grade.draw.normal(size=shape) for name, shape in shapes.items()}


def _check_outputs(grade: Grade, one: Case, drawn: dict[str, np.ndarray], outputs: list[Any]) -> None:
    """Each partition computes what its layers compute, one after the other. Nothing is computed on `meta`."""
    x, linear = drawn["x"], [bool(leaf["on"]) for leaf in _leaves(one.layers)]
    for place, (device, numbers) in enumerate(one.places):
        for number in numbers:
            right = x @ drawn["weights"][number].T + drawn["biases"][number]
            x = right if linear[number] else np.maximum(x, 0)
        if device == "meta":
            return
        got = outputs[place] if place < len(outputs) else None
        if got is None or got.shape != x.shape or not np.allclose(got, x):
            grade.fail(
                f"partition {place} of {describe(one.layers)} does not compute what its layers {numbers} compute one "
                "after the other: a partition is a Sequential of the layers themselves"
            )


def _check_form(grade: Grade, result: Fields) -> None:
    parts, devices = result["partitions"], result["devices"]
    if len(parts) != len(devices):
        grade.fail(f"got {len(parts)} partitions and {len(devices)} devices: return one device for each partition")
    if len(parts) > MOST or any(len(part) > MOST for part in parts):
        grade.fail(f"got {len(parts)} partitions or more than {MOST} layers in one, for a model of a few layers")
    if strange := next((part[0] for part in parts if part[0] != "Sequential"), ""):
        kind = short(strange, 60)
        grade.fail(f"expected every partition to be an nn.Sequential, got a {kind}: build it with _assemble_partition")


def describe(layers: Sequence[Layer]) -> str:
    """`0 cpu:0, 1 no device, (2 cpu:1, 3 cpu:1) cpu:0`: the model as it was given."""
    count = 0

    def words(one: Layer) -> str:
        nonlocal count
        if "layers" in one:
            return f"({', '.join(map(words, one['layers']))}) {one['label']}".strip()
        count += 1
        return f"{count - 1} {one['label'] or one['on'] or 'no device'}"

    return ", ".join(map(words, layers))


def _cause(one: Case, got: list[Place]) -> str:
    """The known mistake that cuts so, or what is to be seen."""
    wanted = [number for _, numbers in one.places for number in numbers]
    found: list[Any] = [number for _, numbers in got for number in numbers]
    kinds = [kind for kind in found if isinstance(kind, str)]
    if kinds:
        return _strange_kind(short(kinds[0], 60))
    twice = sorted({number for number in found if found.count(number) > 1})
    if twice:
        return f"layer {twice[0]} is in two partitions: start a new partition when one is complete"
    if missing := [number for number in wanted if number not in found]:
        return _missing(missing, one)
    if one.homeless and _without(one.homeless, got) == _without(one.homeless, one.places):
        return _homeless_astray(one, got)
    return _wrong_cut(one, got, wanted, found)


def _strange_kind(kind: str) -> str:
    if kind == "WithDevice":
        return "a partition contains the label (WithDevice): _assemble_partition removes labels"
    if kind == "Sequential":
        return "a partition contains a Sequential: flatten nested ones (see _layers)"
    return f"a partition contains a {kind} that is none of the given layers: take the layers themselves, not copies"


def _missing(missing: list[int], one: Case) -> str:
    number = missing[0]
    if set(missing) <= one.homeless:
        return f"layer {number} has no device and is in no partition: {_rule(number, one)}"
    if len(missing) == sum(len(numbers) for _, numbers in one.places):
        return "no layer is in a partition: append each to the current one, and keep every partition that is complete"
    if set(one.places[-1][1]) <= set(missing):
        return "the last partition is missing: also add it when there are no more layers"
    firsts = [numbers[0] for _, numbers in one.places[1:]]
    where = ", the first after a change of device," if number in firsts else ""
    return f"layer {number}{where} is in no partition: every layer belongs to one"


def _rule(number: int, one: Case) -> str:
    """Return where a layer without a device belongs."""
    at_the_start = set(range(number)) <= one.homeless
    where = "after it, since there is none before it" if at_the_start else "before it"
    return f"a layer without a device joins the partition of the layer {where}"


def _without(homeless: set[int], places: Sequence[Place]) -> list[list[int]]:
    """Return the cut of the layers that have a device."""
    return [kept for _, numbers in places if (kept := [number for number in numbers if number not in homeless])]


def _homeless_astray(one: Case, got: list[Place]) -> str:
    """All other layers are where they belong."""
    lonely = [number for _, numbers in got if set(numbers) <= one.homeless for number in numbers]
    if lonely and len(one.places) < len(got):
        return f"layer {lonely[0]} has no device, but has its own partition: {_rule(lonely[0], one)}"
    if [numbers for _, numbers in got] == [numbers for _, numbers in one.places]:
        return WRONG_DEVICES
    right = {number: numbers for _, numbers in one.places for number in numbers}
    number = next((n for _, numbers in got for n in numbers if right[n] != numbers and n in one.homeless), 0)
    return f"layer {number} has no device and is in the wrong partition: {_rule(number, one)}"


def _wrong_cut(one: Case, got: list[Place], wanted: list[int], found: list[int]) -> str:
    if any(sorted(numbers) != list(range(min(numbers), max(numbers) + 1)) for _, numbers in got if numbers):
        return (
            "layers on the same device that are not adjacent share a partition: start a new partition when the data "
            "returns to a device"
        )
    if found != wanted:
        return "the order of the layers has changed: keep the given order"
    if not one.nested and [numbers for _, numbers in got] == [numbers for _, numbers in one.places]:
        return WRONG_DEVICES
    if len(got) == 1 and len(one.places) > 1:
        return "all layers are in one partition: call _retrieve_device for each layer; it reads the labels"
    if one.nested:
        return (
            "flatten nested Sequentials (see _layers): a label on an inner layer takes precedence; a label on the "
            "Sequential applies to the other layers inside"
        )
    return "start a new partition where the device changes, and only there"


def check_neighbours(grade: Grade) -> None:
    """Runs of one device, drawn; by labels, and by where the parameters really lie."""
    cases = [labelled(("cpu:0", 2), ("cpu:1", 2)), labelled(("cpu:0", 1)), labelled(("cpu:1", 1), ("cpu:0", 1))]
    for devices in (["cpu:0", "cpu:1", "cpu:2"], ["cpu:3", "cpu:1"], ["cpu:0"]):
        cases.append(labelled(*((device, int(grade.draw.integers(1, 4))) for device in devices)))
    cases.append(case(("cpu", [layer(), layer()]), ("meta", [layer("meta")])))
    check(grade, cases)


def check_back_again(grade: Grade) -> None:
    """A-B-A makes three partitions."""
    counts = grade.draw.permutation([1, 2, *grade.draw.integers(1, 4, int(grade.draw.integers(2, 5)))])
    runs = [(f"cpu:{number % 2}", int(count)) for number, count in enumerate(counts)]
    check(grade, [labelled(("cpu:0", 1), ("cpu:1", 1), ("cpu:0", 1)), labelled(*runs)])


def check_without_parameters(grade: Grade) -> None:
    """A layer without a device joins the one before it, or at the start the one after it."""
    a, b = layer(label="cpu:0"), layer(label="cpu:1")
    some = [NOWHERE] * int(grade.draw.integers(1, 4))
    check(
        grade,
        [
            case(("cpu:0", [a, NOWHERE]), ("cpu:1", [b, NOWHERE])),
            case(("cpu:0", [a, *some, a]), ("cpu:1", [b])),
            case(("cpu:0", [NOWHERE, NOWHERE, a]), ("cpu:1", [b])),
            case(("meta", [layer("meta"), NOWHERE, layer("meta")])),
            case(("cpu", [NOWHERE, NOWHERE])),
        ],
    )


def check_nested(grade: Grade) -> None:
    """Nested Sequentials are opened; a label inside counts, a label around holds for what has none of its own."""
    a, b = layer(label="cpu:0"), layer(label="cpu:1")
    cases = [
        Case([nest(a, b), b], [("cpu:0", [0]), ("cpu:1", [1, 2])]),
        Case([a, nest(nest(b), a)], [("cpu:0", [0]), ("cpu:1", [1]), ("cpu:0", [2])]),
        Case([nest(layer(), b, label="cpu:0"), b], [("cpu:0", [0]), ("cpu:1", [1, 2])]),
        Case([nest(layer(), nest(layer("")), label="cpu:1"), nest(a)], [("cpu:1", [0, 1]), ("cpu:0", [2])]),
    ]
    check(grade, cases)
