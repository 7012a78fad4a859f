"""Judges load_model(), on a real, tiny BERT whose weights the judge knows from elsewhere."""

import numpy as np

from grader.arithmetic import difference
from grader.grading import Grade
from grader.wire.values import Fields

LABELS = {"mnli": 3, "sts-b": 1, "rte": 2}
VOCABULARY = 16
EXAMPLES, WIDTH = 4, 8  # the width is that of probes.bert.SIZES
SETTINGS = {  # what is drawn for the configuration, and the words for it
    "hidden_dropout_prob": "dropout",
    "attention_probs_dropout_prob": "attention dropout",
    "classifier_dropout": "head dropout",
    "initializer_range": "initializer_range",
}
CLOSE = 1e-4  # logits in float32 are off by 1e-6


def checkpoint(grade: Grade, vocabulary: int) -> dict[str, np.ndarray]:
    """The pretrained weights, from a rank without any file of a student's."""
    return _reference(grade, vocabulary)["weights"]


def _reference(grade: Grade, vocabulary: int) -> Fields:
    ids = _inputs(grade, vocabulary)["ids"]
    arguments = {"checkpoint_seed": checkpoint_seed(grade), "vocabulary": vocabulary, "each": [{"ids": ids}]}
    return grade.session.run("grader.probes.trusted:checkpoint", 1, arguments).values[0]


def _inputs(grade: Grade, vocabulary: int) -> dict[str, np.ndarray]:
    """Token ids, and a head that is put in place of the new one: the loaded model must know what to make of both."""
    draw = np.random.default_rng([grade.seed, 6])
    head, bias = draw.normal(size=(max(LABELS.values()), WIDTH)), draw.normal(size=max(LABELS.values()))
    ids = draw.integers(0, vocabulary, (EXAMPLES, 5))
    return {"ids": ids, "head": head.astype(np.float32), "bias": bias.astype(np.float32)}


def checkpoint_seed(grade: Grade) -> int:
    return int(np.random.default_rng([grade.seed, 5]).integers(1 << 30))


def _loaded(grade: Grade, task: str) -> list[Fields]:
    draw = np.random.default_rng(grade.seed)
    settings = {name: round(float(draw.uniform(0.2, 0.4)), 3) for name in SETTINGS}
    arguments = {
        "task": task,
        "settings": settings,
        "checkpoint_seed": checkpoint_seed(grade),
        "vocabulary": VOCABULARY,
    }
    each = [_inputs(grade, VOCABULARY)]
    (found,) = grade.values("grader.probes.bert:load_model", 1, each=each, **arguments)
    return [value | {"asked": settings} for value in found]


def check_weights(grade: Grade) -> None:
    """Every weight of the body is the saved one, in float32, whenever it is loaded."""
    saved = checkpoint(grade, VOCABULARY)
    for value in _loaded(grade, "rte"):
        body = value["body"]
        if not body:
            grade.fail(f"expected a BertForSequenceClassification, got a {value['class']}, which has no .bert")
        if value["dtypes"] != ["float32"]:
            grade.fail(f"expected parameters in float32, as in the checkpoint, got {' and '.join(value['dtypes'])}")
        different = [name for name, right in saved.items() if not np.array_equal(body.get(name), right)]
        if different:
            all_new = "the model starts from random weights: load them with from_pretrained\n"
            words = difference(different[0], body.get(different[0]), saved[different[0]])
            cause = all_new if len(different) > len(saved) / 2 else ""
            grade.fail(f"{cause}{len(different)} of {len(saved)} tensors differ from the checkpoint: {words}")
        if value["frozen"]:
            count, first = len(value["frozen"]), value["frozen"][0]
            grade.fail(f"{count} tensors are frozen, for instance {first}: fine-tune all of BERT")
        _check_logits(grade, value, "rte")


def _check_logits(grade: Grade, value: Fields, task: str) -> None:
    """The model computes what BERT with these weights and the drawn head does, for ids of this run."""
    told, pooled = _inputs(grade, VOCABULARY), _reference(grade, VOCABULARY)["pooled"]
    right = pooled @ told["head"][: LABELS[task]].T + told["bias"][: LABELS[task]]
    got = value["logits"]
    if got is None:
        grade.fail(f"expected a model that is called with input_ids and returns logits, got a {value['class']}")
    if np.shape(got) != right.shape or not np.all(np.abs(np.asarray(got, np.float64) - right) <= CLOSE):
        grade.fail(f"called with token ids, {difference('the logits', got, right)}")


def check_head(grade: Grade) -> None:
    """The configuration is passed on, and a new head is drawn from torch's generator as --seed left it."""
    for task, labels in LABELS.items():
        first, other, again = _loaded(grade, task)
        for value in (first, other, again):
            if value["labels"] != labels:
                grade.fail(
                    f"for {task.upper()} expected a head with {labels} outputs, got {value['labels']}: "
                    "did you pass bert_config to from_pretrained as config?"
                )
            for name, asked in value["asked"].items():
                if value["settings"][name] != asked:
                    got = f"expected bert_config's {SETTINGS[name]} of {asked}, got {value['settings'][name]}"
                    grade.fail(f"{got}: pass it as config")
            if value["moved"]:
                grade.fail(f"load_model changes the random state of {value['moved'][0]}: seed only in main()")
            _check_logits(grade, value, task)
        if np.array_equal(first["head"], other["head"]) or not np.array_equal(first["head"], again["head"]):
            grade.fail(
                "the new head does not follow the seed: expected equal heads for the two loads with seed 1 and a "
                "different one with seed 2; do not seed or draw random numbers in load_model"
            )
