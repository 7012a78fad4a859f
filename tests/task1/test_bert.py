"""Loading BERT, 1.1: the pretrained weights, and a new head for the task, by the configuration.

BERT is real here, and tiny. A rank without a student's file computes what the checkpoint holds. The loaded model must
also compute the same logits: token ids, and a head that replaces its new head, are drawn for each run.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from grader.arithmetic import Tolerance, difference
from grader.compare import Expected, check
from grader.grading import Grade
from grader.in_rank import in_rank, run, run_alone
from grader.wire.values import Fields

if TYPE_CHECKING:  # what a function finds in a rank
    from transformers import BertModel

    from grader.inside.tools import Context, copy_of, nn, torch, unchanged
    from tests.training.config_in_rank import make_config

graded = pytest.mark.graded
CRASHES = {  # transformers' words -> what they mean here
    "no file named ... from_pretrained(config.config_name": "the weights are in config.model_name_or_path: "
    "config.config_name names only the settings",
}
FILE = "task1_single/run_glue.py"
CONFIG, PRELOAD = "tests/training/config_in_rank.py", ("scripts", "steps", "models")
LABELS = {"mnli": 3, "sts-b": 1, "rte": 2}
VOCABULARY = 16
SETTINGS = {  # drawn values of the configuration -> their names in messages
    "hidden_dropout_prob": "dropout",
    "attention_probs_dropout_prob": "attention dropout",
    "classifier_dropout": "head dropout",
    "initializer_range": "initializer_range",
}
LOGITS = Tolerance(limit=1e-4)  # in float32 they are off by 1e-6


# --- what a rank does ---


def save_tiny_bert(context: Context) -> BertModel:
    """Save a BERT without a head, as checkpoints are, in ./pretrained. Arguments: checkpoint_seed, vocabulary."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(context.arguments["checkpoint_seed"])
    config = BertConfig(
        vocab_size=context.arguments["vocabulary"], hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=16, max_position_embeddings=16,
    )  # fmt: skip
    model = BertModel(config)
    for weight in model.parameters():  # none left at 0 or 1, where loaded and new weights would look alike
        nn.init.normal_(weight.data, std=0.5)
    model.save_pretrained("pretrained")
    torch.manual_seed(0)
    return model


def describe(model: nn.Module, settings: list[str]) -> Fields:
    """Return what the model of load_model() has; None or nothing for parts that it does not have."""
    body, head = getattr(model, "bert", None), getattr(model, "classifier", None)
    weights = body.state_dict() if body is not None else {}
    return {
        "class": type(model).__name__,
        "body": {name: tensor.clone() for name, tensor in weights.items() if tensor.is_floating_point()},
        "head": copy_of(getattr(head, "weight", None)),
        "labels": getattr(head, "out_features", None),
        "frozen": [name for name, parameter in model.named_parameters() if not parameter.requires_grad],
        "dtypes": sorted({str(parameter.dtype).removeprefix("torch.") for parameter in model.parameters()}),
    } | {name: getattr(getattr(model, "config", None), name, None) for name in settings}


def logits_of(model: Any, ids: torch.Tensor, head: torch.Tensor, bias: torch.Tensor) -> torch.Tensor | None:
    """Return what the model computes for token ids with this head; None if it is no such model."""
    try:
        with torch.no_grad():
            layer = model.classifier
            layer.weight.copy_(head[: len(layer.weight)])
            layer.bias.copy_(bias[: len(layer.bias)])
            return model.eval()(input_ids=ids).logits.clone()
    except Exception:  # of a model that the student has cut or changed: it has no logits to compare
        return None


@in_rank(uses=[CONFIG, save_tiny_bert, describe, logits_of], preload=PRELOAD, join=False)
def load_model(context: Context, lesson: ModuleType, inputs: Fields) -> object:
    """Call load_model() as main() does, with the seeds 1, 2 and 1; yield what each model has."""
    from transformers import BertConfig

    from common.optim import set_seed

    arguments = context.arguments
    save_tiny_bert(context)
    settings = BertConfig.from_pretrained("pretrained")
    settings.update(arguments["settings"])
    settings.save_pretrained("settings")
    paths = {"model_name_or_path": "pretrained", "config_name": "settings"}
    for seed in (1, 2, 1):
        config = make_config(context, "GlueConfig", task_name=arguments["task"], seed=seed, **paths)
        set_seed(seed)
        with unchanged(nn.Module()) as changed:
            model = lesson.load_model(config)
        allowed = "the state of torch's random generator"  # a new head is drawn from it
        yield describe(model, list(arguments["settings"])) | {
            "changed": [name for name in changed if name != allowed],
            "drawn next": torch.rand(()).item(),
            "logits": logits_of(model, **inputs),
        }


@in_rank(uses=[save_tiny_bert], preload=PRELOAD, join=False)
def drawn_next(context: Context, lesson: ModuleType, inputs: Fields) -> object:
    """Yield what is drawn after a BERT with a head is loaded, with the same seeds. Runs beside no student's file."""
    from transformers import AutoModelForSequenceClassification

    from common.optim import set_seed

    save_tiny_bert(context)
    for seed in (1, 2, 1):
        set_seed(seed)
        AutoModelForSequenceClassification.from_pretrained("pretrained", num_labels=inputs)
        yield torch.rand(()).item()


