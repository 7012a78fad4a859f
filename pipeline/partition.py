"""Cuts a model into partitions: consecutive layers on one device form one partition (region p.1)."""

from collections.abc import Iterable, Iterator
from itertools import chain

import torch
from torch import nn

from common.errors import InputError


class WithDevice(nn.Module):
    """A layer with a label that says on which device it counts as lying. It does not move the layer.

    torch takes cpu:0 and cpu:1 for the same device, but two such labels make two partitions, with one worker each.
    That is how a pipeline runs on a machine without GPUs, and how a layer without parameters is given a place.
    """

    def __init__(self, module: nn.Module, device: torch.device | str) -> None:
        super().__init__()
        self._module = module
        self._device = torch.device(device)

    @property
    def module(self) -> nn.Module:
        return self._module

    @property
    def device(self) -> torch.device:
        return self._device

    def forward(self, *args, **kwargs):
        return self._module(*args, **kwargs)


def _retrieve_device(module: nn.Module) -> torch.device | None:
    """The device a layer counts as lying on: its label, else where its parameters lie, None if it has neither.

    Raises InputError for a layer whose parameters lie on several devices.
    """
    if isinstance(module, WithDevice):
        return module.device
    devices = {tensor.device for tensor in chain(module.parameters(), module.buffers())}
    if len(devices) > 1:
        found = ", ".join(sorted(map(str, devices)))
        kind = type(module).__name__
        raise InputError(f"expected all parameters of a layer on one device, got {kind} on {found}; move it with .to()")
    return devices.pop() if devices else None


def _layers(modules: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """The layers in order, nested Sequentials opened. What lies in a labelled Sequential gets that label."""
    for module in modules:
        if _is_plain_sequential(module):
            yield from _layers(module.children())
        elif isinstance(module, WithDevice) and _is_plain_sequential(module.module):
            for layer in _layers(module.module.children()):
                yield layer if isinstance(layer, WithDevice) else WithDevice(layer, module.device)
        else:
            yield module


def _is_plain_sequential(module: nn.Module) -> bool:
    """A subclass with a forward of its own is one layer: opening it would change what it computes."""
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def _assemble_partition(layers: Iterable[nn.Module]) -> nn.Sequential:
    """One partition of these very layers (the same objects), nested Sequentials opened, labels taken off."""
    return nn.Sequential(*(layer.module if isinstance(layer, WithDevice) else layer for layer in _layers(layers)))


def _split_module(modules: nn.Sequential) -> tuple[list[nn.Sequential], list[torch.device]]:
    """Cut `modules` into partitions and say on which device each lies; both lists are equally long.

    Devices A, B, A make three partitions: the data passes A twice. `modules` holds at least one layer: Pipe refuses an
    empty Sequential before it asks.

    Steps
    [1] Walk through _layers(modules) in order, and change nothing in modules.
    [2] Ask _retrieve_device where the layer lies. A layer that lies nowhere (None) joins the layer before it, and at
        the very start the layer after it.
    [3] If that is not the device of the current partition, that partition is complete: _assemble_partition makes it.
        Keep it and its device, and begin a new one.
    [4] The last partition is complete when the layers are. (If no layer lies anywhere, its device is the CPU.)
    """
    partitions: list[nn.Sequential] = []
    devices: list[torch.device] = []
    current_partition: list[nn.Module] = []
    current_device: torch.device | None = None
    # TODO(cos598d) p.1: group consecutive layers of one device (11 lines)
    # BEGIN SOLUTION p.1
    for layer in _layers(modules):
        device = _retrieve_device(layer) or current_device
        if current_device is not None and device != current_device:
            partitions.append(_assemble_partition(current_partition))
            devices.append(current_device)
            current_partition = []
        current_device = device
        current_partition.append(layer)
    if current_partition:
        partitions.append(_assemble_partition(current_partition))
        devices.append(current_device or torch.device("cpu"))
    # END SOLUTION p.1
    return partitions, devices
