"""Runs a student's split and schedule, and describes what they return in numbers and short names."""

import itertools
import operator
from typing import Any

import torch
from torch import nn

from grader.inside.context import Context
from grader.wire.values import Fields

MAX_NAME = 60  # characters of a class name
MAX_PARTITIONS = 50  # partitions of a model that are reported, and layers of a partition; the models have up to 20
EXTRA_CLOCKS = 30  # clock cycles beyond those that a schedule may have, before an endless one is cut off
EXTRA_PAIRS = 100  # the same for all pairs of a schedule
LARGEST = 10**6  # a number of a micro-batch or a partition beyond this is reported as this


def split(context: Context) -> list[Any]:
    """_split_module of several models, twice each. Arguments: file, models (lists of layers, see _build), mine (for
    each an input x, and weights and biases of its layers).

    What is returned for each: a text if the result has not the right form, or partitions, devices, whether the second
    call gave `other` results or `changed` the first one, whether the `model` itself was changed, and the `outputs` of
    one partition after the other, as far as they lie on the CPU.
    """
    module = context.load(context.arguments["file"])
    results: list[Any] = []
    for number, layers in enumerate(context.arguments["models"]):
        mine = context.arguments["mine"][number]
        leaves: list[nn.Module] = []
        modules = nn.Sequential(*(_build(layer, leaves, module.WithDevice, mine) for layer in layers))
        before = _inventory(modules)
        context.during = f"_split_module of model {number}"
        first = module._split_module(modules)
        if words := _strange_form(first):
            results.append(words)
            continue
        described, model_changed = _describe(first, leaves), _inventory(modules) != before
        if model_changed:
            results.append(described | {"model_changed": True, "other": False, "changed": False})
            continue
        second = module._split_module(modules)
        other = bool(_strange_form(second)) or _describe(second, leaves) != described
        same_list = any(one is another for one, another in zip(first, second, strict=False))
        changed = same_list or bool(_strange_form(first)) or _describe(first, leaves) != described
        theirs = all(isinstance(layer, int) for _, *part in described["partitions"] for layer in part)
        outputs = _outputs(first[0], mine["x"]) if theirs else []
        results.append(described | {"model_changed": False, "other": other, "changed": changed, "outputs": outputs})
    return results


def _outputs(partitions: Any, x: torch.Tensor) -> list[Any]:
    """What comes out of one partition after the other, as far as they are Sequentials with values."""
    found: list[Any] = []
    for partition in itertools.islice(partitions, MAX_PARTITIONS):
        values = isinstance(partition, nn.Sequential) and not any(p.is_meta for p in partition.parameters())
        if not values:
            return found
        with torch.no_grad():
            x = partition(x)
        found.append(x)
    return found


def _build(layer: dict, leaves: list[nn.Module], label: Any, mine: dict[str, torch.Tensor]) -> nn.Module:
    """A layer as the grader wrote it: `layers` inside it, or `on` (where its parameters lie, "" for none); `label`."""
    module: nn.Module
    if "layers" in layer:
        module = nn.Sequential(*(_build(inner, leaves, label, mine) for inner in layer["layers"]))
    else:
        number, width = len(leaves), mine["x"].shape[1]
        module = nn.ReLU()
        if layer["on"]:
            module = nn.Linear(width, width, device=layer["on"], dtype=torch.float64)
            module.load_state_dict({"weight": mine["weights"][number], "bias": mine["biases"][number]}, strict=True)
        leaves.append(module)
    return label(module, layer["label"]) if layer["label"] else module


def _inventory(modules: nn.Sequential) -> list[tuple[str, int]]:
    """All modules and parameters by name, with the mode of the ones and the device of the others."""
    found = [(f"{name}: {type(part).__name__} {part.training}", id(part)) for name, part in modules.named_modules()]
    return found + [(f"{name} on {p.device} {p.requires_grad}", id(p)) for name, p in modules.named_parameters()]


