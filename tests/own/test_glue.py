"""GLUE files as they really are, the cache of features, and the official metrics."""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from common.arguments import parse_glue_arguments
from common.data.glue import TASKS, glue_metrics, load_glue, read_examples
from common.errors import InputError
from common.models.load import load_tokenizer

RTE = TASKS["rte"]
HEADER = "index\tsentence1\tsentence2\tlabel\n"


def write(folder, name, text):
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


STS_B = "\t".join(["index", "genre", "filename", "year", "old_index", "source1", "source2"])


@pytest.mark.parametrize(
    "task, text, examples",
    [
        # One double quote does not swallow the next rows.
        ("rte", HEADER + '0\ta "b\tc\tentailment\n1\td\te" f\tnot_entailment\n', [('a "b', "c", 0), ("d", 'e" f', 1)]),
        # A line separator inside a sentence does not end the row.
        ("rte", HEADER + "0\ta\u2028b\u0085c\td\tentailment\r\n", [("a\u2028b\u0085c", "d", 0)]),
        # A byte order mark is not part of the first column.
        ("mrpc", "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n1\t7\t8\tone\ttwo\n", [("one", "two", 1)]),
        # CoLA has no header; STS-B's labels are numbers.
        ("cola", "gj04\t1\t\tFine.\ngj04\t0\t*\tNot fine.\n", [("Fine.", None, 1), ("Not fine.", None, 0)]),
        ("sts-b", f"{STS_B}\tsentence1\tsentence2\tscore\n0\tg\tf\t2012\t1\tn\tn\ta\tb\t3.800\n", [("a", "b", 3.8)]),
    ],
)
def test_rows_are_read_as_the_files_of_each_task_have_them(tmp_path, task, text, examples):
    read = read_examples(write(tmp_path, "t.tsv", text), TASKS[task])

    assert [(e.text_a, e.text_b, e.label) for e in read] == examples


@pytest.mark.parametrize(
    "text, words",
    [
        (HEADER + "0\ta\tb\tentailment\n1\ta\n", ["t.tsv:3", "4 columns", "got 2"]),
        (HEADER + "0\ta\tb\tperhaps\n", ["t.tsv:2", "'perhaps'", "not_entailment"]),
        (HEADER, ["t.tsv", "empty"]),
        ("", ["t.tsv:1", "sentence1"]),
        (b"index\tsentence1\tsentence2\tlabel\n0\t\xff\tb\tentailment\n", ["t.tsv:2", "UTF-8", "0xff"]),
        ("sentence\tlabel\ngood\t1\n", ["t.tsv:1", "sentence1", "--task_name"]),
    ],
)
def test_a_damaged_file_is_named_with_its_line(tmp_path, text, words):
    with pytest.raises(InputError) as error:
        read_examples(write(tmp_path, "t.tsv", text), RTE)

    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("score", ["nan", "inf", "-0.1", "500", "five", ""])
def test_a_score_is_a_number_from_0_to_5(tmp_path, score):
    text = f"{STS_B}\tsentence1\tsentence2\tscore\n0\tg\tf\t2012\t1\tn\tn\ta\tb\t{score}\n"

    with pytest.raises(InputError, match=r"t\.tsv:2: expected a score from 0 to 5"):
        read_examples(write(tmp_path, "t.tsv", text), TASKS["sts-b"])


def test_a_missing_file_says_how_to_get_it(tmp_path):
    with pytest.raises(InputError, match=r"dev\.tsv: no such file; run `python download_glue_data\.py"):
        read_examples(tmp_path / "dev.tsv", RTE)


