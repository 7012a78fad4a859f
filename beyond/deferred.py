"""Build a model without memory; each parameter gets memory and values when its block is sharded. This code is given.

    model = from_folder(GPT2LMHeadModel, folder, device)      # or from_random(lambda: GPT2LMHeadModel(config), device)
    sharded = ShardedModel(model, model.transformer.h, ...)   # block by block; each rank keeps its shards

A parameter of such a model is on torch's meta device: it has a shape and no memory. Its attribute `deferred` can write
its values into a part of a flat tensor (flat_parameters.py). So no rank ever holds the whole model, and the weights are
the same, bit for bit, as those of a model that is built at once.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from safetensors import safe_open
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode  # see byte_counts.py
from transformers import PreTrainedModel

Model = TypeVar("Model", bound=PreTrainedModel)

ATEN = torch.ops.aten
RANDOM = (ATEN.normal_.default, ATEN.uniform_.default)
COMPLETE = (*RANDOM, ATEN.zero_.default, ATEN.fill_.Scalar)  # what they leave depends on nothing that was there before


class Deferred(Protocol):
    """The values of a parameter that has no memory yet. device: where its memory will be."""

    device: torch.device

    def write(self, flat: Tensor, begin: int, end: int) -> None:
        """Write the elements from `begin` to `end` into the same places of `flat`, the flattened parameter."""


# --- random weights ---


@dataclass(frozen=True)
class Operation:
    """An operation in place that initialises a parameter, and the state of the random numbers before it."""

    function: Callable[..., object]
    arguments: tuple[object, ...]
    keywords: dict[str, object]
    state: Tensor | None

    def run(self, values: Tensor) -> None:
        keywords = self.keywords
        if self.state is not None:
            generator = torch.Generator()
            generator.set_state(self.state)
            keywords = keywords | {"generator": generator}
        self.function(values, *self.arguments, **keywords)


@dataclass(frozen=True)
class RandomValues:
    """Repeats the operations that initialise a parameter. Needs memory for the whole parameter, for a moment."""

    shape: torch.Size
    dtype: torch.dtype
    operations: list[Operation]
    device: torch.device

    def write(self, flat: Tensor, begin: int, end: int) -> None:
        values = torch.empty(self.shape, dtype=self.dtype)
        for operation in self.operations:
            operation.run(values)
        flat[begin:end] = values.view(-1)[begin:end]


class Initialisation(TorchDispatchMode):
    """While it is active, new tensors have no memory, and operations that initialise them are recorded.

    Random numbers are drawn all the same, one tensor at a time, so that what follows draws the same numbers as always.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations: dict[int, list[Operation]] = {}  # by storage, which a tensor and its views share

    def __torch_dispatch__(self, func: Any, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        kwargs = kwargs or {}
        if func is ATEN.empty.memory_format:
            return func(*args, **kwargs | {"device": "meta"})
        if args and isinstance(args[0], Tensor) and args[0].is_meta and func._schema.is_mutable:
            self._record(func, args[0], args[1:], kwargs)
        return func(*args, **kwargs)

    def _record(
        self, func: Callable[..., object], tensor: Tensor, arguments: tuple[object, ...], keywords: dict[str, object]
    ) -> None:
        storage = tensor.untyped_storage()
        if tensor.nbytes < storage.nbytes():
            raise NotImplementedError(f"{func} initialises a part of a parameter: build this model at once")
        state = None
        if func in RANDOM:
            state = torch.get_rng_state()
            func(torch.empty(tensor.shape, dtype=tensor.dtype), *arguments, **keywords)
        operation = Operation(func, arguments, keywords, state)
        if func in COMPLETE:
            self.operations[storage._cdata] = [operation]
        else:
            self.operations[storage._cdata].append(operation)


def from_random(make: Callable[[], Model], device: torch.device) -> Model:
    """Return make() without memory: a model with random weights."""
    with Initialisation() as initialisation:
        model = make()
    for _, parameter in model.named_parameters():
        if parameter.is_meta:  # a bias that was made by torch.zeros has its few bytes already
            operations = initialisation.operations[parameter.untyped_storage()._cdata]
            values = RandomValues(parameter.shape, parameter.dtype, operations, device)
            parameter.deferred = values  # type: ignore[attr-defined]
    return model


# --- saved weights ---

NUMPY_KNOWS = {"F16", "F32", "F64"}  # of safetensors' names; bfloat16 is none of numpy's


@dataclass(frozen=True)
class SavedValues:
    """Reads a parameter from a file of safetensors: only the rows that hold the elements which are asked for."""

    file: Path
    name: str
    width: int  # elements of a row
    device: torch.device

    def write(self, flat: Tensor, begin: int, end: int) -> None:
        first = begin // self.width
        with safe_open(self.file, "np") as weights:  # as tensors ("pt"), it would take memory for the whole file
            rows = torch.from_numpy(weights.get_slice(self.name)[first : -(-end // self.width)])
        flat[begin:end] = rows.flatten()[begin - first * self.width : end - first * self.width]


def from_folder(kind: type[Model], folder: str, device: torch.device) -> Model | None:
    """Return a model of this class without memory; its weights are in the folder.

    Returns None if a parameter is missing there, or is not saved as safetensors in a format that numpy knows.
    """
    files = _files(Path(folder))
    with torch.device("meta"):
        assert kind.config_class, "every model of transformers has one"
        config = kind.config_class.from_pretrained(folder)
        model = kind._from_config(config)
    for name, parameter in model.named_parameters():
        known = [key for key in (name, name.removeprefix(f"{kind.base_model_prefix}.")) if key in files]
        if not known:
            return None
        width = parameter[0].numel()
        parameter.deferred = SavedValues(files[known[0]], known[0], width, device)
    return model.eval()  # as from_pretrained


def _files(folder: Path) -> dict[str, Path]:
    """Return the file of every tensor in the folder that can be read by numpy."""
    index = folder / "model.safetensors.index.json"
    names = set(json.loads(index.read_text())["weight_map"].values()) if index.is_file() else {"model.safetensors"}
    files = dict[str, Path]()
    for file in [folder / name for name in names if (folder / name).is_file()]:
        with safe_open(file, "np") as weights:
            names_here = weights.keys()
            files |= {key: file for key in names_here if weights.get_slice(key).get_dtype() in NUMPY_KNOWS}
    return files
