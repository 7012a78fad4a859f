"""Megatron-LM's tensor parallelism (Shoeybi et al. 2019) behind the benchmark's Engine: megatron-core's own GPT.

The weights are GPT-2's. Megatron keeps matrices as nn.Linear does, (out, in), and q, k and v of each head together. The
vocabulary is cut, too. Where it cannot be divided, rows of zeros follow, and no probability goes to their tokens.
"""

import re
import warnings
from collections.abc import Iterator
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import GPT2LMHeadModel

from benchmark.engines.engine import Engine

# GPT-2's names -> Megatron's; blocks have numbers.
NAMES = {
    "transformer.wte": "embedding.word_embeddings",
    "transformer.wpe": "embedding.position_embeddings",
    "transformer.ln_f": "decoder.final_layernorm",
    "ln_1": "input_layernorm",
    "attn.c_attn": "self_attention.linear_qkv",
    "attn.c_proj": "self_attention.linear_proj",
    "ln_2": "pre_mlp_layernorm",
    "mlp.c_fc": "mlp.linear_fc1",
    "mlp.c_proj": "mlp.linear_fc2",
}


def answer_for_cuda() -> None:
    """Where there is no GPU, let the CPU say what Megatron asks CUDA for: its device and its random state."""
    if torch.cuda.is_available():
        return
    warnings.filterwarnings("ignore", module="megatron")
    put = {
        "current_device": lambda: torch.device("cpu"),
        "manual_seed": torch.manual_seed,
        "get_rng_state": lambda *_, **__: torch.get_rng_state(),
        "set_rng_state": lambda state, *_, **__: torch.set_rng_state(state),
    }
    for name, answer in put.items():
        setattr(torch.cuda, name, answer)
    from megatron.core.tensor_parallel import random

    random._get_cuda_rng_state, random._set_cuda_rng_state = torch.cuda.get_rng_state, torch.cuda.set_rng_state


