"""Judges _split_module: which layers form a partition, on which device, and that they are the layers themselves."""

from itertools import count
from typing import Any

from grader.grading import Grade

Layer = dict[str, Any]
Place = tuple[str, list[int]]  # a device and the numbers of its layers


def layer(on: str = "cpu", label: str = "") -> Layer:
    """A layer with parameters on a device ("": it has none), with a label or without."""
    return {"on": on, "label": label}


def nest(*layers: Layer, label: str = "") -> Layer:
    return {"layers": list(layers), "label": label}


def expected_places(layers: list[Layer]) -> list[Place]:
    """What the rule gives. Layers are numbered in order, those inside nested ones too."""
    numbers = count()
    places: list[Place] = []
    homeless: list[int] = []

    def walk(row: list[Layer], inherited: str) -> None:
        for one in row:
            label = one["label"] or inherited
            if "layers" in one:
                walk(one["layers"], label)
                continue
            number, device = next(numbers), label or one["on"]
            if not device or (places and places[-1][0] == device):
                (places[-1][1] if places else homeless).append(number)
            else:
                places.append((device, [*homeless, number]))
                homeless.clear()

    walk(layers, "")
    return places or [("cpu", homeless)]


def drawn(places: list[Place]) -> str:
    """`cpu:0: 0 1 | cpu:1: 2`"""
    return " | ".join(f"{device}: {' '.join(map(str, numbers)) or '(nothing)'}" for device, numbers in places) or "none"


def check(grade: Grade, models: list[list[Layer]]) -> None:
    """Every model is cut as the rule says."""
    (told,) = grade.values("grader.probes_pipeline:split", 1, models=models)
    for layers, result in zip(models, told, strict=True):
        if isinstance(result, str):
            grade.fail(f"expected a list of partitions and a list of devices, got {result}")
        parts, devices = result["partitions"], result["devices"]
        if len(parts) != len(devices):
            grade.fail(
                f"got {len(parts)} partitions and {len(devices)} devices: a partition and its device go together"
            )
        if strange := next((part[0] for part in parts if part[0] != "Sequential"), ""):
            grade.fail(
                f"expected every partition to be an nn.Sequential, got a {strange}: _assemble_partition makes it"
            )
        got = [(device, part[1:]) for device, part in zip(devices, parts, strict=True)]
        expected = expected_places(layers)
        if got != expected:
            words = _cause(layers, expected, got)
            grade.fail(f"{words}\n  layers   {describe(layers)}\n  expected {drawn(expected)}\n  got      {drawn(got)}")


def describe(layers: list[Layer]) -> str:
    """`0 cpu:0, 1 nowhere, (2 cpu:1, 3 cpu:1) cpu:0`: the model as it was given."""
    numbers = count()

    def words(one: Layer) -> str:
        if "layers" in one:
            return f"({', '.join(map(words, one['layers']))}) {one['label']}".strip()
        return f"{next(numbers)} {one['label'] or one['on'] or 'nowhere'}"

    return ", ".join(map(words, layers))


def _cause(layers: list[Layer], expected: list[Place], got: list[Place]) -> str:
    """The known mistake that cuts so, or what is to be seen."""
    wanted = [number for _, numbers in expected for number in numbers]
    found: list[Any] = [number for _, numbers in got for number in numbers]
    kinds = [kind for kind in found if isinstance(kind, str)]
    if kinds:
        return _strange_kind(kinds[0])
    twice = sorted({number for number in found if found.count(number) > 1})
    if twice:
        return f"layer {twice[0]} is in two partitions: is the current partition begun anew once it is complete?"
    if missing := [number for number in wanted if number not in found]:
        return _missing(missing, expected)
    return _wrong_cut(layers, expected, got, wanted, found)


def _strange_kind(kind: str) -> str:
    if kind == "WithDevice":
        return "a partition holds the label itself: _assemble_partition takes labels off"
    if kind == "Sequential":
        return "a partition holds a Sequential: nested ones are to be opened, see _layers"
    return f"a partition holds a {kind} that is none of the given layers: take the layers themselves, not copies"


