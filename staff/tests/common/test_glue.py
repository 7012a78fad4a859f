"""GLUE files as they really are, which of them a run reads, the cache of features, and the official metrics."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from common.arguments import parse_glue_arguments
from common.data.glue import TASKS, glue_metrics, load_glue, read_examples
from common.errors import InputError
from common.evaluation import evaluate
from common.models.load import load_tokenizer
from common.workers.process_group import Worker

RTE = "index|sentence1|sentence2|label"
MNLI = "index|promptID|pairID|genre|sentence1_binary_parse|sentence2_binary_parse|sentence1_parse|sentence2_parse"
STS_B = "index|genre|filename|year|old_index|source1|source2|sentence1|sentence2|score"
# For each task: the published header, the columns of the texts and of the label, and a label with its number.
COLUMNS: dict[str, tuple[str, tuple[int, ...], int, dict[str, float]]] = {
    "cola": ("", (3,), 1, {"0": 0, "1": 1}),
    "sst-2": ("sentence|label", (0,), 1, {"0": 0, "1": 1}),
    "mrpc": ("Quality|#1 ID|#2 ID|#1 String|#2 String", (3, 4), 0, {"0": 0, "1": 1}),
    "sts-b": (STS_B, (7, 8), 9, {"3.800": 3.8, "0": 0.0}),
    "qqp": ("id|qid1|qid2|question1|question2|is_duplicate", (3, 4), 5, {"0": 0, "1": 1}),
    "mnli": (f"{MNLI}|sentence1|sentence2|label1|gold_label", (8, 9), 11,
             {"contradiction": 0, "entailment": 1, "neutral": 2}),
    "mnli-mm": (f"{MNLI}|sentence1|sentence2|label1|gold_label", (8, 9), 11, {"neutral": 2, "contradiction": 0}),
    "qnli": ("index|question|sentence|label", (1, 2), 3, {"not_entailment": 1, "entailment": 0}),
    "rte": (RTE, (1, 2), 3, {"entailment": 0, "not_entailment": 1}),
    "wnli": (RTE, (1, 2), 3, {"0": 0, "1": 1}),
}  # fmt: skip
# The word that stands for a file in its texts; and the dev files that are not called dev.tsv.
WORDS = {"train": "Anna", "dev": "Ben", "dev_matched": "Clara", "dev_mismatched": "David", "test": "Emma"}
DEV = {"mnli": "dev_matched", "mnli-mm": "dev_mismatched"}


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("tiny", "bert")


@pytest.fixture
def data(tmp_path, monkeypatch):
    """An empty folder for data, and an empty cache, which is the tiny model's, too."""
    monkeypatch.setenv("COS598D_CACHE", str(tmp_path / "cache"))
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


def load(data, tokenizer, task="rte", *flags):
    words = ["--data_dir", data, "--model_name_or_path", "tiny", "--task_name", task, "--max_seq_length", 16, *flags]
    return load_glue(parse_glue_arguments("task1_single", [str(word) for word in words]), tokenizer)


def write(path, *rows, header=RTE, end="\n"):
    lines = [header.replace("|", "\t"), *rows] if header else rows
    path.write_bytes("".join(f"{line}{end}" for line in lines).encode())
    return path


def texts_of(features, tokenizer):
    return [tokenizer.decode(item["input_ids"], skip_special_tokens=True) for item in features]


@pytest.mark.parametrize("task", TASKS)
def test_a_run_reads_the_texts_and_labels_of_its_task_from_the_training_and_the_dev_file(data, tokenizer, task):
    header, texts, label, labels = COLUMNS[task]
    for name, word in WORDS.items():
        rows = [[f"x{column}" for column in range(header.count("|") + 1 if header else 4)] for _ in labels]
        for row, row_label in zip(rows, labels, strict=True):
            row[label] = row_label
            for column, number in zip(texts, ("one", "two"), strict=False):
                row[column] = f"{word} {number}"
        write(data / f"{name}.tsv", *["\t".join(row) for row in rows], header=header)

    loaded = load(data, tokenizer, task)

    for features, name in ((loaded.train, "train"), (loaded.dev, DEV.get(task, "dev"))):
        text = f"{WORDS[name]} one" + (f" {WORDS[name]} two" if len(texts) == 2 else "")
        assert texts_of(features, tokenizer) == [text] * len(labels)
        assert [item["labels"].item() for item in features] == pytest.approx(list(labels.values()))
    assert loaded.task.num_labels == {"sts-b": 1, "mnli": 3, "mnli-mm": 3}.get(task, 2)


@pytest.mark.parametrize(("rows", "end", "examples"), [
    # One double quote does not swallow the next rows.
    (['0\ta "b\tc\tentailment', '1\td\te" f\tnot_entailment'], "\n", [('a "b', "c", 0), ("d", 'e" f', 1)]),
    # A line separator inside a sentence does not end the row.
    (["0\ta\u2028b\u0085c\td\tentailment"], "\r\n", [("a\u2028b\u0085c", "d", 0)]),
])  # fmt: skip
@pytest.mark.parametrize("mark", ["", "\ufeff"], ids=["", "byte order mark"])
def test_rows_are_read_as_the_files_have_them(tmp_path, mark, rows, end, examples):
    header = mark + ("sentence1|sentence2|label" if mark else RTE)
    rows = [row.partition("\t")[2] if mark else row for row in rows]

    read = read_examples(write(tmp_path / "t.tsv", *rows, header=header, end=end), TASKS["rte"])

    assert [(e.text_a, e.text_b, e.label) for e in read] == examples


