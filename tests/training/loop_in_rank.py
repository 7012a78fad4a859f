"""Runs train() of a script in a rank, with two small models, called like BERT and GPT-2, and an optimizer and schedule
that replace those of common/.

All of them note events: forward, backward, clip, step and stepped, build, kept; the record notes loss and evaluation.
The optimizer is plain SGD: nothing adapts, so a wrong gradient shows in the parameters. Sent to ranks as source, behind
tests/training/config_in_rank.py.

Shapes: B examples, T tokens, D width, V vocabulary, C classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.optim.lr_scheduler import LambdaLR
from transformers.modeling_outputs import CausalLMOutput, SequenceClassifierOutput

if TYPE_CHECKING:  # what a function finds in a rank
    from common.config import GlueConfig, Gpt2Config
    from grader.inside.tools import Context, copy_of, surroundings
    from grader.wire.values import Fields
    from tests.training.config_in_rank import make_config, watch_record

LOSS_SCALE = 40.0  # small_models.LOSS_SCALE
Weights = dict[str, Tensor]


# --- models ---


def by_name(parameters: Iterable[nn.Parameter]) -> dict[str, nn.Parameter]:
    """Return parameters by the names of their drawn weights, however many wrappers are around the model."""
    return {parameter.drawn_as: parameter for parameter in parameters if hasattr(parameter, "drawn_as")}


def drawn_parameter(weights: Weights, name: str) -> nn.Parameter:
    parameter = nn.Parameter(weights[name].clone())
    parameter.drawn_as = name  # type: ignore[attr-defined]
    return parameter


class Body(nn.Module):
    """Embedding * gain + offset, in place of the layers of BERT and GPT-2."""

    def __init__(self, weights: Weights) -> None:
        super().__init__()
        vocabulary, width = weights["embedding"].shape
        self.embedding = nn.Embedding(vocabulary, width, device="meta")
        self.embedding.weight = drawn_parameter(weights, "embedding")  # (V, D)
        self.gain = drawn_parameter(weights, "gain")  # (D,)
        self.offset = weights["offset"].clone()  # (D,), no parameter

    def forward(self, ids: Tensor) -> Tensor:
        return self.embedding(ids) * self.gain + self.offset.to(self.gain.dtype)  # (B, T) -> (B, T, D)


class SmallModel(nn.Module):
    """A model that notes every forward and backward pass."""

    note: Callable[..., None]  # Context.event; of the class, so that a model can be copied
    left: ClassVar[dict[str, object]] = {}  # what the random generators were after the latest forward

    def note_forward(self, ids: Tensor) -> None:
        """Note which examples these are, by their first token, the mode, a number that dropout would draw, and which
        random generators have been used since the forward before."""
        before = {name: state for name, state in surroundings(nn.Module()).items() if name.endswith("generator")}
        drawn = [name for name, state in SmallModel.left.items() if state != before[name]]
        noise = torch.rand((), dtype=torch.float64).item() if self.training else None
        grad = torch.is_grad_enabled()
        self.note("forward", first=ids[:, 0].tolist(), training=self.training, grad=grad, noise=noise, drawn=drawn)
        SmallModel.left = before | {"the state of torch's random generator": torch.get_rng_state().tolist()}

    def watch_backward(self, loss: Tensor) -> None:
        """Note a backward pass that goes through this loss and stores gradients, as torch.autograd.grad does not.

        The hooks are on nodes of the graph, so no code can find them on an object and put them elsewhere.
        """
        note = self.note
        passes: list[bool] = []

        def stores(gradients: object) -> None:
            if passes:
                passes.clear()
                note("backward")

        trained = next((parameter for parameter in self.parameters() if parameter.requires_grad), None)
        if loss.grad_fn is not None and trained is not None:
            loss.grad_fn.register_prehook(lambda gradients: passes.append(True))
            torch.autograd.graph.get_gradient_edge(trained).node.register_prehook(stores)


class Classifier(SmallModel):
    """logits = (mean of the embeddings * gain + offset) head^T + bias; one class: a score, as BERT for STS-B."""

    def __init__(self, weights: Weights) -> None:
        super().__init__()
        self.bert = Body(weights)
        classes, width = weights["head"].shape
        self.classifier = nn.Linear(width, classes, device="meta")
        self.classifier.weight = drawn_parameter(weights, "head")  # (C, D)
        self.classifier.bias = drawn_parameter(weights, "bias")  # (C,)

    def forward(
        self, input_ids: Any = None, attention_mask: object = None, token_type_ids: object = None,
        labels: Tensor | None = None,
    ) -> SequenceClassifierOutput:  # fmt: skip
        self.note_forward(input_ids)
        logits = self.classifier(self.bert(input_ids).mean(dim=1))  # (B, T, D) -> (B, D) -> (B, C)
        loss = None
        if labels is not None:
            loss = mse_loss(logits[:, 0], labels) if logits.shape[1] == 1 else cross_entropy(logits, labels)
            loss = LOSS_SCALE * loss
            self.watch_backward(loss)
        return SequenceClassifierOutput(loss=loss, logits=logits)


class LanguageModel(SmallModel):
    """logits = (embedding * gain + offset) embedding^T: the first and the last layer are tied, as GPT-2's are."""

    def __init__(self, weights: Weights) -> None:
        super().__init__()
        self.transformer = Body(weights)
        vocabulary, width = weights["embedding"].shape
        self.lm_head = nn.Linear(width, vocabulary, bias=False, device="meta")
        self.lm_head.weight = self.transformer.embedding.weight

    def forward(
        self, input_ids: Any = None, labels: Tensor | None = None, attention_mask: object = None
    ) -> CausalLMOutput:
        self.note_forward(input_ids)
        logits = self.lm_head(self.transformer(input_ids))  # (B, T, D) -> (B, T, V)
        loss = None
        if labels is not None:  # the model shifts the labels by one token
            loss = LOSS_SCALE * cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return CausalLMOutput(loss=loss, logits=logits)


