"""The partitions, p.1: which layers _split_module puts together, on which device, and that they are no copies.

A case is drawn from its answer: first the partitions, then layers that belong in them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

from grader.grading import Grade
from grader.in_rank import in_rank, run
from grader.ranks.phrases import short
from grader.wire.values import Fields

if TYPE_CHECKING:  # what a function finds in a rank
    from grader.inside.tools import Context, nn, torch

graded = pytest.mark.graded
Layer = Fields
Place = tuple[str, list[int]]  # a device and the numbers of its layers
WRONG_DEVICES = (
    "the layers are divided correctly, but the devices are wrong: return the device of each partition's layers"
)


# --- what a rank does ---


def built(layer: Layer, leaves: list[nn.Module], label: Callable[..., nn.Module]) -> nn.Module:
    """Build a layer from its description, and append it to `leaves`; build a Sequential for a nest."""
    module: nn.Module
    if "layers" in layer:
        module = nn.Sequential(*(built(inner, leaves, label) for inner in layer["layers"]))
    else:
        module = nn.Linear(3, 3, device=layer["on"]) if layer["on"] else nn.ReLU()
        leaves.append(module)
    return label(module, layer["label"]) if layer["label"] else module


def inventory(modules: nn.Module) -> list[tuple[str, int]]:
    """Return all modules by name with their mode, and all parameters by name with their device."""
    parts = [(f"{name}: {type(part).__name__} {part.training}", id(part)) for name, part in modules.named_modules()]
    return parts + [(f"{name} on {p.device} {p.requires_grad}", id(p)) for name, p in modules.named_parameters()]


def described(result: object, leaves: list[nn.Module]) -> Fields | str:
    """Return the devices, and each partition's class with the numbers of its layers; a text if the form is wrong."""
    from itertools import islice

    def kind(value: object) -> str:
        return type(value).__name__[:60]

    if not isinstance(result, tuple | list) or len(result) != 2 or type(result[0]) is nn.Sequential:
        return f"a {kind(result)}"
    for name, part in zip(("partitions", "devices"), result, strict=True):
        if not hasattr(part, "__len__") or not hasattr(part, "__getitem__") or isinstance(part, dict | str):
            return f"a {kind(part)} of {name}"
        if len(part) > 50:
            return f"{min(len(part), 10**6)} {name} for a few layers"
    if wrong := [device for device in result[1] if not isinstance(device, torch.device | None)]:
        return f"a {kind(wrong[0])} as a device, expected a torch.device: Pipe asks it for its type"
    numbers, partitions = {id(leaf): number for number, leaf in enumerate(leaves)}, []
    for partition in result[0]:
        layers = islice(partition, 50) if hasattr(partition, "__iter__") else ()
        partitions.append([kind(partition), *(numbers.get(id(layer), kind(layer)) for layer in layers)])
    return {"partitions": partitions, "devices": [str(device) for device in result[1]]}


@in_rank(uses=[built, inventory, described], join=False)
def split(context: Context, lesson: ModuleType, inputs: Fields) -> object:
    """Yield what _split_module returns for each model, and what it changes."""
    for number, layers in enumerate(context.arguments["models"]):
        leaves: list[nn.Module] = []
        modules = nn.Sequential(*(built(layer, leaves, lesson.WithDevice) for layer in layers))
        before = inventory(modules)
        context.during = f"_split_module of model {number}"
        first = lesson._split_module(modules)
        report = described(first, leaves)
        if isinstance(report, str):
            yield report
            continue
        if inventory(modules) != before:
            yield report | {"changed": "the model"}
            continue
        second = lesson._split_module(modules)
        differs = described(second, leaves) != report
        shared = any(one is another for one, another in zip(first, second, strict=False))
        changed = "the first result" if shared or described(first, leaves) != report else ""
        yield report | {"changed": changed, "differs": differs}


# --- the cases ---


@dataclass
class SplitCase:
    """A model, how it must be cut, and the numbers of the layers without a device."""

    layers: list[Layer]
    places: list[Place]
    no_device: set[int] = field(default_factory=set)

    @property
    def nested(self) -> bool:
        return any("layers" in layer for layer in self.layers)


def layer(on: str = "cpu", label: str = "") -> Layer:
    """Describe a layer with parameters on a device ("": it has none), with a label or without."""
    return {"on": on, "label": label}


def nest(*layers: Layer, label: str = "") -> Layer:
    return {"layers": list(layers), "label": label}


A, B, NOWHERE = layer(label="cpu:0"), layer(label="cpu:1"), layer("")


def case(*partitions: tuple[str, Sequence[Layer]]) -> SplitCase:
    """Return a flat model of these partitions: a device, and the layers that belong there."""
    layers: list[Layer] = []
    places: list[Place] = []
    for device, own in partitions:
        places.append((device, [*range(len(layers), len(layers) + len(own))]))
        layers += own
    return SplitCase(layers, places, {number for number, one in enumerate(layers) if one == NOWHERE})