@pytest.mark.parametrize(("task", "content", "words"), [
    ("rte", "{RTE}\n0\ta\tb\tentailment\n1\ta\n", r"t\.tsv:3: expected 4 columns or more, got 2"),
    ("rte", "{RTE}\n0\ta\tb\tperhaps\n", r"t\.tsv:2: unknown label 'perhaps'; .*not_entailment"),
    ("rte", "{RTE}\n", r"t\.tsv: .*empty file"),
    ("rte", "", r"t\.tsv:1: expected a column 'sentence1'"),
    ("rte", "{RTE}\n0\t\xff\tb\tentailment\n", r"t\.tsv:2: expected UTF-8 text, got byte 0xff"),
    ("rte", "sentence\tlabel\ngood\t1\n", r"t\.tsv:1: expected a column 'sentence1' .*--task_name"),
    *[("sts-b", f"sentence1\tsentence2\tscore\na\tb\t{score}\n", r"t\.tsv:2: expected a score from 0 to 5")
      for score in ("nan", "inf", "-0.1", "500", "five", "")],
])  # fmt: skip
def test_a_damaged_file_is_named_with_its_line(tmp_path, task, content, words):
    (tmp_path / "t.tsv").write_bytes(content.replace("{RTE}", RTE.replace("|", "\t")).encode("latin-1"))

    with pytest.raises(InputError, match=words):
        read_examples(tmp_path / "t.tsv", TASKS[task])
    with pytest.raises(InputError, match=r"dev\.tsv: no such file; run `python download_glue_data\.py"):
        read_examples(tmp_path / "dev.tsv", TASKS[task])


def test_qqp_s_own_broken_rows_are_left_out(tmp_path):
    rows = ("1\t2\t3\ta\tb\t0", "4\t5", "6\t7\t8\tc\td\t1")
    path = write(tmp_path / "t.tsv", *rows, header=COLUMNS["qqp"][0])

    assert [example.text_a for example in read_examples(path, TASKS["qqp"])] == ["a", "c"]


def test_features_come_from_the_cache_unless_length_content_tokenizer_or_a_flag_say_otherwise(data, tokenizer):
    write(data / "train.tsv", *[f"{i}\tAnna has sold the lamp{' .' * i}\tBen has it.\tentailment" for i in range(5)])
    write(data / "dev.tsv", "0\ta\tb\tentailment")
    item = load(data, tokenizer).train[0]
    features = data.parent / "cache" / "features"

    def files():
        return {path: path.stat().st_mtime_ns for path in features.glob("*/features.pt")}

    assert {name: tuple(tensor.shape) for name, tensor in item.items()} == {
        "input_ids": (16,), "attention_mask": (16,), "token_type_ids": (16,), "labels": ()
    }  # fmt: skip
    assert item["attention_mask"].sum() < 16 and item["token_type_ids"].sum() == len("Ben has it . [SEP]".split())
    before = files()
    assert texts_of(load(data, tokenizer).train, tokenizer)[0] == "Anna has sold the lamp Ben has it."
    assert files() == before
    assert load(data, tokenizer, "rte", "--max_seq_length", 12).train[0]["input_ids"].shape == (12,)
    lower = load_tokenizer("tiny", "bert", lower_case=True)
    assert texts_of(load(data, lower).train, lower)[0].startswith("anna")
    write(data / "train.tsv", "0\tother\ttext\tentailment")
    assert texts_of(load(data, tokenizer).train, tokenizer) == ["other text"]
    made = files()
    assert len(made) == 7  # train and dev with 16 tokens, with 12 and in lower case, and the other train
    load(data, tokenizer, "rte", "--overwrite_cache")
    assert sum(files()[path] != made[path] for path in made) == 2


class Counting(nn.Module):
    """A model that writes down how many examples it gets at once."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def forward(self, labels, **_):
        self.sizes.append(len(labels))
        return SimpleNamespace(logits=torch.tensor([[0.0, 1.0]]).repeat(len(labels), 1))


def test_the_whole_dev_set_is_evaluated_in_batches_of_the_size_that_the_user_chose(data, tokenizer):
    write(data / "train.tsv", "0\ta\tb\tentailment")
    write(data / "dev.tsv", *[f"{i}\ta\tb\t{'not_' * (i > 1)}entailment" for i in range(5)])
    flags = ["--data_dir", str(data), "--model_name_or_path", "tiny", "--per_gpu_eval_batch_size", "2"]
    model = Counting()

    metrics = evaluate(parse_glue_arguments("task1_single", flags), Worker(), model, load(data, tokenizer))

    assert model.sizes == [2, 2, 1] and metrics == {"acc": 0.6}


@pytest.mark.parametrize(("task", "metrics"), [
    ("mrpc", {"acc": 0.8, "f1": 0.8}), ("qqp", {"acc": 0.8, "f1": 0.8}), ("cola", {"mcc": 4 / 6}),
    *[(task, {"acc": 0.8}) for task in ("sst-2", "qnli", "rte", "wnli")],
])  # fmt: skip
def test_the_metrics_of_a_small_table(task, metrics):
    outputs = np.array([[0, 1], [0, 1], [1, 0], [1, 0], [0, 1]], dtype=float)  # predictions 1 1 0 0 1

    assert glue_metrics(TASKS[task], outputs, np.array([1, 0, 0, 0, 1])) == pytest.approx(metrics)


def test_the_correlations_of_a_small_table_with_a_tie_and_of_a_constant():
    labels = np.array([0.0, 1.0, 2.0, 2.0])

    metrics = glue_metrics(TASKS["sts-b"], np.array([[0.0], [1.0], [2.0], [9.0]]), labels)

    assert metrics == pytest.approx({"pearson": 0.68224, "spearmanr": 0.94868, "corr": 0.81546}, abs=1e-5)
    assert glue_metrics(TASKS["sts-b"], np.ones((4, 1)), labels)["corr"] == 0.0