@in_rank(uses=[save_tiny_bert], preload=PRELOAD, join=False)
def pretrained(context: Context, lesson: ModuleType, inputs: Fields) -> Fields:
    """Return the saved weights, and what BERT without a head computes for ids. Runs beside no student's file."""
    model = save_tiny_bert(context)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items() if tensor.is_floating_point()}
    with torch.no_grad():
        return {"weights": weights, "pooled": model.eval()(input_ids=inputs).pooler_output}


# --- what is right ---


def checkpoint_seed(grade: Grade) -> int:
    return int(np.random.default_rng([grade.seed, 5]).integers(1 << 30))


def saved(grade: Grade, ids: np.ndarray, vocabulary: int = VOCABULARY) -> Fields:
    """Return the weights of the checkpoint, and what BERT without a head computes for ids (B, T): (B, D)."""
    arguments = {"checkpoint_seed": checkpoint_seed(grade), "vocabulary": vocabulary}
    return dict(run_alone(grade, pretrained, [ids], **arguments)[0])


def draw(grade: Grade) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """Return token ids and a head, and the settings of the configuration."""
    draw, settings = np.random.default_rng([grade.seed, 6]), np.random.default_rng(grade.seed)
    head, bias = draw.normal(size=(3, 8)).astype(np.float32), draw.normal(size=3).astype(np.float32)
    inputs: dict[str, np.ndarray] = {"ids": draw.integers(0, VOCABULARY, (4, 5)), "head": head, "bias": bias}
    return inputs, {name: round(float(settings.uniform(0.2, 0.4)), 3) for name in SETTINGS}


def loaded(grade: Grade, task: str) -> list[Fields]:
    """Return what the models of three calls of load_model() have."""
    inputs, settings = draw(grade)
    seed = checkpoint_seed(grade)
    arguments: Fields = {"task": task, "settings": settings, "checkpoint_seed": seed, "vocabulary": VOCABULARY}
    return list(run(grade, load_model, [inputs], **arguments).values[0])


def check_logits(grade: Grade, got: Fields, task: str) -> None:
    """Check that the model computes what BERT with the saved weights and the drawn head does."""
    inputs, labels = draw(grade)[0], LABELS[task]
    right = saved(grade, inputs["ids"])["pooled"] @ inputs["head"][:labels].T + inputs["bias"][:labels]
    check(grade, "called with token ids, ", got, {"logits": Expected(right, name="the logits", tolerance=LOGITS)})


def check_weights(grade: Grade) -> None:
    """Check that each of the three loads gives the saved weights of the body, in float32."""
    right = saved(grade, draw(grade)[0]["ids"])["weights"]
    for got in loaded(grade, "rte"):
        body = got["body"]
        if not body:
            grade.fail(observed=f"expected a BertForSequenceClassification, got a {got['class']}, which has no .bert")
        dtypes = Expected(["float32"], "expected parameters in float32, as in the checkpoint, got {got}")
        check(grade, "", got, {"dtypes": dtypes})
        different = [name for name, weight in right.items() if not np.array_equal(body.get(name), weight)]
        if different:
            all_new = "the model starts from random weights: load them with from_pretrained\n"
            cause = all_new if len(different) > len(right) / 2 else ""
            first = difference(different[0], body.get(different[0]), right[different[0]])
            grade.fail(f"{cause}{len(different)} of {len(right)} tensors differ from the checkpoint: {first}")
        if got["frozen"]:
            count, first = len(got["frozen"]), got["frozen"][0]
            grade.fail(f"{count} tensors are frozen, for instance {first}: fine-tune all of BERT")
        check_logits(grade, got, "rte")


# --- the graded tests ---


@graded("1.1")
def test_the_pretrained_weights_are_loaded(grade: Grade) -> None:
    check_weights(grade)


@graded("1.1")
def test_the_head_fits_the_task(grade: Grade) -> None:
    """The configuration is passed on, and a new head is drawn from torch's generator as --seed left it."""
    for task, labels in LABELS.items():
        outputs = f"for {task.upper()} expected a head with {labels} outputs, got {{got}}: "
        expected = {"labels": Expected(labels, outputs + "did you pass bert_config to from_pretrained as config?")}
        for name, value in draw(grade)[1].items():
            message = f"expected bert_config's {SETTINGS[name]} of {{expected}}, got {{got}}: pass it as config"
            expected[name] = Expected(value, message)
        expected["changed"] = Expected([], "load_model changes {got}: seed only in main()")
        first, other, again = loads = loaded(grade, task)
        for got in loads:
            check(grade, "", got, expected)
            check_logits(grade, got, task)
        if np.array_equal(first["head"], other["head"]) or not np.array_equal(first["head"], again["head"]):
            grade.fail(
                "the new head does not follow the seed: expected equal heads for the two loads with seed 1 and a "
                "different one with seed 2; do not seed or draw random numbers in load_model"
            )
        arguments = {"checkpoint_seed": checkpoint_seed(grade), "vocabulary": VOCABULARY}
        for got, after in zip(loads, run_alone(grade, drawn_next, [labels], **arguments)[0], strict=True):
            drawn = "load_model draws random numbers beside those of the new head: dropout then draws others"
            check(grade, "", got, {"drawn next": Expected(after, drawn)})


@graded("1.1", absence=True)
def test_task1_imports_only_what_the_course_allows(grade: Grade) -> None:
    grade.imports_only_allowed(FILE)
