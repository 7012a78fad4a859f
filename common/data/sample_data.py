"""The embedded data: an entailment task in RTE's layout and web-like text in OSCAR's, both generated.

The scripts need data without a download, and a task that a model learns in seconds: then a wrong gradient shows up as
a low accuracy. The files are made once, from fixed seeds, and stored in the cache; every machine gets the same bytes.
"""

import json
import os
import random
from collections.abc import Iterator
from pathlib import Path

from common.cache import cached
from common.data.sample_text import oscar_records
from common.paths import cache_dir

VERSION = 3  # part of the folder's name: increase it with every change to the files

TRAIN_PAIRS, DEV_PAIRS = 2560, 320  # multiples of 4: pairs come in fours, see contrast_set
OSCAR_RECORDS = 500
OSCAR_FILE = "en_meta_part_1.jsonl"
NAMES = ["Anna", "Ben", "Clara", "David", "Emma", "Frank", "Grace", "Henry"]
VERBS = ["bought", "cleaned", "found", "lost", "painted", "sold"]
OBJECTS = ["bicycle", "boat", "chair", "clock", "lamp", "piano", "radio", "table"]

Fact = tuple[str, str, str]  # who, did what, to which object
Pair = tuple[str, str, str]  # sentence1, sentence2, label


def glue_sample_dir() -> Path:
    """A folder with train.tsv and dev.tsv in RTE's layout: index, sentence1, sentence2, label.

    Labels are entailment and not_entailment, half and half; the two files have no sentence1 in common.
    """

    def build(folder: Path) -> None:
        pairs = entailment_pairs(TRAIN_PAIRS + DEV_PAIRS, random.Random(598))
        _write_tsv(folder / "train.tsv", pairs[:TRAIN_PAIRS])
        _write_tsv(folder / "dev.tsv", pairs[TRAIN_PAIRS:])

    return cached(cache_dir("sample") / f"glue-v{VERSION}", build)


def oscar_sample_file() -> Path:
    """A .jsonl file with one OSCAR 23.01 record a line; "content" is the text. See common/data/sample_text.py."""

    def build(folder: Path) -> None:
        path = folder / OSCAR_FILE
        with open(path, "w", encoding="utf-8") as file:
            for record in oscar_records(OSCAR_RECORDS, random.Random(2301)):
                # As in OSCAR, text is UTF-8 and not escaped: U+2028 is inside the line, and does not end it.
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
        os.utime(path, (0, 0))  # token blocks made of this text remain valid when the text is rebuilt

    return cached(cache_dir("sample") / f"oscar-v{VERSION}", build) / OSCAR_FILE


def oscar_sample_texts() -> Iterator[str]:
    """The sample text, one document after the other."""
    with open(oscar_sample_file(), encoding="utf-8", newline="\n") as file:  # iterates over lines that end at \n only
        for line in file:
            yield json.loads(line)["content"]


def entailment_pairs(count: int, draw: random.Random) -> list[Pair]:
    """`count` pairs, a multiple of 4; every sentence1 occurs in exactly two, one of each label."""
    pairs: list[Pair] = []
    seen: set[str] = set()
    while len(pairs) < count:
        four = contrast_set(draw)
        texts = {text for text, _, _ in four}
        if not texts & seen:
            seen |= texts
            pairs += four
    return pairs


def contrast_set(draw: random.Random) -> list[Pair]:
    """Return two texts whose certain facts differ, each with a statement that is true for it alone.

    A text has two facts, one only perhaps true: "Anna has sold the lamp and maybe Ben has found the boat today."
    The other text exchanges names, verbs or objects (or several) between the facts. Text and statement decide the label
    together. A model that sees only one of the two, or only a bag of words of both, is right on exactly two of the four
    pairs: each text and each statement has both labels, and the two texts consist of the same words. All bigrams of the
    statement also occur in both texts.
    (Gardner et al. 2020, "Evaluating Models' Local Decision Boundaries via Contrast Sets".)
    """
    slots = [draw.sample(words, 2) for words in (NAMES, VERBS, OBJECTS)]
    sure, maybe = _facts(slots)
    exchanged = draw.randrange(1, 8)  # a bit for each slot: at least one is exchanged
    other_slots = [slot[::-1] if exchanged >> i & 1 else slot for i, slot in enumerate(slots)]
    other_sure, other_maybe = _facts(other_slots)
    text, other_text = _text(sure, maybe, draw), _text(other_sure, other_maybe, draw)
    claim, other_claim = _sentence(sure), _sentence(other_sure)
    return [
        (text, claim, "entailment"),
        (text, other_claim, "not_entailment"),
        (other_text, claim, "not_entailment"),
        (other_text, other_claim, "entailment"),
    ]


def _facts(slots: list[list[str]]) -> tuple[Fact, Fact]:
    names, verbs, objects = slots
    return (names[0], verbs[0], objects[0]), (names[1], verbs[1], objects[1])


def _text(sure: Fact, maybe: Fact, draw: random.Random) -> str:
    # Mostly the sure fact comes first. If both orders were equally frequent, a word's position would say nothing about
    # the label without the other words' positions (an exclusive or), and a small model would start much later.
    if draw.random() < 7 / 8:
        return f"{_clause(sure)} and maybe {_clause(maybe)} today."
    return f"Maybe {_clause(maybe)} and {_clause(sure)} today."


def _clause(fact: Fact) -> str:
    name, verb, thing = fact
    return f"{name} has {verb} the {thing}"


def _sentence(fact: Fact) -> str:
    return f"{_clause(fact)}."


def _write_tsv(path: Path, pairs: list[Pair]) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write("index\tsentence1\tsentence2\tlabel\n")
        for index, pair in enumerate(pairs):
            file.write("\t".join([str(index), *pair]) + "\n")
