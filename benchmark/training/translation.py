"""T5's data: pairs of a text and its translation, from a TSV or JSON lines file, or a small embedded sample.

    source<TAB>target                                          one pair a line
    {"source": "...", "target": "..."}                         the same as JSON
    {"translation": {"en": "...", "ro": "..."}}                as the datasets of the WMT tasks have it

T5's input is "translate English to German: ..."; what stands in a file is taken as it is.
"""

import itertools
import json
import random
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from common.errors import InputError

PREFIX = "translate English to German: "
VALIDATION = 20  # every 20th pair is kept for validation
TRANSLATED = 32  # pairs for BLEU

Pair = tuple[str, str]

_WHO = {"the boy": "der Junge", "the girl": "das Mädchen", "the man": "der Mann", "the woman": "die Frau"}
_DOES = {"sees": "sieht", "buys": "kauft", "finds": "findet", "paints": "malt", "needs": "braucht"}
_WHAT = {
    "a house": "ein Haus", "a book": "ein Buch", "a boat": "ein Boot", "a car": "ein Auto", "a bicycle": "ein Fahrrad",
    "a radio": "ein Radio", "a picture": "ein Bild", "a ticket": "ein Ticket", "a sheet": "ein Blatt",
}  # fmt: skip
_WHEN = {"today": "heute", "now": "jetzt", "often": "oft", "never": "nie", "again": "wieder"}


def sample_pairs() -> list[Pair]:
    """900 short English sentences with their German translations, in one fixed random order."""
    pairs = []
    for (who, wer), (does, tut), (what, was), (when, wann) in itertools.product(
        _WHO.items(), _DOES.items(), _WHAT.items(), _WHEN.items()
    ):
        pairs.append((f"{PREFIX}{who} {does} {what} {when}.", f"{wer} {tut} {wann} {was}."))
    random.Random(598).shuffle(pairs)
    return pairs


def read_pairs(path: Path) -> list[Pair]:
    """The pairs of one file; raises InputError with the line that is not a pair."""
    pairs = []
    try:
        with path.open(encoding="utf-8") as file:
            lines = list(file)  # splitlines() would also cut at U+2028 and others, which texts contain
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--data_dir: cannot read {path} ({error}); expected UTF-8 text") from error
    for number, line in enumerate(lines, 1):
        if line.strip():
            pairs.append(_pair(line.rstrip("\n"), f"{path}:{number}"))
    return pairs


def _pair(line: str, place: str) -> Pair:
    if not line.lstrip().startswith("{"):
        parts = line.split("\t")
        if len(parts) != 2 or not all(part.strip() for part in parts):
            raise InputError(
                f"{place}: expected a text, a tab and its translation, got {len(parts)} columns; fix the line"
            )
        return parts[0], parts[1]
    try:
        entry = json.loads(line)
        entry = entry.get("translation", entry)
        first, second = (entry["source"], entry["target"]) if "source" in entry else list(entry.values())[:2]
    except (ValueError, KeyError, AttributeError) as error:
        raise InputError(f'{place}: expected {{"source": ..., "target": ...}}; correct the line') from error
    return str(first), str(second)


class Pairs(Dataset):
    """Items: input_ids and attention_mask (T,) of the text, labels (T,) of its translation, -100 at padding."""

    def __init__(self, pairs: list[Pair], tokenizer: PreTrainedTokenizerBase, length: int) -> None:
        self.pairs, self.tokenizer, self.length = pairs, tokenizer, length

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        # All examples have the same length, so that steps take the same time and strategies can be compared.
        fixed = {"padding": "max_length", "truncation": True, "max_length": self.length, "return_tensors": "pt"}
        source, target = (self.tokenizer(text, **fixed) for text in self.pairs[index])
        labels = torch.where(target["attention_mask"] == 1, target["input_ids"], -100)
        return {"input_ids": source["input_ids"][0], "attention_mask": source["attention_mask"][0], "labels": labels[0]}

    def target_lengths(self, indices: list[int]) -> list[int]:
        """Return the tokens of each of these targets."""
        targets = self.tokenizer([self.pairs[i][1] for i in indices], truncation=True, max_length=self.length)
        return [len(ids) for ids in targets["input_ids"]]


def load_pairs(data: Path | None, tokenizer: PreTrainedTokenizerBase, length: int) -> tuple[Pairs, Pairs]:
    """Training and validation pairs from a folder's .tsv, .jsonl and .json files; None: the embedded sample."""
    pairs = sample_pairs()
    if data is not None:
        files = sorted(file for file in data.iterdir() if file.suffix in (".tsv", ".jsonl", ".json"))
        pairs = [pair for file in files for pair in read_pairs(file)]
        if not pairs:
            raise InputError(f"--data_dir: {data} holds no translation pairs; expected .tsv or .jsonl files with some")
    held_out = pairs[::VALIDATION]
    kept = [pair for i, pair in enumerate(pairs) if i % VALIDATION]
    return Pairs(kept or pairs, tokenizer, length), Pairs(held_out, tokenizer, length)


def bleu(model: Any, tokenizer: PreTrainedTokenizerBase, pairs: Pairs) -> float:
    """sacrebleu's BLEU (0 to 100; Post 2018) of greedy translations of the first validation pairs."""
    import sacrebleu  # here: arguments.py has looked for it where --bleu was given

    chosen = range(min(TRANSLATED, len(pairs)))
    batch = torch.stack([pairs[i]["input_ids"] for i in chosen])
    mask = torch.stack([pairs[i]["attention_mask"] for i in chosen])
    device = next(model.parameters()).device
    out = model.generate(input_ids=batch.to(device), attention_mask=mask.to(device), max_new_tokens=pairs.length)
    texts = tokenizer.batch_decode(out, skip_special_tokens=True)
    return sacrebleu.corpus_bleu(texts, [[pairs.pairs[i][1] for i in chosen]]).score