@pytest.fixture
def small(tmp_path, monkeypatch):
    """A configuration with a data folder of its own, and an empty cache beside the tiny model's."""
    config = parse_glue_arguments("task1_single", ["--max_seq_length", "16"])
    tokenizer = load_tokenizer(config.tokenizer_name, "bert")
    monkeypatch.setenv("COS598D_CACHE", str(tmp_path / "cache"))
    data = tmp_path / "data"
    data.mkdir()
    rows = [f"{i}\tAnna has sold the lamp{' .' * i}\tBen has it.\tentailment\n" for i in range(5)]
    write(data, "train.tsv", HEADER + "".join(rows))
    write(data, "dev.tsv", HEADER + rows[0])
    return replace(config, data_dir=data), tokenizer


def cached_files(tmp_path):
    return sorted((tmp_path / "cache" / "features").glob("*/features.pt"))


def test_an_item_is_what_the_model_takes_and_comes_from_the_cache_the_second_time(small, tmp_path):
    config, tokenizer = small
    data = load_glue(config, tokenizer)
    times = {path: path.stat().st_mtime_ns for path in cached_files(tmp_path)}

    item = load_glue(config, tokenizer).train[0]

    shapes = {"input_ids": (16,), "attention_mask": (16,), "token_type_ids": (16,), "labels": ()}
    assert {name: tuple(value.shape) for name, value in item.items()} == shapes
    assert tokenizer.decode(item["input_ids"]).startswith("[CLS] Anna has sold the lamp [SEP] Ben")
    assert torch.equal(item["input_ids"], data.train[0]["input_ids"])
    assert {path: path.stat().st_mtime_ns for path in cached_files(tmp_path)} == times


@pytest.mark.parametrize("change", ["length", "content"])
def test_another_length_or_content_has_features_of_its_own(small, tmp_path, change):
    config, tokenizer = small
    load_glue(config, tokenizer)
    before = len(cached_files(tmp_path))

    if change == "length":
        config = replace(config, max_seq_length=12)
    else:
        write(config.data_dir, "train.tsv", HEADER + "0\tother\ttext\tentailment\n")
    data = load_glue(config, tokenizer)

    assert len(cached_files(tmp_path)) > before
    assert data.train.tensors[0].shape == ((5, 12) if change == "length" else (1, 16))


@pytest.mark.parametrize(
    "task, metrics", [("mrpc", {"acc": 0.8, "f1": 0.8}), ("cola", {"mcc": 4 / 6})], ids=["mrpc", "cola"]
)
def test_the_metrics_of_a_small_table(task, metrics):
    outputs = np.array([[0, 1], [0, 1], [1, 0], [1, 0], [0, 1]], dtype=float)  # predictions 1 1 0 0 1

    assert glue_metrics(TASKS[task], outputs, np.array([1, 0, 0, 0, 1])) == pytest.approx(metrics)


def test_the_correlations_of_a_small_table_with_a_tie_and_of_a_constant():
    labels = np.array([0.0, 1.0, 2.0, 2.0])

    metrics = glue_metrics(TASKS["sts-b"], np.array([[0.0], [1.0], [2.0], [9.0]]), labels)

    assert metrics == pytest.approx({"pearson": 0.68224, "spearmanr": 0.94868, "corr": 0.81546}, abs=1e-5)
    assert glue_metrics(TASKS["sts-b"], np.ones((4, 1)), labels)["corr"] == 0.0


REAL = Path(os.environ.get("COS598D_DATA", "/nonexistent")) / "glue"


@pytest.mark.skipif(not REAL.is_dir(), reason="needs real GLUE files: set COS598D_DATA to a folder that holds glue/")
@pytest.mark.parametrize(
    "task, folder, train, dev",
    [
        ("rte", "RTE", 2490, 277),
        ("cola", "CoLA", 8551, 1043),
        ("wnli", "WNLI", 635, 71),
        ("sts-b", "STS-B", 5749, 1500),
        ("sst-2", "SST-2", 67349, 872),
        ("mrpc", "MRPC", 3667, 408),
    ],
)
def test_real_files_have_all_their_rows(task, folder, train, dev):
    counts = [len(read_examples(REAL / folder / f"{part}.tsv", TASKS[task])) for part in ("train", "dev")]

    assert counts == [train, dev]
