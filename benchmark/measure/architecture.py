"""Look a model over without making it: its parameters, what forward multiplies, and what it keeps for backward.

No memory is allocated: the model is built of torch's fake tensors, which have shapes and no values. So the largest T5
takes seconds, on any machine.
"""

import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from benchmark.training.model_config import KINDS, model_config
from benchmark.training.own_model import blocks
from beyond.flat_parameters import parameters_by_block
from beyond.step_memory import BYTES, Sizes
from common.models.fit import set_dropout

SAMPLE = 2  # examples in the pass that counts


@dataclass(frozen=True)
class Architecture:
    """A model at a length of examples.

    shapes: of its parameters, each once. flops: of one example's forward. sizes: what beyond/step_memory.py asks for.
    """

    kind: str  # gpt2, llama or t5
    heads: int
    shapes: tuple[tuple[int, ...], ...]
    flops: float
    sizes: Sizes

    @property
    def elements(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes)


@cache
def describe(model: str, length: int) -> Architecture:
    """Return the architecture of a model by its name or folder; examples have `length` tokens."""
    kind, _, config = model_config(model)
    saved: dict[int, int] = {}  # storages of what backward needs
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        kept.append(tensor)  # a storage that is freed could give its address to the next one
        return tensor

    with FakeTensorMode():
        module = KINDS[kind](config)
        module.config.use_cache = False
        set_dropout(module, 0.0)
        module.train()
        tokens = torch.zeros(SAMPLE, length, dtype=torch.long)
        counter = FlopCounterMode(display=False)
        with counter, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            output = module(input_ids=tokens, labels=tokens)
        for parameter in module.parameters():
            saved.pop(parameter.untyped_storage()._cdata, None)
        logits = output.logits.nbytes // SAMPLE
    *by_block, root = parameters_by_block(module, blocks(module))
    inside = [_bytes(parameter) for parameters in by_block for parameter in parameters]
    border = BYTES * length * config.hidden_size
    loss = 2 * border + logits
    sizes = Sizes(
        blocks=len(by_block),
        block=sum(inside) // len(by_block),
        root=sum(map(_bytes, root)),
        matrix=max(inside),
        embedding=max(map(_bytes, root)),
        kept=(sum(saved.values()) // SAMPLE - loss) // len(by_block),
        whole=4 * border,
        loss=loss,
        logits=logits,
        border=border,
    )
    shapes = tuple(tuple(parameter.shape) for parameter in module.parameters())
    return Architecture(kind, config.num_attention_heads, shapes, counter.get_total_flops() / SAMPLE, sizes)


def _bytes(parameter: Tensor) -> int:
    return BYTES * parameter.numel()
