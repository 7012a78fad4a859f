"""Small tokenizers, texts and folders of token blocks for the tests of OSCAR text."""

import itertools
import json
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from common.cache import cached
from common.data.token_folder import Manifest, make_request, read_manifest, write_folder

WORDS = ["the", "gradients", "of", "four", "workers", "are", "averaged", "before", "every", "step"]
END_OF_TEXT = 0
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


def make(folder: Path, tokenizer, texts=TEXTS, size=None, validation=0.1) -> Manifest:
    """The manifest of `folder`, made from `texts` with small blocks."""
    request = make_request([{"name": "texts"}], tokenizer, size, block_size=8, validation=validation)
    return read_manifest(cached(folder, lambda partial: write_folder(partial, texts, tokenizer, request), fresh=True))


def documents_of(folder: Path, split: str) -> list[list[int]]:
    """The ids of each document in a .bin file, read with nothing but numpy."""
    manifest = json.loads((folder / "manifest.json").read_text())
    ids = np.fromfile(folder / f"{split}.bin", manifest["dtype"]).tolist()
    ends = [place + 1 for place, token in enumerate(ids) if token == END_OF_TEXT]
    assert [*ends, 0][-1 if not ids else -2] == len(ids)
    return [ids[first:end] for first, end in itertools.pairwise([0, *ends])]
