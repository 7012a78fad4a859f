"""GLUE: reads the TSV files into tensors, and computes each task's official metric.

    <data_dir>/train.tsv, dev.tsv -> Example(text_a, text_b, label) -> features (N, T) -> Features (a TensorDataset)

The format differs per task (with or without a header, 3 to 12 columns); glue_tasks.py describes it. Fields contain
unbalanced quotes, so lines are split on tabs and quotes are kept. Some files start with a byte order mark.
Hugging Face datasets would read them, too, but the first run of SST-2 took 18.7 s with it, 1.5 s with this reader, and
its errors name no line of a file.
"""

import contextlib
import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import TensorDataset

from common.cache import read_cached
from common.config import GlueConfig
from common.data.glue_tasks import GlueTask
from common.data.sample_data import glue_sample_dir
from common.errors import InputError, reading
from common.models.load import tokenizer_fingerprint
from common.paths import cache_dir
from common.script_defaults import script_defaults

CACHE_VERSION = 2
TASKS = script_defaults().tasks  # read once, at import: the scripts look a task up by its name


@dataclass(frozen=True)
class Example:
    """One row: a text or a pair of texts, and the number of its label (a score for a regression task)."""

    text_a: str
    text_b: str | None
    label: int | float


class Features(TensorDataset):
    """N examples as tensors; an item is a dict of the model's arguments: (T,) token ids, masks, and a label."""

    NAMES = ("input_ids", "attention_mask", "token_type_ids", "labels")

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:  # type: ignore[override]
        return dict(zip(self.NAMES, super().__getitem__(index), strict=True))


@dataclass(frozen=True)
class GlueData:
    """A task with its training and dev set."""

    task: GlueTask
    train: Features
    dev: Features


def load_glue(config: GlueConfig, tokenizer) -> GlueData:
    """Return the features of the task in config.data_dir (default: the embedded sample), from the cache if possible.

    Raises InputError for a missing or damaged file, with file and line.
    """
    task = TASKS[config.task_name]
    folder = config.data_dir or glue_sample_dir()
    train, dev = (_features(folder / name, task, config, tokenizer) for name in (task.train, task.dev))
    return GlueData(task, train, dev)


def read_examples(path: Path, task: GlueTask) -> list[Example]:
    """Return every row of one TSV file. Raises InputError with the file, the line, and what was expected."""
    try:
        # Only \n ends a line: str.splitlines would also split at U+2028 or U+0085 inside a sentence.
        lines = _read_bytes(path).decode("utf-8-sig").replace("\r\n", "\n").rstrip("\n").split("\n")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise InputError(f"{path}:{line}: expected UTF-8 text, got byte 0x{error.object[error.start]:02x}") from None
    header = [] if isinstance(task.label, int) else lines.pop(0).split("\t")
    columns = [_column(path, header, name) for name in (task.text_a, task.text_b, task.label)]
    first_line = 2 if header else 1
    examples = [_example(path, n, line, columns, task) for n, line in enumerate(lines, first_line) if line.strip()]
    examples_read = [example for example in examples if example is not None]
    if not examples_read:
        raise InputError(f"{path}: expected at least one example, got an empty file; download it again")
    return examples_read


def _read_bytes(path: Path) -> bytes:
    with reading(path, "run `python download_glue_data.py` to download the GLUE tasks"):
        return path.read_bytes()


def _column(path: Path, header: list[str], name: str | int | None) -> int | None:
    if name is None or isinstance(name, int):
        return name
    if name not in header:
        raise InputError(f"{path}:1: expected a column {name!r} in the header, got {header}; check --task_name")
    return header.index(name)


def _example(path: Path, number: int, line: str, columns: list[int | None], task: GlueTask) -> Example | None:
    cells = line.split("\t")
    needed = max(column for column in columns if column is not None) + 1
    if len(cells) < needed:
        if task.known_broken_rows:
            return None
        raise InputError(f"{path}:{number}: expected {needed} columns or more, got {len(cells)}; download it again")
    text_a, text_b, label = (None if column is None else cells[column] for column in columns)
    assert text_a is not None and label is not None
    return Example(text_a, text_b, _label(path, number, label.strip(), task))


