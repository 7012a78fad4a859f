"""The embedded data: an entailment task in RTE's layout and web-like text in OSCAR's, both generated.

The scripts need data without a download, and a task that a model learns in seconds: then a wrong gradient shows up as
a low accuracy. The files are made once, from fixed seeds, and stored in the cache; every machine gets the same bytes.
"""

import json
import random
import re
import uuid
from collections.abc import Iterator
from pathlib import Path

from common.cache import cached
from common.paths import cache_dir

VERSION = 4  # part of the folder's name: increase it with every change to the files

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
    """A .jsonl file with one OSCAR 23.01 record a line; "content" is the text of a `page`."""

    def build(folder: Path) -> None:
        with open(folder / OSCAR_FILE, "w", encoding="utf-8") as file:
            for record in oscar_records(OSCAR_RECORDS, random.Random(2301)):
                # As in OSCAR, text is UTF-8 and not escaped: U+2028 is inside the line, and does not end it.
                file.write(json.dumps(record, ensure_ascii=False) + "\n")

    return cached(cache_dir("sample") / f"oscar-v{VERSION}", build) / OSCAR_FILE


def oscar_sample_texts() -> Iterator[str]:
    """The sample text, one document after the other."""
    with open(oscar_sample_file(), encoding="utf-8", newline="\n") as file:  # iterates over lines that end at \n only
        for line in file:
            yield json.loads(line)["content"]


def entailment_pairs(count: int, draw: random.Random) -> list[Pair]:
    """`count` pairs, a multiple of 4; every sentence1 occurs in exactly two, one of each label."""
    pairs: list[Pair] = []
    texts_so_far: set[str] = set()
    while len(pairs) < count:
        four = contrast_set(draw)
        texts = {text for text, _, _ in four}
        if not texts & texts_so_far:
            texts_so_far |= texts
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


# OSCAR's text: English-like pages with the oddities that real pages have. A page has a topic, a person and a town that
# appear again in its sentences. So there is something to learn at every distance: spelling, grammar, which words go
# together, who the page is about.

# The values of a template's {field}, the same for all topics; {noun}, {past} and {where} depend on the topic.
WORDS = {
    "name": "Alice Bruno Carmen Derek Elena Félix George Hannah Ines Jonas Karin Leo Maria Noah Olga Zoë",
    "town": "Ashford Bergen Cork Delft Exeter Łódź Málaga Norwich Oxford Porto Riga Toledo Utrecht Vienna York",
    "day": "Monday Tuesday Wednesday Thursday Friday Saturday Sunday",
    "month": "January March April June July September October December",
    "adjective": "old new small large quiet busy cheap famous local wooden bright heavy early broken lovely simple",
    "adverb": "slowly quickly carefully often never always usually quietly almost really",
    "feeling": "happy tired surprised proud angry glad worried calm grateful",
    "number": "two three four five six seven eight nine ten twelve twenty thirty",
}

# For each topic: what there is, what people did with it, where.
TOPICS = {
    "food": (
        "soup bread cake kitchen recipe oven table café cheese apple spoon dinner market garden",
        "cooked tasted baked served bought ordered mixed finished",
        "in the kitchen;at the market;near the station;behind the café;on the main square",
    ),
    "travel": (
        "train tram ticket station map hotel bridge river road suitcase boat harbour mountain village",
        "missed caught crossed followed reached booked left photographed",
        "at the station;on the bridge;by the river;along the coast;near the old harbour",
    ),
    "sport": (
        "team game goal player trainer race stadium ball season winner jersey score club bicycle",
        "won lost watched started trained played joined cheered",
        "in the stadium;in the rain;before the break;on the last day;at home",
    ),
    "work": (
        "office computer letter meeting customer project report machine workshop garage tool price plan invoice",
        "repaired signed finished checked opened sold planned printed",
        "at the office;in the workshop;on the second floor;after lunch;on the telephone",
    ),
    "school": (
        "book teacher lesson pupil student exam question answer page poem language pencil word desk",
        "read learned studied explained remembered translated asked copied",
        "in the library;at school;during the lesson;in the last row;on the first page",
    ),
    "weather": (
        "storm wind cloud rain roof window winter summer sky rainbow forest lake farmer field",
        "watched noticed expected described survived measured enjoyed photographed",
        "over the lake;in the forest;behind the hills;on the farm;across the north",
    ),
}

SENTENCES = [
    "{name} {past} the {adjective} {noun} {where}.",
    "On {day} {they} {past} the {noun} and then {past} another {noun}.",
    "The {noun} in {town} is {adverb} {adjective}, but the {noun} is not.",
    "{They} {past} {number} {noun}s in {month}, and {number} more in {month}.",
    '"I {adverb} {past} such a {adjective} {noun}," said {name}.',
    "If the {noun} is {adjective}, you need a {adjective} {noun} as well.",
    "Have you ever seen the {noun} {where}?",
    "{name} was {feeling} because the {noun} was so {adjective}.",
    "There are {number} {noun}s {where}, and one of them belongs to {name}.",
    "It costs {price} and takes {number} minutes from {town}.",
    "After that, {they} {adverb} went back to {town}.",
    "Most people in {town} know the {noun}; few have {past} it.",
    "The {adjective} {noun} {where} opened in {year}.",
    "{They} told us about a {adjective} {noun} that nobody had {past} before.",
    "Why was the {noun} so {adjective}? Because {name} had {past} it the day before.",
]