class Gpt(nn.Module):
    """Megatron's GPT as the engines call a model: token ids (B, T) -> .loss, or in validation .logits (B, T, V)."""

    def __init__(self, model: nn.Module, vocabulary: int, padding: int) -> None:
        """padding: tokens among this worker's which are not in the vocabulary."""
        super().__init__()
        self.model, self.vocabulary, self.padding = model, vocabulary, padding

    def forward(self, input_ids: Tensor, labels: Tensor) -> SimpleNamespace:
        from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

        if not self.training:
            logits = self.model(*self.places(input_ids), runtime_gather_output=True)
            return SimpleNamespace(logits=logits[..., : self.vocabulary])
        logits = self.model(*self.places(input_ids[:, :-1]))  # (B, T - 1, tokens of this worker)
        if self.padding:
            logits = logits.index_fill(-1, torch.arange(-self.padding, 0) % logits.shape[-1], torch.finfo().min)
        return SimpleNamespace(loss=vocab_parallel_cross_entropy(logits, labels[:, 1:].contiguous()).mean())

    @staticmethod
    def places(ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The tokens, their positions, and which tokens each one may not look at."""
        length = ids.shape[1]
        later = torch.ones(1, 1, length, length, dtype=torch.bool, device=ids.device).triu(1)
        return ids, torch.arange(length, device=ids.device).expand_as(ids), later


class Megatron(Engine):
    """The matrices of every block, and the vocabulary, are cut over the workers, which compute the same examples."""

    cuts_model = True
    shares_examples = True

    model: Gpt

    def wrap(self, model: nn.Module) -> Gpt:
        answer_for_cuda()
        from megatron.core import parallel_state
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.models.gpt.gpt_model import GPTModel
        from megatron.core.tensor_parallel import random
        from megatron.core.transformer.transformer_config import TransformerConfig

        assert isinstance(model, GPT2LMHeadModel)
        given, workers = model.config, self.worker.world_size
        self.heads, self.vocabulary = given.n_head, given.vocab_size
        rows = -(-given.vocab_size // workers) * workers
        if not parallel_state.model_parallel_is_initialized():
            parallel_state.initialize_model_parallel(tensor_model_parallel_size=workers)
        random.model_parallel_cuda_manual_seed(self.settings.seed)
        config = TransformerConfig(
            num_layers=given.n_layer,
            hidden_size=given.n_embd,
            num_attention_heads=given.n_head,
            ffn_hidden_size=given.n_inner or 4 * given.n_embd,
            activation_func=torch.nn.GELU(approximate="tanh"),
            layernorm_epsilon=given.layer_norm_epsilon,
            attention_dropout=given.attn_pdrop,
            hidden_dropout=given.resid_pdrop,
            use_cpu_initialization=True,
            pipeline_dtype=torch.float32,
            gradient_accumulation_fusion=False,
            bias_activation_fusion=False,
            bias_dropout_fusion=False,
            masked_softmax_fusion=False,
        )
        megatron: nn.Module = GPTModel(
            config=config,
            transformer_layer_spec=get_gpt_layer_local_spec(),
            vocab_size=rows,
            max_sequence_length=given.n_positions,
            position_embedding_type="learned_absolute",
            share_embeddings_and_output_weights=True,
        )
        whole = dict(model.named_parameters())
        for name, parameter in megatron.named_parameters():
            parameter.data.copy_(self.part(parameter, original_name(name), whole[original_name(name)].detach()))
        padding = rows - given.vocab_size if self.worker.rank == workers - 1 else 0
        return Gpt(megatron.to(self.worker.device), given.vocab_size, padding)

    def part(self, parameter: nn.Parameter, name: str, whole: Tensor) -> Tensor:
        """What this worker has of a whole parameter of GPT-2."""
        whole = in_megatrons_order(name, whole, self.heads)
        if not is_cut(parameter):
            return whole
        dimension, workers = parameter.partition_dim, self.worker.world_size  # type: ignore[attr-defined]
        if "wte" in name:
            whole = nn.functional.pad(whole, (0, 0, 0, -len(whole) % workers))
        return whole.chunk(workers, dimension)[self.worker.rank]

    def named(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This worker's parameters by GPT-2's names."""
        for name, parameter in self.model.model.named_parameters():
            yield original_name(name), parameter

    def clip(self, norm: float) -> Tensor:
        """Of a cut gradient every worker knows its part; the others are the same on all."""
        gradients = [(p.grad, is_cut(p)) for _, p in self.named() if p.grad is not None]
        squares = torch.nn.utils.get_total_norm([g for g, cut in gradients if cut]) ** 2
        dist.all_reduce(squares)
        total = (squares + torch.nn.utils.get_total_norm([g for g, cut in gradients if not cut]) ** 2).sqrt()
        torch.nn.utils.clip_grads_with_norm_(self.model.parameters(), norm, total)
        return total

    def full_parameters(self) -> dict[str, Tensor]:
        full: dict[str, Tensor] = {}
        for name, parameter in self.named():
            value = parameter.detach()
            if is_cut(parameter):
                parts = [torch.empty_like(value) for _ in range(self.worker.world_size)]
                dist.all_gather(parts, value.contiguous())
                value = torch.cat(parts, parameter.partition_dim)  # type: ignore[attr-defined]
            value = value[: self.vocabulary] if "wte" in name else value
            full[name] = in_gpt2s_order(name, value, self.heads).cpu()
        return full if self.worker.is_first else {}

    def copies(self, full: dict[str, Tensor]) -> Iterator[tuple[str, Tensor, Tensor]]:
        for name, parameter in self.named():
            yield name, parameter.detach().cpu(), self.part(parameter, name, full[name])


def is_cut(parameter: nn.Parameter) -> bool:
    return bool(getattr(parameter, "tensor_model_parallel", False))


def original_name(name: str) -> str:
    """GPT-2's name of a parameter of Megatron's."""
    module, _, kind = name.rpartition(".")
    block = re.match(r"decoder\.layers\.(\d+)\.", module)
    rest = module.removeprefix(block[0]) if block else module
    layer = next(gpt2 for gpt2, megatron in NAMES.items() if megatron == rest)
    return f"transformer.h.{block[1]}.{layer}.{kind}" if block else f"{layer}.{kind}"


def in_megatrons_order(name: str, value: Tensor, heads: int) -> Tensor:
    """A whole parameter of GPT-2 as Megatron has it."""
    if ".c_" in name and name.endswith(".weight"):
        value = value.t()
    return value[head_by_head(len(value), heads)] if ".c_attn." in name else value


def in_gpt2s_order(name: str, value: Tensor, heads: int) -> Tensor:
    """The inverse of in_megatrons_order."""
    if ".c_attn." in name:
        value = value[head_by_head(len(value), heads).argsort()]
    return value.t() if ".c_" in name and name.endswith(".weight") else value


def head_by_head(rows: int, heads: int) -> Tensor:
    """The rows of q, k and v, which follow one another, in an order that has all three of a head together."""
    return torch.arange(rows).view(3, heads, -1).transpose(0, 1).flatten()
