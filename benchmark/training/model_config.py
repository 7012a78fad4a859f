"""The configurations of the benchmark's models by name, or that of a folder."""

import json
from pathlib import Path
from typing import Any

from transformers import (
    AutoConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

from benchmark.measure.output import Json
from benchmark.names import MODELS, is_own, sized_gpt2
from common.errors import InputError
from common.models.load import model_path

# Raffel et al. 2020, "Exploring the Limits of Transfer Learning", and the released configurations; 3b and 11b differ
# from large in the width of their attention and feed-forward layers only.
T5_SIZES: dict[str, Json] = {
    "t5-small": {"d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6, "num_heads": 8},
    "t5-large": {"d_model": 1024, "d_kv": 64, "d_ff": 4096, "num_layers": 24, "num_heads": 16},
    "t5-3b": {"d_model": 1024, "d_kv": 128, "d_ff": 16384, "num_layers": 24, "num_heads": 32},
    "t5-11b": {"d_model": 1024, "d_kv": 128, "d_ff": 65536, "num_layers": 24, "num_heads": 128},
}
# RMSNorm, rotary positions, SwiGLU and grouped queries (Touvron et al. 2023, Ainslie et al. 2023). "1b" has the sizes
# of Llama 3.2 1B; the other one is as large as gpt2-tiny.
LLAMA_SIZES: dict[str, Json] = {
    "llama-tiny": {"vocab_size": 2048, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4,
                   "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256},
    "llama-1b": {"vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
                 "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072,
                 "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
}  # fmt: skip
KINDS: dict[str, type[PreTrainedModel]] = {
    "gpt2": GPT2LMHeadModel,
    "llama": LlamaForCausalLM,
    "t5": T5ForConditionalGeneration,
}


def model_config(name: str) -> tuple[str, str | None, Any]:
    """Return a model's kind ("gpt2", "llama" or "t5"), the folder of its weights or None, and its configuration."""
    kind = kind_of(name)
    if kind == "own":
        raise InputError(f"--model: expected a GPT-2, a Llama or a T5, since this needs its configuration; got {name}")
    folder = model_path("tiny" if name.endswith("-tiny") else name, kind) if _is_folder(name) else None
    return kind, folder, AutoConfig.from_pretrained(folder) if folder else _config(name)


def kind_of(name: str) -> str:
    """Return "gpt2", "llama", "t5", or "own" for a user's file. Raises InputError for a folder with another model."""
    if is_own(name):
        return "own"
    if _is_name(name):
        return name.partition("-")[0]
    model_type = json.loads((Path(name) / "config.json").read_text()).get("model_type")
    if model_type not in KINDS:
        raise InputError(f"--model: expected a GPT-2, Llama or T5, {name} holds {model_type}; name another folder")
    return model_type


def _is_folder(name: str) -> bool:
    return name in ("gpt2-tiny", "t5-tiny") or not _is_name(name)


def _is_name(name: str) -> bool:
    return name in MODELS or sized_gpt2(name) is not None


def _config(name: str) -> PreTrainedConfig:
    if name == "gpt2":
        return GPT2Config()  # 124,439,808 parameters
    if size := sized_gpt2("gpt2-7x512" if name == "gpt2-24m" else name):  # of 24m, messages' frames weigh nothing
        layers, width = size
        return GPT2Config(
            vocab_size=2048, bos_token_id=0, eos_token_id=0, n_positions=256, n_embd=width, n_layer=layers,
            n_head=width // 64,
        )  # fmt: skip
    if name in LLAMA_SIZES:
        return LlamaConfig(**LLAMA_SIZES[name], bos_token_id=0, eos_token_id=0, tie_word_embeddings=True)
    config = T5Config(**T5_SIZES[name], vocab_size=32128)
    config.decoder_start_token_id = 0
    return config
