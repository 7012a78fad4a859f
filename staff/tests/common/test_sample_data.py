"""The embedded data: right in shape, and not to be solved without reading both sentences."""

import csv
from hashlib import sha256

import pytest

from common.data.sample_data import VERSION, glue_sample_dir, oscar_sample_file


@pytest.fixture(scope="module")
def pairs():
    """{"train": [(sentence1, sentence2, label), ...], "dev": ...} as the files have them."""
    halves = {}
    for half in ("train", "dev"):
        with open(glue_sample_dir() / f"{half}.tsv", encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
        assert list(rows[0]) == ["index", "sentence1", "sentence2", "label"]
        assert [int(row["index"]) for row in rows] == list(range(len(rows)))
        halves[half] = [(row["sentence1"], row["sentence2"], row["label"]) for row in rows]
    return halves


def test_both_labels_are_equally_frequent_and_no_text_is_in_both_sets(pairs):
    assert {half: len(rows) for half, rows in pairs.items()} == {"train": 2560, "dev": 320}  # as the READMEs say
    for rows in pairs.values():
        labels = [label for _, _, label in rows]
        assert labels.count("entailment") == labels.count("not_entailment") == len(labels) // 2
    train, dev = ({text for text, _, _ in pairs[half]} for half in ("train", "dev"))
    assert not train & dev


def test_the_label_says_whether_the_statement_is_what_the_text_is_sure_of(pairs):
    for text, claim, label in pairs["train"] + pairs["dev"]:
        sure = [part for part in text.removesuffix(" today.").split(" and ") if not part.lower().startswith("maybe ")]
        assert len(sure) == 1, text
        assert (claim == f"{sure[0]}.") == (label == "entailment"), (text, claim)
        assert set(claim.rstrip(".").split()) < set(text.rstrip(".").split())  # whichever the label


def test_the_files_are_those_of_their_version_on_every_machine(tmp_path, monkeypatch):
    """If you change them, increase VERSION: caches keep the files of a version."""
    monkeypatch.setenv("COS598D_CACHE", str(tmp_path))
    folder = glue_sample_dir()

    contents = [path.read_bytes() for path in (folder / "train.tsv", folder / "dev.tsv", oscar_sample_file())]

    assert (VERSION, sha256(b"".join(contents)).hexdigest()[:16]) == (4, "1d12003975fac2e9")
