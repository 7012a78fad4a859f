"""Generated English-like web pages as OSCAR 23.01 records, with the oddities that real pages have.

A page has a topic, a person and a town that appear again in its sentences. So there is something to learn at every
distance: spelling, grammar, which words go together, who the page is about.
Source of the record's shape: Abadji et al. 2022, "Towards a Cleaner Document-Oriented Multilingual Crawled Corpus".
"""

import random
import re
import uuid
from collections.abc import Iterator

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
    """`count` records with "content", "warc_headers" and "metadata", as OSCAR 23.01 has them."""
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
