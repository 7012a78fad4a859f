"""Cuts a model into partitions: consecutive layers on one device form one partition (region p.1)."""

from collections.abc import Iterable, Iterator
from itertools import chain

import torch
from torch import nn

from common.errors import InputError


class WithDevice(nn.Module):
    """A layer with a label that says to which device it belongs. The label does not move the layer.

    torch takes cpu:0 and cpu:1 for the same device, but two such labels make two partitions, with one worker each.
    So a pipeline can run on a machine without GPUs, and a layer without parameters can have a device.
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
    """Return the device of a layer: its label, else the device of its parameters, None if it has neither.

    Raises InputError for a layer whose parameters are on several devices.
    """
    if isinstance(module, WithDevice):
        return module.device
    devices = {tensor.device for tensor in chain(module.parameters(), module.buffers())}
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        kind = type(module).__name__
        raise InputError(f"expected all parameters of a layer on one device, got {kind} on {names}; move it with .to()")
    return devices.pop() if devices else None


def _layers(modules: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """Return the layers in order, with nested Sequentials opened. The layers of a labelled Sequential get its label."""
    for module in modules:
        if _is_plain_sequential(module):
            yield from _layers(module.children())
        elif isinstance(module, WithDevice) and _is_plain_sequential(module.module):
            for layer in _layers(module.module.children()):
                yield layer if isinstance(layer, WithDevice) else WithDevice(layer, module.device)
        else:
            yield module


def _is_plain_sequential(module: nn.Module) -> bool:
    """Return whether a module can be opened; a subclass with its own forward is one layer."""
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def _assemble_partition(layers: Iterable[nn.Module]) -> nn.Sequential:
    """Return one partition of these layers (the same objects), with nested Sequentials opened and labels removed."""
    return nn.Sequential(*(layer.module if isinstance(layer, WithDevice) else layer for layer in _layers(layers)))


def _split_module(modules: nn.Sequential) -> tuple[list[nn.Sequential], list[torch.device]]:
    """Cut `modules` into partitions; return them and their devices, two lists of equal length.

    Devices A, B, A make three partitions: the data passes through A twice. `modules` holds at least one layer: Pipe
    does not accept an empty Sequential.

    Steps
    [1] Walk through _layers(modules) in order; change no module, and move none.
    [2] Ask _retrieve_device for the device of the layer. A layer without a device (None) belongs to the partition of
        the layer before it; at the very start, to that of the layer after it.
    [3] If that is not the device of the current partition, the current partition is complete: _assemble_partition
        creates it. Keep it and its device, and begin a new one.
    [4] After the last layer, one partition is still open. If no layer has a device, its device is
        torch.device("cpu").
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
