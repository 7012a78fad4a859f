"""Runs a student's schedule on the given stage runner, and GPT-2 on a grid; beside them one worker, without their code.

Of the model, a rank is given its own stage and slices right, and noise in the others' places.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from grader.inside.context import Context
from grader.wire.values import Fields

MORE = 50  # actions beyond those that a stage has to do: so many of a longer list are returned
DROPOUT: Fields = dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.0)


def orders(context: Context) -> list[list[Any]]:
    """[size][stage]: the schedule as (kind, micro-batch) pairs, or what it is instead, and whether a second call, by
    keyword, gives the same. Arguments: file, sizes (micro-batches, stages)."""
    lesson = context.load(context.arguments["file"])
    found = []
    for micro_batches, stages in context.arguments["sizes"]:
        each = []
        for stage in range(stages):
            once = lesson.one_f_one_b(micro_batches, stages, stage)
            again = lesson.one_f_one_b(micro_batches=micro_batches, stages=stages, stage=stage)
            most = 2 * micro_batches + MORE
            each.append({"actions": plain(once, most), "same": plain(once, most) == plain(again, most)})
        found.append(each)
    return found


def plain(actions: object, most: int) -> Any:
    """A list of actions as pairs; a name for what is none."""
    if not isinstance(actions, list | tuple):
        return f"a {type(actions).__name__}"
    pairs = []
    for action in actions[:most]:
        kind, number = getattr(action, "kind", None), getattr(action, "micro_batch", None)
        if kind not in ("forward", "backward") or type(number) is not int:
            return f"a list with {str(action)[:80]}"
        pairs.append([kind, number])
    return pairs


def model_of(a: Fields, weights: dict[str, Tensor]) -> GPT2LMHeadModel:
    """GPT-2 with these weights. Arguments: blocks, width, heads, inner, vocabulary, positions."""
    config = GPT2Config(
        n_layer=a["blocks"], n_embd=a["width"], n_head=a["heads"], n_inner=a["inner"], vocab_size=a["vocabulary"],
        n_positions=a["positions"], bos_token_id=0, eos_token_id=0, **DROPOUT,
    )  # fmt: skip
    config._attn_implementation = "sdpa"  # causal by itself: the stages' blocks are given no mask
    model = GPT2LMHeadModel(config)
    missing = model.load_state_dict(weights, strict=False)
    assert not missing.unexpected_keys and set(missing.missing_keys) <= {"lm_head.weight"}, missing
    return model


def copies(named: Iterable[tuple[str, Any]]) -> Fields:
    return {name: None if value is None else value.detach().clone() for name, value in named}


def gradients(module: nn.Module) -> Fields:
    return copies((name, parameter.grad) for name, parameter in module.named_parameters())


def stages(context: Context) -> list[Fields]:
    """Each step of a pipeline: loss, gradients, and how many micro-batches were alive at most.

    Arguments: file, micro_batches, and those of model_of; mine: weights, tokens (B, T) of each step.
    """
    a = context.arguments
    lesson = context.load(a["file"])
    from beyond.stage_runner import Stage, StageRunner

    mine = a["mine"]
    context.join()
    part = Stage(model_of(a, mine["weights"]), context.rank, context.world_size)
    runner = StageRunner(part, dist.group.WORLD)  # type: ignore[arg-type]
    actions = lesson.one_f_one_b(a["micro_batches"], context.world_size, context.rank)
    found = []
    for tokens in mine["tokens"]:
        part.zero_grad()
        runner.most_alive = 0
        context.event("run")
        loss = runner.run(actions, tokens.chunk(a["micro_batches"]))
        context.event("finish")
        runner.finish()
        context.event("ended")
        told = {"loss": loss.detach(), "gradients": gradients(part)}
        found.append(told | {"most_alive": int(runner.most_alive), "left": len(runner.alive)})
    return found


def members(context: Context) -> list[Fields]:
    """members() of each grid, kind by kind. Arguments: file, grids (pipeline, data, tensor)."""
    lesson = context.load(context.arguments["file"])
    from common.config import Grid

    found = []
    for pipeline, data, tensor in context.arguments["grids"]:
        value = lesson.members(Grid(pipeline=pipeline, data=data, tensor=tensor))
        is_dict = isinstance(value, dict)
        kinds = [str(kind)[:40] for kind in value][:8] if is_dict else []
        told = {str(kind)[:40]: lists_of_ranks(groups) for kind, groups in value.items()} if is_dict else {}
        found.append({"type": type(value).__name__, "kinds": kinds, "groups": told})
    return found


def lists_of_ranks(groups: Any) -> Any:
    """Lists of lists of whole numbers; a text for what is none."""
    are_lists = isinstance(groups, list) and all(isinstance(group, list) for group in groups)
    if are_lists and all(type(rank) is int for group in groups for rank in group):
        return groups[:64]
    return str(groups)[:100]


def groups(context: Context) -> Fields:
    """make_groups(), and a sum over each group that it returns. Arguments: file, grid; mine: a number for each kind."""
    context.spy(dist, "new_group", "new_group", lambda ranks=None, *rest, **more: {"ranks": as_list(ranks)})
    a = context.arguments
    lesson = context.load(a["file"])
    from common.config import Grid

    mine = a["mine"]
    context.join()
    context.event("make")
    made = lesson.make_groups(Grid(**a["grid"]))
    context.event("made")
    found: Fields = {}
    for kind in ("pipeline", "data", "tensor"):
        group = getattr(made, kind, None)
        if not isinstance(group, dist.ProcessGroup):
            found[kind] = {"type": type(group).__name__}
            continue
        number = mine[kind].clone()
        context.event("sum", of=kind)
        dist.all_reduce(number, group=group)
        context.event("ended")
        found[kind] = {"ranks": dist.get_process_group_ranks(group), "sum": number}
    return found


def as_list(ranks: Any) -> Any:
    """The ranks that new_group is given, as whole numbers; None for all."""
    try:
        return None if ranks is None else [int(rank) for rank in list(ranks)][:64]
    except (TypeError, ValueError):
        return str(ranks)[:100]


def train(context: Context) -> Fields:
    """Some steps of OnGrid: loss, norm and gradients of each, and the parameters at the end.

    Arguments: file, grid, micro_batches, limits (of clipping, for each step), rate, momentum, and those of model_of;
    mine: weights, tokens (B, T) of each step.
    """
    a = context.arguments
    context.load(a["file"])
    from beyond.on_grid import OnGrid
    from common.config import Grid

    mine = a["mine"]
    context.join()
    model = model_of(a, mine["weights"])

    def make_optimizer(of: list[dict]) -> torch.optim.Optimizer:
        return torch.optim.SGD(of, lr=a["rate"], momentum=a["momentum"])

    part = OnGrid(model, Grid(**a["grid"]), make_optimizer, 0.0, "1f1b", a["micro_batches"])
    found = []
    for tokens, limit in zip(mine["tokens"], a["limits"], strict=True):
        loss = part.forward_backward(tokens)
        part.finish()
        told = {"loss": loss.detach(), "gradients": gradients(part.model)}
        found.append(told | {"norm": part.clip(limit).detach()})
        part.step()
        part.zero_grad()
    return {"steps": found, "parameters": copies(part.model.named_parameters())}


def whole_training(context: Context) -> Fields:
    """The same steps on one worker, in float64, in a rank that loads no student's file.

    Arguments: limits, rate, momentum, and those of model_of; mine: weights, tokens of each step, the whole batch.
    """
    a = context.arguments
    model = model_of(a, a["mine"]["weights"]).double()
    named: dict[str, Tensor] = dict(model.named_parameters())
    moved = {name: torch.zeros_like(value) for name, value in named.items()}
    found = []
    for tokens, limit in zip(a["mine"]["tokens"], a["limits"], strict=True):
        loss = model(input_ids=tokens, labels=tokens).loss
        made = dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))
        norm = torch.sqrt(sum((gradient.square().sum() for gradient in made.values()), torch.zeros(())))
        factor = min(1.0, limit / (float(norm) + 1e-6))
        found.append({"loss": loss.detach(), "gradients": copies(made.items()), "norm": norm})
        with torch.no_grad():
            for name, value in named.items():
                moved[name] = a["momentum"] * moved[name] + factor * made[name]
                value.sub_(a["rate"] * moved[name])
    return {"steps": found, "parameters": copies(named.items())}