def _missing(missing: list[int], expected: list[Place]) -> str:
    if set(expected[-1][1]) <= set(missing):
        return "the last partition is missing: it is complete when there are no more layers"
    firsts = [numbers[0] for _, numbers in expected[1:]]
    where = "the first after a change of device" if missing[0] in firsts else "which belongs to a partition as well"
    return f"layer {missing[0]} is in no partition: it is {where}"


def _wrong_cut(
    layers: list[Layer], expected: list[Place], got: list[Place], wanted: list[int], found: list[int]
) -> str:
    homeless = _homeless(layers)
    lonely = [place for place in got if place not in expected and set(place[1]) <= homeless]
    if lonely and lonely[0] == got[0]:
        return "layers that lie nowhere at the very start have a partition of their own: they join the layer after them"
    if lonely:
        return "a layer that lies nowhere has a partition of its own: it joins the layer before it"
    if any(sorted(numbers) != list(range(min(numbers), max(numbers) + 1)) for _, numbers in got if numbers):
        return "layers of one device that are no neighbours share a partition: the data comes back to a device later"
    if found != wanted:
        return "the layers are in another order: they compute one after the other, as they are given"
    nested = any("layers" in one for one in layers)
    if not nested and [numbers for _, numbers in got] == [numbers for _, numbers in expected]:
        return "the layers are cut right, but the devices are others: a partition has the device of its layers"
    if len(got) == 1 and len(expected) > 1:
        return "all layers are in one partition: ask _retrieve_device of each layer, it knows the labels"
    if nested:
        return (
            "nested Sequentials are to be opened: a label inside them counts, and one around them holds for all inside"
        )
    return "a new partition begins where the device is another than that of the current one, and nowhere else"


def _homeless(layers: list[Layer]) -> set[int]:
    """The numbers of the layers that lie nowhere."""
    numbers = count()
    found: set[int] = set()

    def walk(row: list[Layer], inherited: str) -> None:
        for one in row:
            if "layers" in one:
                walk(one["layers"], one["label"] or inherited)
            else:
                number = next(numbers)
                if not (one["label"] or inherited or one["on"]):
                    found.add(number)

    walk(layers, "")
    return found


def check_neighbours(grade: Grade) -> None:
    """Runs of one device, drawn; by labels, and by where the parameters really lie."""
    models = [[layer(label="cpu:0"), layer(label="cpu:0"), layer(label="cpu:1"), layer(label="cpu:1")]]
    for labels in (["cpu:0", "cpu:1", "cpu:2"], ["cpu:3", "cpu:1"], ["cpu:0"]):
        models.append([layer(label=label) for label in labels for _ in range(int(grade.draw.integers(1, 4)))])
    models.append([layer("cpu"), layer("cpu"), layer("meta")])
    check(grade, models)


def check_back_again(grade: Grade) -> None:
    """A-B-A makes three partitions."""
    runs = [f"cpu:{number % 2}" for number in range(int(grade.draw.integers(4, 7)))]
    check(
        grade, [[layer(label=label) for label in ("cpu:0", "cpu:1", "cpu:0")], [layer(label=label) for label in runs]]
    )


def check_without_parameters(grade: Grade) -> None:
    """A layer that lies nowhere joins the one before it, or at the start the one after it."""
    none, a, b = layer(""), layer(label="cpu:0"), layer(label="cpu:1")
    check(grade, [[a, none, b, none], [none, none, a, b], [layer("meta"), none, layer("meta")], [none, none]])


def check_nested(grade: Grade) -> None:
    """Nested Sequentials are opened; a label inside counts, a label around holds for what has none of its own."""
    a, b, none = layer(label="cpu:0"), layer(label="cpu:1"), layer("")
    models = [
        [nest(a, b), b],
        [a, nest(nest(b, none), a)],
        [nest(layer(), layer(label="cpu:1"), label="cpu:0"), b],
        [nest(layer(), nest(layer()), label="cpu:1"), nest(a)],
    ]
    check(grade, models)
