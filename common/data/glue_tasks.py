"""The columns, labels and metrics of each task of GLUE.

Source: Wang et al., GLUE: A Multi-Task Benchmark and Analysis Platform, ICLR 2019, tables 1 and 6.
"""

from dataclasses import dataclass, replace

METRICS = ("acc", "f1", "mcc", "pearson", "spearmanr")


@dataclass(frozen=True)
class GlueTask:
    """The columns of a task's texts and labels: header names, or numbers if a file has no header."""

    text_a: str | int
    text_b: str | int | None
    label: str | int
    labels: tuple[str, ...]  # empty: a regression task
    metrics: tuple[str, ...]  # out of METRICS
    train: str = "train.tsv"
    dev: str = "dev.tsv"
    known_broken_rows: bool = False  # the published file itself has a few rows with missing columns

    @property
    def is_regression(self) -> bool:
        return not self.labels

    @property
    def num_labels(self) -> int:
        return len(self.labels) or 1


_ENTAILMENT = ("entailment", "not_entailment")
_MNLI = GlueTask(
    "sentence1", "sentence2", "gold_label", ("contradiction", "entailment", "neutral"), ("acc",), dev="dev_matched.tsv"
)
GLUE = {
    "cola": GlueTask(3, None, 1, ("0", "1"), ("mcc",)),
    "sst-2": GlueTask("sentence", None, "label", ("0", "1"), ("acc",)),
    "mrpc": GlueTask("#1 String", "#2 String", "Quality", ("0", "1"), ("acc", "f1")),
    "sts-b": GlueTask("sentence1", "sentence2", "score", (), ("pearson", "spearmanr")),
    "qqp": GlueTask("question1", "question2", "is_duplicate", ("0", "1"), ("acc", "f1"), known_broken_rows=True),
    "mnli": _MNLI,
    "mnli-mm": replace(_MNLI, dev="dev_mismatched.tsv"),
    "qnli": GlueTask("question", "sentence", "label", _ENTAILMENT, ("acc",)),
    "rte": GlueTask("sentence1", "sentence2", "label", _ENTAILMENT, ("acc",)),
    "wnli": GlueTask("sentence1", "sentence2", "label", ("0", "1"), ("acc",)),
}