def labelled(*partitions: tuple[str, int]) -> SplitCase:
    """Return a flat model of (device, count): each partition has `count` layers with the label of its device."""
    return case(*((device, [layer(label=device)] * count) for device, count in partitions))


# --- known mistakes ---


def cause_of(one: SplitCase, got: list[Place]) -> str:
    """Return the known mistake that gives these partitions, or what is wrong with them."""
    wanted = [number for _, numbers in one.places for number in numbers]
    layers: list[Any] = [number for _, numbers in got for number in numbers]
    kind = short(next((layer for layer in layers if isinstance(layer, str)), ""), 60)
    if kind == "WithDevice":
        return "a partition contains the label (WithDevice): _assemble_partition removes labels"
    if kind == "Sequential":
        return "a partition contains a Sequential: flatten nested ones (see _layers)"
    if kind:
        return f"a partition contains a {kind} that is none of the given layers: take the layers themselves, not copies"
    if twice := sorted({number for number in layers if layers.count(number) > 1}):
        return f"layer {twice[0]} is in two partitions: start a new partition when one is complete"
    if missing := [number for number in wanted if number not in layers]:
        return cause_of_missing(missing, one)
    if one.no_device and layers_with_device(one, got) == layers_with_device(one, one.places):
        return cause_of_misplaced(one, got)
    if any(sorted(numbers) != list(range(min(numbers), max(numbers) + 1)) for _, numbers in got if numbers):
        advice = "start a new partition when the data returns to a device"
        return f"layers on the same device that are not adjacent share a partition: {advice}"
    if layers != wanted:
        return "the order of the layers has changed: keep the given order"
    if not one.nested and [numbers for _, numbers in got] == [numbers for _, numbers in one.places]:
        devices, right = ([device for device, _ in places] for places in (got, one.places))
        if devices[:-1] == right[1:] and len(right) > 1:
            return "each partition has the device of the next one: store the device before you replace it"
        return WRONG_DEVICES
    begins = {numbers[0] for _, numbers in got}
    missed = [numbers[0] for _, numbers in one.places if numbers[0] not in begins]
    if missed and {number - 1 for number in missed} <= one.no_device:
        change = f"the change of device at layer {missed[0]}, behind layer {missed[0] - 1}, which has none, is missed"
        return f"{change}: a layer without a device must leave the current device as it is"
    if len(got) == 1 and len(one.places) > 1:
        return (
            "all layers are in one partition: call _retrieve_device for each layer, which reads the labels, and "
            "compare whole devices: cpu:0 is not cpu:1"
        )
    if one.nested:
        inner = "a label on an inner layer takes precedence; a label on the Sequential applies to the others inside"
        return f"flatten nested Sequentials (see _layers): {inner}"
    return "start a new partition where the device changes, and only there"


def cause_of_missing(missing: list[int], one: SplitCase) -> str:
    number = missing[0]
    if set(missing) <= one.no_device:
        return f"layer {number} has no device and is in no partition: {rule_without_device(number, one)}"
    if set(one.places[-1][1]) <= set(missing):
        return "the last partition is missing: after the loop, add the partition that is still open"
    firsts = [numbers[0] for _, numbers in one.places[1:]]
    where = ", the first after a change of device," if number in firsts else ""
    return f"layer {number}{where} is in no partition: every layer belongs to one"


def rule_without_device(number: int, one: SplitCase) -> str:
    """Return where a layer without a device belongs."""
    at_the_start = set(range(number)) <= one.no_device
    where = "after it, since there is none before it" if at_the_start else "before it"
    return f"a layer without a device joins the partition of the layer {where}"


def layers_with_device(one: SplitCase, places: Sequence[Place]) -> list[list[int]]:
    """Return the partitions without the layers that have no device."""
    return [kept for _, numbers in places if (kept := [number for number in numbers if number not in one.no_device])]


def cause_of_misplaced(one: SplitCase, got: list[Place]) -> str:
    """Say where layers without a device are, if all other layers are where they belong."""
    alone = [number for _, numbers in got if set(numbers) <= one.no_device for number in numbers]
    if alone and len(one.places) < len(got):
        return f"layer {alone[0]} has no device, but has its own partition: {rule_without_device(alone[0], one)}"
    right = {number: numbers for _, numbers in one.places for number in numbers}
    wrong = [number for _, numbers in got for number in numbers if right[number] != numbers and number in one.no_device]
    if not wrong:
        return WRONG_DEVICES
    return f"layer {wrong[0]} has no device and is in the wrong partition: {rule_without_device(wrong[0], one)}"


# --- what is judged ---