# --- replacements of the library ---


class Sgd(torch.optim.SGD):
    """SGD that notes every step. It counts steps where AdamW has its moments: clearing these clears the count."""

    note: Callable[..., None]  # Context.event

    def __init__(self, model: nn.Module, rate: float) -> None:
        super().__init__([parameter for parameter in model.parameters() if parameter.requires_grad], lr=rate)

    def gradients(self) -> dict[str, Tensor | None]:
        return {name: copy_of(parameter.grad) for name, parameter in by_name(self.param_groups[0]["params"]).items()}

    def step(self, closure: Any = None) -> Any:
        """Note gradients, parameters and rate, then make the step."""
        group = self.param_groups[0]
        remembered = min((self.state[parameter].get("steps", 0) for parameter in group["params"]), default=0)
        parameters = {name: copy_of(parameter) for name, parameter in by_name(group["params"]).items()}
        self.note("step", gradients=self.gradients(), parameters=parameters, rate=group["lr"], remembered=remembered)
        result = super().step(closure)
        for parameter in group["params"]:
            self.state[parameter]["steps"] = remembered + 1
        self.note("stepped")
        return result


OPTIMIZERS: list[Sgd] = []  # in the order in which they were built


def make_optimizer(config: GlueConfig | Gpt2Config, model: nn.Module) -> Sgd:
    OPTIMIZERS.append(Sgd(model, config.learning_rate))
    return OPTIMIZERS[-1]


def gradients() -> dict[str, Tensor | None]:
    """Return the gradients of the parameters that the latest optimizer updates."""
    return OPTIMIZERS[-1].gradients() if OPTIMIZERS else {}