def _strange_form(result: object) -> str:
    """Why this is not (partitions, devices), two lists; "" if it is."""
    if not isinstance(result, tuple | list) or len(result) != 2 or type(result[0]) is nn.Sequential:
        return f"a {_kind(result)}"
    for name, part in zip(("partitions", "devices"), result, strict=True):
        if not hasattr(part, "__len__") or not hasattr(part, "__getitem__") or isinstance(part, dict | str):
            return f"a {_kind(part)} of {name}"
        if len(part) > MAX_PARTITIONS:
            return f"{min(len(part), LARGEST)} {name} for a few layers"
    wrong = [device for device in result[1] if not isinstance(device, torch.device | None)]
    return f"a {_kind(wrong[0])} as a device, expected a torch.device: Pipe asks it for its type" if wrong else ""


def _describe(result: Any, leaves: list[nn.Module]) -> Fields:
    """The kind of each partition and the numbers of the layers in it; the type of what is none of them."""
    numbers = {id(leaf): number for number, leaf in enumerate(leaves)}
    partitions = []
    for partition in result[0]:
        layers = itertools.islice(partition, MAX_PARTITIONS) if hasattr(partition, "__iter__") else ()
        partitions.append([_kind(partition), *(numbers.get(id(layer), _kind(layer)) for layer in layers)])
    return {"partitions": partitions, "devices": [str(device) for device in result[1]]}


def _kind(thing: object) -> str:
    return type(thing).__name__[:MAX_NAME]


def schedule(context: Context) -> list[Any]:
    """_clock_cycles for several sizes, twice each. Arguments: file, sizes (micro-batches, partitions).

    What is returned for each: a list of clock cycles, or a text that says what it is instead; a cycle is a list of
    pairs, or such a text.
    """
    module = context.load(context.arguments["file"])
    results: list[Any] = []
    for m, n in context.arguments["sizes"]:
        context.during = f"_clock_cycles({m}, {n})"
        first = _cycles(module._clock_cycles(m, n), m, n)
        second = _cycles(module._clock_cycles(m, n), m, n)
        results.append(first if first == second or isinstance(first, str) else "a different schedule when called again")
    return results


def _cycles(cycles: object, m: int, n: int) -> Any:
    """Each clock cycle as it was handed out; a text in place of one that is none, or that changed afterwards."""
    if not hasattr(cycles, "__iter__"):
        return f"a {_kind(cycles)}"
    kept: list[Any] = []
    seen: list[Any] = []
    room = m * n + EXTRA_PAIRS
    for cycle in itertools.islice(cycles, m + n + EXTRA_CLOCKS):
        kept.append(cycle)
        seen.append(_pairs(cycle, room))
        room -= 0 if isinstance(seen[-1], str) else len(seen[-1])
        if room <= 0:
            break
    for clock, (cycle, pairs) in enumerate(zip(kept, seen, strict=True)):
        if not isinstance(pairs, str) and _pairs(cycle, len(pairs) + 1) != pairs:
            seen[clock] = "a list that changes once the next cycle is made: begin a new list for every cycle"
    return seen


def _pairs(cycle: object, room: int) -> Any:
    """The pairs of one clock cycle, or what it is instead."""
    if not hasattr(cycle, "__len__") or not hasattr(cycle, "__iter__"):
        once = hasattr(cycle, "__next__")
        return f"a {_kind(cycle)}, which can be read only once" if once else f"a {_kind(cycle)}"
    if len(cycle) > room:
        return f"a {_kind(cycle)} of {min(len(cycle), LARGEST)} pairs"
    pairs = []
    for pair in itertools.islice(cycle, room):
        try:
            micro_batch, partition = map(operator.index, pair)
        except (TypeError, ValueError):
            return f"a {_kind(cycle)} that holds a {_kind(pair)}"
        pairs.append([_bounded(micro_batch), _bounded(partition)])
    return pairs


def _bounded(number: int) -> int:
    return max(-LARGEST, min(LARGEST, number))