def _label(path: Path, number: int, label: str, task: GlueTask) -> int | float:
    if task.is_regression:
        with contextlib.suppress(ValueError):
            if 0 <= (score := float(label)) <= 5:  # STS-B's range; nan and inf are not in it
                return score
        raise InputError(f"{path}:{number}: expected a score from 0 to 5, got label {label!r}; repair the row")
    if label not in task.labels:
        raise InputError(f"{path}:{number}: unknown label {label!r}; expected one of {', '.join(task.labels)}")
    return task.labels.index(label)


def _features(path: Path, task: GlueTask, config: GlueConfig, tokenizer) -> Features:
    """Tokenise `path`, or read the features that an earlier run made from the same file, tokenizer and length."""
    digest = hashlib.sha256(_read_bytes(path))
    parts = (CACHE_VERSION, config.task_name, config.max_seq_length, tokenizer_fingerprint(tokenizer))
    digest.update(repr(parts).encode())

    def build(folder: Path) -> None:
        examples = read_examples(path, task)
        torch.save(tokenize(examples, task, tokenizer, config.max_seq_length), folder / "features.pt")

    def read(folder: Path) -> dict[str, torch.Tensor]:
        return torch.load(folder / "features.pt", weights_only=True)

    folder = cache_dir("features") / f"{config.task_name}-{digest.hexdigest()[:24]}"
    tensors = read_cached(folder, build, read, fresh=config.overwrite_cache)
    return Features(*(tensors[name] for name in Features.NAMES))


def tokenize(examples: list[Example], task: GlueTask, tokenizer, length: int) -> dict[str, torch.Tensor]:
    """Return token ids, masks and segments, each (N, T) padded to `length`, and labels (N,), float for regression."""
    pairs = [example.text_b for example in examples] if examples[0].text_b is not None else None
    encoded = tokenizer(
        [example.text_a for example in examples],
        pairs,
        max_length=length,
        padding="max_length",
        truncation="longest_first",  # an example that is too long loses tokens from its longer sentence
        return_token_type_ids=True,
        return_tensors="pt",
    )
    dtype = torch.float32 if task.is_regression else torch.int64
    labels = torch.tensor([example.label for example in examples], dtype=dtype)
    return {**{name: encoded[name] for name in Features.NAMES[:3]}, "labels": labels}


def glue_metrics(task: GlueTask, outputs: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Return the task's official metrics. `outputs`: (N, classes) scores, or (N, 1) for a regression task."""
    predictions = outputs[:, 0] if task.is_regression else outputs.argmax(axis=1)
    if task.is_regression and (np.ptp(labels) == 0 or np.ptp(predictions) == 0):
        metrics = dict.fromkeys(task.metrics, 0.0)  # no correlation: a model that learns nothing scores nothing
    else:
        metrics = {name: _metric(name, labels, predictions) for name in task.metrics}
    if task.is_regression:
        metrics["corr"] = sum(metrics.values()) / 2  # the GLUE leaderboard ranks STS-B by this number
    return metrics


def _metric(name: str, labels: np.ndarray, predictions: np.ndarray) -> float:
    if name == "acc":  # most tasks have no other, and the libraries of the others take a second to import
        return float((labels == predictions).mean())
    from scipy import stats
    from sklearn import metrics

    functions = {
        "f1": lambda: metrics.f1_score(labels, predictions),
        "mcc": lambda: metrics.matthews_corrcoef(labels, predictions),
        "pearson": lambda: stats.pearsonr(labels, predictions).statistic,
        "spearmanr": lambda: stats.spearmanr(labels, predictions).statistic,
    }
    return float(functions[name]())