def watch_library(context: Context) -> None:
    """Replace what train() uses of common/ and torch, before the student's file imports it."""
    from common import optim

    try:
        from task2b_allreduce import worker_gradients
    except ModuleNotFoundError:  # a course without task 2b
        worker_gradients = SimpleNamespace()  # type: ignore[assignment]

    SmallModel.note = Sgd.note = staticmethod(context.event)

    def build_optimizer(
        config: GlueConfig | Gpt2Config, model: nn.Module, steps_per_epoch: int
    ) -> tuple[Sgd, LambdaLR]:
        optimizer = make_optimizer(config, model)
        return optimizer, build_schedule(config, optimizer, steps_per_epoch)

    def build_schedule(config: object, optimizer: torch.optim.Optimizer, steps_per_epoch: int) -> LambdaLR:
        context.event("build", steps_per_epoch=steps_per_epoch)
        return LambdaLR(optimizer, lambda step: 1 / (1 + step))

    def clip(parameters: object, max_norm: float, *_: object, **__: object) -> Fields:
        return {"gradients": gradients(), "limit": float(max_norm)}

    optim.build_optimizer, optim.build_schedule = build_optimizer, build_schedule  # type: ignore[assignment]
    for module in (torch.nn.utils, torch.nn.utils.clip_grad):
        context.spy(module, "clip_grad_norm_", "clip", clip)
    # The real one would write into the repository.
    worker_gradients.keep_gradients = lambda model, rank: context.event("kept", gradients=gradients())


# --- train() ---


MODELS: dict[str, Callable[[Weights], SmallModel]] = {"glue": Classifier, "gpt2": LanguageModel}  # script -> model


def run_train(context: Context, lesson: Any, inputs: Fields) -> None:
    """Call train() of a script as its main() does. Arguments: script, config, and what its data needs, see below."""
    from common.record import Record
    from common.workers.process_group import Worker

    arguments = context.arguments
    glue = arguments["script"] == "glue"
    config = make_config(context, "GlueConfig" if glue else "Gpt2Config", **arguments["config"])
    worker = Worker(context.rank, context.world_size)
    record: Any = Record(config, worker)
    watch_record(context, record)
    record.dtype, record.sent = torch.float32, []  # which only task 4's record has
    model = MODELS[arguments["script"]](inputs["weights"])
    data = (glue_data if glue else gpt2_data)(context, config, inputs)
    if hasattr(lesson, "make_strategy"):  # the bonus lessons judge their averaging themselves
        from beyond.replicated import Replicated

        data = (Replicated(model, lambda: None, lambda groups: make_optimizer(config, model), 0.0), *data)
    if not arguments.get("synced", True):
        lesson.sync_gradients = lambda *_: None
    model = lesson.wrap(model, worker) if hasattr(lesson, "wrap") else model
    context.event("begin")  # what was sent before is no part of a step
    lesson.train(config, worker, model, *data, record)


def glue_data(context: Context, config: GlueConfig, inputs: Fields) -> tuple[object, ...]:
    """Return the data of a run_glue.py: the first examples, as many as the argument `train` says, train."""
    from common.data.glue import TASKS, Features, GlueData

    def features(part: slice) -> Features:
        ids, labels = inputs["ids"][part], inputs["labels"][part]
        return Features(ids, torch.ones_like(ids), torch.zeros_like(ids), labels)

    train = context.arguments["train"]
    return (GlueData(TASKS[config.task_name], features(slice(train)), features(slice(train, None))),)


def gpt2_data(context: Context, config: Gpt2Config, inputs: Fields) -> tuple[object, ...]:
    """Return a loader and the validation blocks; all blocks if the script makes its loader (without `loaded`)."""
    blocks: Any = list(inputs["ids"])
    validation = list(inputs["validation"])
    if not context.arguments["loaded"]:
        return (SimpleNamespace(train=blocks, validation=validation),)
    return torch.utils.data.DataLoader(blocks, batch_size=config.batch_size // context.world_size), validation