def check_cases(grade: Grade, cases: list[SplitCase]) -> None:
    """Check how each model is cut, and that a second call cuts it in the same way."""
    (results,) = run(grade, split, [None], models=[one.layers for one in cases]).values
    for one, result in zip(cases, results, strict=True):
        if isinstance(result, str):
            grade.fail(observed=f"expected a list of partitions and a list of devices, got {short(result, 200)}")
        parts, devices = result["partitions"], result["devices"]
        if len(parts) != len(devices):
            grade.fail(f"got {len(parts)} partitions and {len(devices)} devices: return one device for each partition")
        if strange := next((part[0] for part in parts if part[0] != "Sequential"), ""):
            words = f"expected every partition to be an nn.Sequential, got a {short(strange, 60)}"
            grade.fail(f"{words}: build it with _assemble_partition")
        got = [(str(device), part[1:]) for device, part in zip(devices, parts, strict=True)]
        if got != one.places:
            rows = f"  layers   {model_in_words(one.layers)}\n  expected {in_words(one.places)}"
            grade.fail(f"{cause_of(one, got)}\n{rows}\n  got      {in_words(got)}")
        if result["changed"] == "the model":
            others = "the optimizer, a checkpoint or a second Pipe still needs its modules"
            grade.fail(
                f"the model that was given is changed: {others}; iterate over _layers(modules) without changing "
                "it, and move no layer: a label is only a name"
            )
        if result["changed"] or result["differs"]:
            what = "changes what the first has returned" if result["changed"] else "gives a different result"
            grade.fail(f"a second call for the same model {what}: begin every call with empty lists")


def in_words(places: Sequence[Place]) -> str:
    """Return the partitions as `cpu:0: 0 1 | cpu:1: 2`."""
    parts = [f"{device}: {' '.join(map(str, numbers)) or '(nothing)'}" for device, numbers in places]
    return short(" | ".join(parts) or "none", 600)


def model_in_words(layers: Sequence[Layer]) -> str:
    """Return the model as `0 cpu:0, 1 no device, (2 cpu:1, 3 cpu:1) cpu:0`."""
    count = 0

    def words(one: Layer) -> str:
        nonlocal count
        if "layers" in one:
            return f"({', '.join(map(words, one['layers']))}) {one['label']}".strip()
        count += 1
        return f"{count - 1} {one['label'] or one['on'] or 'no device'}"

    return ", ".join(map(words, layers))


# --- the graded tests ---


@graded("p.1", weight=2)
def test_consecutive_layers_on_one_device_form_one_partition(grade: Grade) -> None:
    cases = [labelled(("cpu:0", 2), ("cpu:1", 2)), labelled(("cpu:0", 1)), labelled(("cpu:1", 1), ("cpu:0", 1))]
    for devices in (["cpu:0", "cpu:1", "cpu:2"], ["cpu:3", "cpu:1"], ["cpu:0"]):
        cases.append(labelled(*((device, int(grade.draw.integers(1, 4))) for device in devices)))
    cases.append(case(("cpu", [layer(), layer()]), ("meta", [layer("meta")])))  # where the parameters really lie
    named = layer("cpu", "meta")  # a label moves no layer
    cases.append(case(("meta", [named]), ("cpu:0", [A]), ("meta", [named])))
    check_cases(grade, cases)


@graded("p.1")
def test_a_device_that_comes_again_makes_another_partition(grade: Grade) -> None:
    counts = grade.draw.permutation([1, 2, *grade.draw.integers(1, 4, int(grade.draw.integers(2, 5)))])
    runs = [(f"cpu:{number % 2}", int(count)) for number, count in enumerate(counts)]
    check_cases(grade, [labelled(("cpu:0", 1), ("cpu:1", 1), ("cpu:0", 1)), labelled(*runs)])


@graded("p.1")
def test_a_layer_without_parameters_joins_its_neighbour(grade: Grade) -> None:
    some = [NOWHERE] * int(grade.draw.integers(1, 4))
    cases = [
        case(("cpu:0", [A, NOWHERE]), ("cpu:1", [B, NOWHERE])),
        case(("cpu:0", [A, *some, A]), ("cpu:1", [B])),
        case(("cpu:0", [NOWHERE, NOWHERE, A]), ("cpu:1", [B])),
        case(("meta", [layer("meta"), NOWHERE, layer("meta")])),
        case(("cpu", [NOWHERE, NOWHERE])),
    ]
    check_cases(grade, cases)


@graded("p.1")
def test_nested_sequentials_are_opened(grade: Grade) -> None:
    """A label on an inner layer takes precedence over one on the Sequential around it."""
    cases = [
        SplitCase([nest(A, B), B], [("cpu:0", [0]), ("cpu:1", [1, 2])]),
        SplitCase([A, nest(nest(B), A)], [("cpu:0", [0]), ("cpu:1", [1]), ("cpu:0", [2])]),
        SplitCase([nest(layer(), B, label="cpu:0"), B], [("cpu:0", [0]), ("cpu:1", [1, 2])]),
        SplitCase([nest(layer(), nest(NOWHERE), label="cpu:1"), nest(A)], [("cpu:1", [0, 1]), ("cpu:0", [2])]),
    ]
    check_cases(grade, cases)


@graded("p.1", absence=True)
def test_the_split_imports_only_what_the_course_allows(grade: Grade) -> None:
    grade.imports_only_allowed("pipeline/partition.py")
