"""The embedded data: right in shape, the same on every machine, and not to be solved without reading both sentences."""

import csv
import json
import multiprocessing

import pytest
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.linear_model import LogisticRegression

from common.data import sample_data


@pytest.fixture(scope="module")
def pairs():
    """{"train": [(sentence1, sentence2, label), ...], "dev": ...} as the files have them."""
    return {half: _read(sample_data.glue_sample_dir() / f"{half}.tsv") for half in ("train", "dev")}


@pytest.fixture(scope="module")
def records():
    """The records of the OSCAR sample, one per line that ends at \\n."""
    text = sample_data.oscar_sample_file().read_bytes().decode()
    return [json.loads(line) for line in text.removesuffix("\n").split("\n")]


def _read(path):
    with open(path, encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    assert list(rows[0]) == ["index", "sentence1", "sentence2", "label"]
    assert [int(row["index"]) for row in rows] == list(range(len(rows)))
    return [(row["sentence1"], row["sentence2"], row["label"]) for row in rows]


def test_there_are_enough_pairs_with_both_labels_equally_often_and_no_text_in_both_sets(pairs):
    assert len(pairs["train"]) >= 640
    assert len(pairs["dev"]) >= 160
    for half in pairs.values():
        labels = [label for _, _, label in half]
        assert labels.count("entailment") == labels.count("not_entailment") == len(half) // 2
    train, dev = ({text for text, _, _ in pairs[half]} for half in ("train", "dev"))
    assert not train & dev


def test_the_label_says_whether_the_statement_is_what_the_text_is_sure_of(pairs):
    for text, claim, label in pairs["train"] + pairs["dev"]:
        sure = [part for part in text.removesuffix(" today.").split(" and ") if not part.lower().startswith("maybe ")]
        assert len(sure) == 1, text
        assert (claim == f"{sure[0]}.") == (label == "entailment"), (text, claim)


@pytest.mark.parametrize(
    "view, features",
    [
        ("{0}", {}),
        ("{1}", {}),
        ("{0} {1}", {"analyzer": str.split}),
        ("{0} {1}", {"ngram_range": (1, 2), "binary": True}),
    ],
)
def test_neither_sentence_alone_nor_a_bag_of_words_of_both_decides_the_label(pairs, view, features):
    vectorizer = CountVectorizer(lowercase=False, **features)
    texts = {half: [view.format(text, claim) for text, claim, _ in pairs[half]] for half in pairs}
    labels = {half: [label for _, _, label in pairs[half]] for half in pairs}

    classifier = LogisticRegression(max_iter=1000).fit(vectorizer.fit_transform(texts["train"]), labels["train"])
    accuracy = classifier.score(vectorizer.transform(texts["dev"]), labels["dev"])

    assert accuracy <= 0.60


def test_every_word_of_a_statement_stands_in_its_text_whichever_the_label(pairs):
    for text, claim, _ in pairs["train"] + pairs["dev"]:
        assert set(claim.rstrip(".").split()) < set(text.rstrip(".").split())


def test_the_text_is_long_enough_and_has_the_oddities_of_real_pages(records):
    contents = [record["content"] for record in records]
    everything = "".join(contents)

    assert 200_000 < len(everything) < 1_000_000
    assert {"\u2028", "\u0085", "é"} <= set(everything) and "" in contents
    assert len(contents) > len(set(contents))
    assert {len(content) < 12 for content in contents} == {True, False}


def _make_when_told(start, results):
    start.wait()
    results.put((sample_data.glue_sample_dir() / "dev.tsv").read_bytes())


def test_ranks_that_start_together_on_an_empty_cache_all_read_whole_files(tmp_path, monkeypatch):
    expected = (sample_data.glue_sample_dir() / "dev.tsv").read_bytes()
    monkeypatch.setenv("COS598D_CACHE", str(tmp_path))
    context = multiprocessing.get_context("fork")
    start, results = context.Event(), context.Queue()
    ranks = [context.Process(target=_make_when_told, args=(start, results)) for _ in range(4)]

    for rank in ranks:
        rank.start()
    start.set()
    read = [results.get(timeout=60) for _ in ranks]
    for rank in ranks:
        rank.join(timeout=60)

    assert read == [expected] * 4
