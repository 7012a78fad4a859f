"""Look a model over without making it: its parameters, its blocks, what forward multiplies and keeps for backward.

No memory is allocated: the model is built of torch's fake tensors, which have shapes and no values. So the largest T5
takes seconds, on any machine.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import GPT2LMHeadModel, T5ForConditionalGeneration

from benchmark.cost.architecture import Architecture, Weight
from benchmark.training.model_config import model_config
from benchmark.training.own_model import blocks
from beyond.flat_parameters import parameters_by_block
from common.models.fit import set_dropout

SAMPLE = 2  # examples in the pass that counts


def inspect(model: str, length: int) -> Architecture:
    """Return the architecture of a model by its name or folder; examples have `length` tokens."""
    kind, _, config = model_config(model)
    model_class: Any = GPT2LMHeadModel if kind == "gpt2" else T5ForConditionalGeneration
    saved: dict[Any, int] = {}  # storages of what backward needs

    def keep(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        kept.append(tensor)  # a storage that is freed could give its address to the next one
        return tensor

    kept: list[Tensor] = []
    with FakeTensorMode():
        module: nn.Module = model_class(config)
        module.config.use_cache = False  # type: ignore[union-attr]
        set_dropout(module, 0.0)
        module.train()
        tokens = torch.zeros(SAMPLE, length, dtype=torch.long)
        counter = FlopCounterMode(display=False)
        with counter, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            output = module(input_ids=tokens, labels=tokens)
        for parameter in module.parameters():
            saved.pop(parameter.untyped_storage()._cdata, None)
        logits = output.logits.nbytes / SAMPLE
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    layers = blocks(module)
    owner = {id(p): i for i, ps in enumerate(parameters_by_block(module, layers)[:-1]) for p in ps}
    weights = tuple(Weight(names[id(p)], tuple(p.shape), owner.get(id(p))) for p in module.parameters())
    return Architecture(
        model=model,
        kind=kind,
        length=length,
        width=config.n_embd if kind == "gpt2" else config.d_model,
        n_heads=config.n_head if kind == "gpt2" else config.num_heads,
        n_blocks=len(layers),
        weights=weights,
        flops=_flops(module, layers, counter),
        activations=sum(saved.values()) / SAMPLE,
        logits=logits,
    )


def _flops(module: nn.Module, layers: list[nn.Module], counter: FlopCounterMode) -> dict[str, float]:
    """Multiplications and additions of one example, by unit; what is in no block is counted as "after"."""
    counts = counter.get_flop_counts()
    root = type(module).__name__
    places = {id(layer): name for name, layer in module.named_modules()}
    by_block = [sum(counts.get(f"{root}.{places[id(layer)]}", {}).values()) / SAMPLE for layer in layers]
    rest = counter.get_total_flops() / SAMPLE - sum(by_block)
    return {"before": 0.0, **{f"block {i}": flops for i, flops in enumerate(by_block)}, "after": rest}
