"""Small tokenizers, texts and folders of token blocks for the tests of OSCAR text."""

import json
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from common.data.tokenise import tokenise

WORDS = ["the", "gradients", "of", "four", "workers", "are", "averaged", "before", "every", "step"]
TEXTS = [" ".join(WORDS[i % 7 : i % 7 + 2 + i % 5]) + f" {i}." for i in range(100)]


def bpe(vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE like GPT-2's, small."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>")


def make(folder: Path, tokenizer, texts=TEXTS, sources=None, **options):
    """(manifest, is new) of `folder`, made from `texts` with small blocks."""
    options = {"size": None, "block_size": 8, "validation": 0.1} | options
    return tokenise(texts, sources or [{"name": "texts"}], tokenizer, folder, **options)


def documents_of(folder: Path, split: str) -> list[list[int]]:
    """The ids of each document in a .bin file, read with nothing but numpy."""
    manifest = json.loads((folder / "manifest.json").read_text())
    ids = np.fromfile(folder / f"{split}.bin", manifest["dtype"]).tolist()
    assert not ids or ids[-1] == manifest["end_of_text"]
    documents: list[list[int]] = [[]]
    for token in ids:
        documents[-1].append(token)
        if token == manifest["end_of_text"]:
            documents.append([])
    return documents[:-1]
