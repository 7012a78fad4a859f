"""What is right and needs torch, computed in a rank that loads no file of a student's and is believed.

The judges of whole scripts use it: the order in which one worker sees the examples, the weights of a checkpoint, and
the losses of a training run on a real, tiny BERT.
"""

import torch
from torch.func import functional_call
from transformers import BertConfig, BertForSequenceClassification, GPT2LMHeadModel

from grader.inside.context import Context
from grader.probes import start
from grader.probes.bert import tiny_bert
from grader.wire.values import Fields

BETAS = (0.9, 0.999)  # AdamW's own, see common/optim.py
EPSILON = 1e-8
Weights = dict[str, torch.Tensor]


def orders(context: Context) -> list[list[int]]:
    """The order of every epoch on one worker, see common/data/samplers.py. Arguments: length, seed, epochs."""
    a = context.arguments
    seeds = range(a["seed"], a["seed"] + a["epochs"])
    return [torch.randperm(a["length"], generator=torch.Generator().manual_seed(seed)).tolist() for seed in seeds]


def checkpoint(context: Context) -> Fields:
    """The `weights` that probes.bert saves, and what BERT without a head makes of ids: `pooled` (examples, width).

    Arguments: checkpoint_seed, vocabulary, mine (ids).
    """
    a = context.arguments
    model = tiny_bert("pretrained", a["checkpoint_seed"], a["vocabulary"])
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items() if tensor.is_floating_point()}
    with torch.no_grad():
        return {"weights": weights, "pooled": model.eval()(input_ids=a["mine"]["ids"]).pooler_output}


def bert(context: Context) -> Fields:
    """Losses and dev logits of a run, from its first weights and the examples that its ranks trained on.

    Arguments: checkpoint_seed, vocabulary, steps (steps -> ranks -> examples), steps_per_epoch, rate, limit (of
    clipping), mine (weights; of each rank ids and labels of training and dev set, and train, the number of the first).
    Returns losses (steps, ranks) and logits (epochs, ranks, dev, labels).
    """
    a = context.arguments
    tiny_bert("pretrained", a["checkpoint_seed"], a["vocabulary"])
    model = BertForSequenceClassification(BertConfig.from_pretrained("pretrained", num_labels=2)).double().eval()
    weights = {name: tensor.double().requires_grad_() for name, tensor in a["mine"]["weights"].items()}
    ids, labels, train = a["mine"]["ids"], a["mine"]["labels"], a["mine"]["train"]
    moments = {name: (torch.zeros_like(tensor), torch.zeros_like(tensor)) for name, tensor in weights.items()}
    losses, logits = [], []
    for number, parts in enumerate(a["steps"]):
        each = [
            functional_call(model, weights, (), {"input_ids": ids[rank][rows], "labels": labels[rank][rows]}).loss
            for rank, rows in enumerate(parts)
        ]
        losses.append([float(loss) for loss in each])
        gradients = torch.autograd.grad(sum(each) / len(each), list(weights.values()))
        rate = a["rate"] * (1 - number / len(a["steps"]))
        _move(weights, dict(zip(weights, gradients, strict=True)), moments, rate, a["limit"], number + 1)
        if (number + 1) % a["steps_per_epoch"] == 0:
            with torch.no_grad():
                found = [functional_call(model, weights, (), {"input_ids": mine[train:]}).logits for mine in ids]
            logits.append(torch.stack(found))
    return {"losses": losses, "logits": torch.stack(logits)}


def _move(weights: Weights, gradients: Weights, moments: dict, rate: float, limit: float, count: int) -> None:
    """Clipping, and AdamW without weight decay (Loshchilov and Hutter, ICLR 2019, algorithm 2), in place."""
    norm = torch.sqrt(sum((gradient.square().sum() for gradient in gradients.values()), torch.zeros(())))
    factor = min(1.0, limit / (float(norm) + 1e-6))
    with torch.no_grad():
        for name, weight in weights.items():
            first, second = moments[name]
            first.lerp_(factor * gradients[name], 1 - BETAS[0])
            second.lerp_((factor * gradients[name]).square(), 1 - BETAS[1])
            size = (second / (1 - BETAS[1] ** count)).sqrt() + EPSILON
            weight -= rate * (first / (1 - BETAS[0] ** count)) / size


def one_workers_losses(context: Context) -> list[float]:
    """The losses that one worker of run_gpt2.py has with all blocks in every step. Arguments: drawn, slowness."""
    from common.arguments import parse_gpt2_arguments
    from common.optim import build_optimizer

    blocks = start.prepare_files(context.arguments)
    config = parse_gpt2_arguments("task2b_allreduce", world_size=2)
    model = GPT2LMHeadModel.from_pretrained("pretrained")
    optimizer, schedule = build_optimizer(config, model, 1)
    tokens, losses = torch.stack(blocks.train), []
    for _ in range(start.STEPS):
        loss = model(input_ids=tokens, labels=tokens).loss
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
        optimizer.step(None)  # type: ignore[call-overload]
        schedule.step()
        losses.append(float(loss))
    return losses