TITLES = [
    "How {name} {past} the {adjective} {noun}",
    "The {noun}s of {town}",
    "{number} {adjective} {noun}s for {month}",
    "{town}, {day}: {noun} and {noun}",
]

# What a crawler keeps besides prose: short, repeated, in other scripts, or empty.
SCRAPS = ["", "\u00a0", "…", "Home", "404", "Read more »", "Café Zoë", "© 2023", "日本語", "Log in | Sign up"]
NOTICE = "This site uses cookies. By using it you agree to our terms. All rights reserved."


class _Fields(dict[str, str]):
    """The values of the fields of a page's templates: fixed for the page (name, town), or drawn each time."""

    def __init__(self, draw: random.Random):
        nouns, verbs, places = draw.choice(list(TOPICS.values()))
        self._choices = {field: words.split() for field, words in WORDS.items()}
        self._choices |= {"noun": nouns.split(), "past": verbs.split(), "where": places.split(";")}
        self._draw = draw
        pronoun = draw.choice(["he", "she", "they"])
        super().__init__(name=self["name"], town=self["town"], they=pronoun, They=pronoun.capitalize())

    def __missing__(self, field: str) -> str:
        if field == "year":
            return str(self._draw.randrange(1890, 2023))
        if field == "price":
            return f"{self._draw.choice('$£€')}{self._draw.randrange(2, 90)}.{self._draw.choice(['00', '50', '99'])}"
        return self._draw.choice(self._choices[field])


def page(draw: random.Random) -> str:
    """One page: a title and one to six paragraphs, a line each; one page in twelve is a scrap."""
    if draw.random() < 1 / 12:
        return draw.choice(SCRAPS)
    fields = _Fields(draw)
    lines = [draw.choice(TITLES).format_map(fields)]
    for _ in range(draw.randint(1, 6)):
        # Editors paste U+2028, a line separator, and old pages U+0085: neither ends a line of the file.
        space = draw.choice(["\u2028", "\u0085"]) if draw.random() < 1 / 20 else " "
        lines.append(space.join(draw.choice(SENTENCES).format_map(fields) for _ in range(draw.randint(2, 5))))
    if draw.random() < 1 / 8:
        lines.append(NOTICE)
    text = "\n".join(line[:1].upper() + line[1:] for line in lines)
    # "a early train" becomes "an early train".
    return re.sub(r"\b([Aa]) (?=[aeiou])", r"\1n ", text)


def oscar_records(count: int, draw: random.Random) -> Iterator[dict]:
    """`count` records with "content", "warc_headers" and "metadata", as OSCAR 23.01 has them.

    (Abadji et al. 2022, "Towards a Cleaner Document-Oriented Multilingual Crawled Corpus".)
    """
    for number in range(count):
        content = page(draw)
        yield {
            "content": content,
            "warc_headers": _warc_headers(number, content, draw),
            "metadata": _metadata(content, draw),
        }


def _warc_headers(number: int, content: str, draw: random.Random) -> dict[str, str]:
    date = f"2022-11-{draw.randint(10, 28)}T{draw.randrange(24):02}:{draw.randrange(60):02}:00Z"
    digest = "".join(draw.choices("ABCDEFGHIJKLMNOPQRSTUVWXYZ234567", k=32))
    return {
        "warc-record-id": _record_id(draw),
        "warc-refers-to": _record_id(draw),
        "warc-target-uri": f"https://www.example.org/page/{number}",
        "warc-date": date,
        "warc-type": "conversion",
        "warc-block-digest": f"sha1:{digest}",
        "warc-identified-content-language": "eng",
        "content-type": "text/plain",
        "content-length": str(len(content.encode())),
    }


def _record_id(draw: random.Random) -> str:
    return f"<urn:uuid:{uuid.UUID(int=draw.getrandbits(128), version=4)}>"


def _metadata(content: str, draw: random.Random) -> dict:
    is_short = len(content) < 100
    sentences = [{"label": "en", "prob": round(draw.uniform(0.8, 1), 4)} for _ in content.split("\n")]
    return {
        "identification": {"label": "en", "prob": round(draw.uniform(0.7, 1), 4)},
        "harmful_pp": None if is_short else round(draw.uniform(200, 4000), 2),
        "tlsh": None if is_short else f"tlsh:T1{draw.getrandbits(140):035X}",
        "quality_warnings": ["tiny", "short_sentences"] if is_short else None,
        "categories": draw.choice([None, None, None, ["cooking"], ["press", "sports"]]),
        "sentence_identifications": [None if is_short else sentence for sentence in sentences],
    }
