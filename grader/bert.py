"""Judges load_model() and whole scripts on a real, tiny BERT."""

from typing import Any

import numpy as np

from grader import diagnosis
from grader.grading import Grade

EPOCHS = 3
LABELS = {"mnli": 3, "sts-b": 1, "rte": 2}


def _loaded(grade: Grade, task: str) -> dict[str, Any]:
    dropout = round(float(np.random.default_rng(grade.seed).uniform(0.2, 0.4)), 3)
    (value,) = grade.values("grader.probes_bert:load_model", 1, task=task, dropout=dropout)
    return value | {"asked": dropout}


def check_weights(grade: Grade) -> None:
    """Every weight of the body is the saved one."""
    value = _loaded(grade, "rte")
    if not value["loaded"]:
        grade.fail(f"expected a BertForSequenceClassification, got a {value['class']}, which has no .bert")
    different = [name for name, saved in value["saved"].items() if not np.array_equal(value["loaded"].get(name), saved)]
    if different:
        all_new = "the model starts from random weights: load them with from_pretrained\n"
        name = different[0]
        words = diagnosis.parameter_words(name, value["loaded"].get(name), value["saved"][name])
        cause = all_new if len(different) > len(value["saved"]) / 2 else ""
        grade.fail(f"{cause}{len(different)} of {len(value['saved'])} tensors are not those of the checkpoint: {words}")

    if value["frozen"]:
        grade.fail(
            f"{len(value['frozen'])} tensors are frozen, for instance {value['frozen'][0]}: all of BERT is fine-tuned"
        )


def check_head(grade: Grade) -> None:
    """The configuration is passed on: its number of labels and its other settings."""
    for task, labels in LABELS.items():
        value = _loaded(grade, task)
        if value["labels"] != labels:
            grade.fail(
                f"for {task.upper()} expected a head with {labels} outputs, got {value['labels']}: "
                "was bert_config given to from_pretrained as config?"
            )
        if value["dropout"] != value["asked"]:
            grade.fail(f"expected bert_config's dropout of {value['asked']}, got {value['dropout']}: pass it as config")


def check_ladder(grade: Grade, world_sizes: tuple[int, ...] = (2, 4)) -> None:
    """Under the script's own AdamW the mean of the workers' losses is that of one worker with the whole batch."""
    one = _script(grade, 1)
    _must_train_all(grade, one[0])
    if len(one[0]["metrics"]) != EPOCHS:
        grade.fail(f"expected metrics after each of {EPOCHS} epochs, got {len(one[0]['metrics'])} times: evaluate()")
    for world_size in world_sizes:
        many = _script(grade, world_size)
        _compare_weights(grade, many, one, world_size)
        losses = np.mean([rank["losses"] for rank in many], axis=0)
        single = np.asarray(one[0]["losses"])
        if losses.shape != single.shape:
            grade.fail(f"one worker takes {len(single)} steps, {world_size} workers take {len(losses)}")
        apart = np.abs(losses - single)
        if apart[:5].max() > 1e-5:
            number = int(np.argmax(apart > 1e-5))
            grade.fail(
                f"{_ladder_cause(number)}step {number + 1}: {world_size} workers have the mean loss "
                f"{losses[number]:.6f}, one worker with all their examples has {single[number]:.6f}"
            )
        for rank, trace in enumerate(many):
            if trace["metrics"] != one[0]["metrics"]:
                grade.fail(
                    f"rank {rank} of {world_size}: expected the metrics {one[0]['metrics']} after the epochs, "
                    f"as on one worker, got {trace['metrics']}"
                )


def _ladder_cause(number: int) -> str:
    if number == 0:
        return "the very first batch differs: do the workers together draw the batch of one worker, with config.seed?\n"
    return "the first steps agree, then the runs part: gradients, learning rate or the order of the next epoch\n"


def _must_train_all(grade: Grade, trace: dict) -> None:
    """Every tensor of the model is another after training."""
    if not trace["weights"] or not trace["trained"]:
        grade.fail("the script ends without record.describe() or record.write(), which stand in main()")
    before, after = trace["weights"][0]["sums"], trace["trained"][0]["sums"]
    still = [name for name, value in before.items() if after.get(name) == value]
    if still:
        grade.fail(
            f"training never moves {len(still)} of {len(before)} tensors, for instance {still[0]}: "
            "is a part of the model frozen, or unknown to the optimizer?"
        )


def _compare_weights(grade: Grade, many: list[dict], one: list[dict], world_size: int) -> None:
    for rank, trace in enumerate(many):
        if trace["weights"] != many[0]["weights"]:
            grade.fail(f"rank {rank} of {world_size} starts from other weights than rank 0: is the seed the same?")
    if many[0]["weights"] != one[0]["weights"]:
        grade.fail(f"{world_size} workers start from other weights than one worker with the same seed")


def _script(grade: Grade, world_size: int) -> list[dict[str, Any]]:
    """Losses, metrics and first weights of each rank in a run of main()."""
    arguments = {"train": 16, "dev": 13, "batch": 8 // world_size, "epochs": EPOCHS, "joined": True}
    result = grade.run("grader.probes_bert:script", world_size, **arguments)
    grade.must_return(result)
    traces = []
    for rank in result.ranks:
        found: dict[str, list] = {"loss": [], "evaluation": [], "weights": [], "trained": []}
        for event in rank.events:
            if event.name in found:
                found[event.name].append(event.data)
        metrics = [{name: round(x, 6) for name, x in told["metrics"].items()} for told in found["evaluation"]]
        traces.append({"losses": [told["value"] for told in found["loss"]], "metrics": metrics} | found)
    return traces
