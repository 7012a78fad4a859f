"""torch's parallelize_module on GPT-2 behind the benchmark's Engine.

It cuts nn.Linear by columns or rows. GPT-2 has Conv1D, whose weight is transposed, and one matrix for q, k and v, whose
thirds a cut by columns would mix: so both are rewritten first, see SplitAttention. The values stay the same.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim import Optimizer
from transformers import GPT2LMHeadModel
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention

from benchmark.engines.engine import Engine, optimizer_class

PLAN = {"q": ColwiseParallel, "k": ColwiseParallel, "v": ColwiseParallel, "out": RowwiseParallel}


def linear(weight: Tensor, bias: Tensor) -> nn.Linear:
    """A layer with a copy of a Conv1D's weight (in, out) and bias (out,)."""
    layer = nn.Linear(*weight.shape)
    layer.weight.data.copy_(weight.t())
    layer.bias.data.copy_(bias)
    return layer


class SplitAttention(nn.Module):
    """GPT-2's causal attention with q, k and v apart, (B, T, D) to (B, T, D); the heads are what its layers give."""

    def __init__(self, attention: GPT2Attention) -> None:
        super().__init__()
        weights, biases = attention.c_attn.weight.data.chunk(3, dim=1), attention.c_attn.bias.data.chunk(3)
        self.q, self.k, self.v = (linear(w, b) for w, b in zip(weights, biases, strict=True))
        self.out = linear(attention.c_proj.weight.data, attention.c_proj.bias.data)
        self.head_dim, self.dropout = attention.head_dim, attention.attn_dropout.p
        self.resid_dropout = attention.resid_dropout

    def forward(self, hidden_states: Tensor, *_: object, **__: object) -> tuple[Tensor, None]:
        q, k, v = (self.heads(layer(hidden_states)) for layer in (self.q, self.k, self.v))
        dropout = self.dropout if self.training else 0.0
        x = nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.resid_dropout(self.out(x.transpose(1, 2).flatten(2))), None

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # (B, heads, T, head_dim)


class TensorParallel(Engine):
    """The matrices of every block are cut over the workers, which compute the same examples; DTensor does the rest."""

    cuts_model = True
    shares_examples = True

    def wrap(self, model: nn.Module) -> nn.Module:
        assert isinstance(model, GPT2LMHeadModel)
        mesh = init_device_mesh(self.worker.device.type, (self.worker.world_size,))
        blocks: Any = model.transformer.h  # their layers are replaced by those of another class
        for block in blocks:
            block.attn = SplitAttention(block.attn)
            block.mlp.c_fc = linear(block.mlp.c_fc.weight.data, block.mlp.c_fc.bias.data)
            block.mlp.c_proj = linear(block.mlp.c_proj.weight.data, block.mlp.c_proj.bias.data)
            plan = {f"attn.{name}": style() for name, style in PLAN.items()}
            parallelize_module(block, mesh, plan | {"mlp.c_fc": ColwiseParallel(), "mlp.c_proj": RowwiseParallel()})
        return model.to(self.worker.device)  # type: ignore[arg-type]  # the blocks' matrices are there already

    def make_optimizer(self) -> Optimizer:
        """AdamW's fused kernels take either kind of parameter, not both in one group."""
        optimizer = super().make_optimizer()
        groups = []
        for group in optimizer.param_groups:
            for is_cut in (True, False):
                kind = [p for p in group["params"] if isinstance(p, DTensor) is is_cut]
                groups.append({"params": kind, "weight_decay": group["weight_decay"]})
        return optimizer_class(self.settings)(groups)

    def clip(self, norm: float) -> Tensor:
        """torch's clip_grad_norm_ takes either kind of gradient, not both: the factor is that of both norms."""
        gradients = [p.grad for p in self.bare.parameters() if p.grad is not None]
        cut = [gradient for gradient in gradients if isinstance(gradient, DTensor)]
        whole = [gradient for gradient in gradients if not isinstance(gradient, DTensor)]
        of_cut = torch.nn.utils.get_total_norm(cut)
        assert isinstance(of_cut, DTensor)
        total = torch.stack([of_cut.full_tensor(), torch.nn.utils.get_total_norm(whole)]).norm()
        for parameters in (True, False):
            kind = [p for p in self.bare.parameters() if isinstance(p, DTensor) is parameters]
            nn.utils.clip_grads_with_norm_(kind, norm, total)
        return total

    def full_parameters(self) -> dict[str, Tensor]:
        """By GPT-2's own names, with Conv1D's orientation."""
        full = {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in self.bare.named_parameters()}
        if not self.worker.is_first:
            return {}
        parameters: dict[str, Tensor] = {}
        for name, value in full.items():
            owner, _, kind = name.rpartition(".")
            value = value.detach().cpu()
            if owner.endswith("attn.q"):
                thirds = [full[f"{owner[:-1]}{letter}.{kind}"].detach().cpu() for letter in "qkv"]
                parameters[f"{owner[:-1]}c_attn.{kind}"] = torch.cat(
                    [third.t() if kind == "weight" else third for third in thirds], -1
                )
            elif owner.endswith(("attn.k", "attn.v")):
                continue
            elif owner.endswith(("attn.out", "mlp.c_fc", "mlp.c_proj")):
                parameters[name.replace("attn.out", "attn.c_proj")] = value.t() if kind == "weight" else value
            else:
                parameters[name] = value
        return parameters
