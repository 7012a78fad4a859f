"""The trained model put together, and what it is worth."""

from dataclasses import replace

from torch import nn

from benchmark.engines.engine import Engine
from benchmark.settings import Settings
from benchmark.training.translation import bleu
from benchmark.training.workload import Workload


def whole_model(settings: Settings, engine: Engine, workload: Workload) -> nn.Module | None:
    """Return the trained model on the first worker, None on the others. A collective."""
    full = engine.full_parameters()
    if not full:
        return None
    model = workload.build(replace(settings, compile=None))
    missing = model.load_state_dict(full, strict=False)
    assert not missing.unexpected_keys, missing
    return model


def bleu_of(model: nn.Module | None, workload: Workload) -> float | None:
    """Return the BLEU of a T5; None without a model."""
    return bleu(model.eval(), workload.tokenizer, workload.validation) if model else None  # type: ignore[arg-type]


def metric_of(settings: Settings, engine: Engine, workload: Workload) -> float | None:
    """Return BLEU with --bleu, or the metric of a user's own model, if it has one. A collective."""
    if settings.bleu:
        return bleu_of(whole_model(settings, engine, workload), workload)
    if workload.kind != "own":
        return None
    return engine.validate(workload.validation_batches(settings), workload.kind).get("metric")
