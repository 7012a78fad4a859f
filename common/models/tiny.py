"""`tiny`: a small BERT, GPT-2 and T5 with a tokenizer each, made once without a download and saved like a hub's model.

They have the real architectures, so from_pretrained, AutoTokenizer and the names of the parameters are the real ones;
only the sizes differ. One attention head of BERT is built, not learned: see _match_equal_words.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, pre_tokenizers, processors, trainers
from tokenizers.models import BPE

from common.cache import cached
from common.data import sample_data
from common.models.word_pieces import bert_pieces
from common.paths import cache_dir

if TYPE_CHECKING:
    from transformers import BertModel, PreTrainedModel, PreTrainedTokenizerFast

VERSION = 2  # part of the folder's name: increase it with every change to a model or a tokenizer
GPT2_TOKENS = 2000
END_OF_TEXT = "<|endoftext|>"


def tiny_model_folder(kind: str) -> Path:
    """Return the folder of the tiny model of this kind ("bert", "gpt2", "t5"); create it if it is not in the cache.

    The weights come from a separate seed; the caller's random numbers are not affected.
    """

    def build(folder: Path) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(598)
            save_model(*{"bert": _bert, "gpt2": _gpt2, "t5": _t5}[kind](), folder)

    return cached(cache_dir("models") / f"tiny-{kind}-v{VERSION}-{sample_data.VERSION}", build)


def save_model(model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerFast", folder: Path) -> None:
    """Write a model's folder as the hub has it, on any rank.

    `save_pretrained` would write neither weights nor configuration on ranks above 0 of a process group.
    """
    weights, places = {}, set()
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() not in places:  # tied weights are saved once, under their first name
            weights[name] = tensor.contiguous()
        places.add(tensor.data_ptr())
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    model.config.architectures = [type(model).__name__]
    model.config.dtype = str(model.dtype).removeprefix("torch.")
    model.config.to_json_file(folder / "config.json")
    if model.can_generate():
        model.generation_config.to_json_file(folder / "generation_config.json")
    tokenizer.save_pretrained(folder)


def _bert() -> "tuple[PreTrainedModel, PreTrainedTokenizerFast]":
    tokenizer = transformers.BertTokenizer(
        vocab={piece: i for i, piece in enumerate(bert_pieces())}, do_lower_case=False
    )
    config = transformers.BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=256,
        max_position_embeddings=512,
        initializer_range=0.05,
    )
    model = transformers.BertModel(config)
    _match_equal_words(model)
    return model, tokenizer


def _match_equal_words(model: "BertModel") -> None:
    """Build one head of the first layer: every token looks at tokens of the same word and notes their positions.

    Pretrained BERTs have learnt heads of this kind (Clark et al. 2019, "What Does BERT Look At?"), and in pretrained
    models queries and keys resemble each other (Trockman and Kolter 2023, "Mimetic Initialization of Self-Attention
    Layers"). From random weights, a model of this size needs thousands of steps until it finds one, and learns nothing
    before. With this head, the embedded sample takes about two hundred steps. The D hidden numbers of a token are:

        0 .. D/2      the word: what the head's queries and keys compare
        D/2 .. 3D/4   the position: what its values carry
        3D/4 .. D     free: where its output goes

    The rest stays random, and training changes all of it.
    """
    weights = model.state_dict()  # the model's own memory
    hidden, heads = model.config.hidden_size, model.config.num_attention_heads
    width = hidden // 4
    word, position, free = slice(2 * width), slice(2 * width, 3 * width), slice(3 * width, hidden)
    head = slice(hidden // heads)  # the first head's numbers
    same_word, same_position = torch.eye(hidden // heads, 2 * width), torch.eye(width)
    faint = 0.1  # keep a little of the random values in the places used here

    weights["embeddings.word_embeddings.weight"][:, 2 * width :] *= faint  # (V, D)
    weights["embeddings.position_embeddings.weight"][:, word] *= faint  # (T, D)
    weights["embeddings.position_embeddings.weight"][:, free] *= faint
    weights["embeddings.token_type_embeddings.weight"] *= faint
    first, last = "encoder.layer.0.attention", f"encoder.layer.{model.config.num_hidden_layers - 1}.attention"
    for side in ("query", "key"):  # (D, D): rows are what comes out, columns what goes in
        weights[f"{first}.self.{side}.weight"][head] *= faint
        weights[f"{first}.self.{side}.weight"][head, word] += same_word
    weights[f"{first}.self.value.weight"][head] *= faint
    weights[f"{first}.self.value.weight"][:width, position] += 2 * same_position
    weights[f"{first}.output.dense.weight"][:, head] *= faint
    weights[f"{first}.output.dense.weight"][free, :width] += 2 * same_position
    # The last layer begins as an average over all tokens: large enough for the classifier to use it.
    weights[f"{last}.self.value.weight"] *= 3
    weights[f"{last}.output.dense.weight"] *= 3


def _gpt2() -> "tuple[PreTrainedModel, PreTrainedTokenizerFast]":
    backend = _byte_pairs([END_OF_TEXT])
    model = json.loads(backend.to_str())["model"]
    tokenizer = transformers.GPT2Tokenizer(vocab=model["vocab"], merges=[tuple(pair) for pair in model["merges"]])  # type: ignore[misc]
    config = transformers.GPT2Config(
        vocab_size=len(tokenizer),
        n_embd=128,
        n_layer=4,
        n_head=4,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return transformers.GPT2LMHeadModel(config), tokenizer


def _t5() -> "tuple[PreTrainedModel, PreTrainedTokenizerFast]":
    backend = _byte_pairs(["<pad>", "</s>", "<unk>"])  # T5's order: pad is 0 and starts the decoder, end is 1
    backend.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)]
    )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=512
    )
    config = transformers.T5Config(
        vocab_size=len(tokenizer),
        d_model=128,
        d_kv=32,
        d_ff=256,
        num_layers=2,
        num_heads=4,
        pad_token_id=0,
        eos_token_id=1,
    )
    config.decoder_start_token_id = 0
    return transformers.T5ForConditionalGeneration(config), tokenizer


def _byte_pairs(special_tokens: list[str]) -> Tokenizer:
    """Return byte pairs learned from the sample text, over bytes as in GPT-2: they can represent any text.

    (Sennrich et al. 2016, "Neural Machine Translation of Rare Words with Subword Units".)
    """
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=GPT2_TOKENS,
        special_tokens=special_tokens,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sample_data.oscar_sample_texts(), trainer)
    return tokenizer
