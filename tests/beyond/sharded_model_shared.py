"""Shared by b.9 and b.10: models of blocks, and one run of a model.

The toy is a model without layers (toy_in_rank.py). A piece is what is gathered at once: a block, or the root, which has
all other parameters. A place is where the model uses some: a block's number, -1 before all blocks, their number after.

Gradients and updates are drawn for each rank alone. So after the first step no rank knows the shards of the others: it
must gather them, and the broker sees when.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from grader.call_checks import waits_for_held_back
from grader.grading import Grade
from grader.in_rank import in_rank
from grader.ranks.calls import Call
from grader.ranks.outcome import Result
from grader.wire import drawn
from grader.wire.values import Fields
from tests.beyond import sharded_optimizer_shared as shared
from tests.beyond import toy_shared
from tests.beyond.sharded_optimizer_shared import SHARDED, TOY, OptimizerRun, ShardSetting, bucket_of
from tests.beyond.toy_shared import Arrays, Uses, is_message

if TYPE_CHECKING:  # what a function finds in a rank
    from grader.inside.tools import Context, release, torch
    from tests.beyond.sharded_model_in_rank import BlocksToy, take_gradients_here
    from tests.beyond.sharded_optimizer_in_rank import described

BLOCKS = "tests/beyond/sharded_model_in_rank.py"
Subject = tuple[str, int]  # "gathers" or "sends", and the number of the piece
BEGIN = -1  # the place of the root before the blocks; after them it is their number
RATE = 0.125  # of the optimizer, which is plain SGD
HINTS = shared.HINTS | {
    "computes in backward while": "before_backward must wait for the block: if it was freed after forward, it must be "
    "gathered again",
    "computes in forward while": "before_forward must wait for the block: wait for block i before it computes",
    "beyond/flat_parameters.py": "a freed parameter is laid out flat again: parameters_by_block must return each "
    "parameter once; parameters that several blocks share belong to the root",
    "KeyError": "a parameter was taken out of `missing` twice: finish must reset `missing` to all parameters of every "
    "piece, also of the root",
    "'NoneType' object has no attribute 'wait'": "wait() is called on a handle that is None: store the handle of every "
    "message, and receive it once",
}
SENT_EARLY = {"computes in backward while": "a block is sent and freed only when its last gradient is ready"}  # b.10


# --- what a rank does ---


@in_rank(uses=[TOY, SHARDED, BLOCKS], preload=("steps",))
def train(context: Context, lesson: ModuleType, inputs: Fields) -> object:
    """Take steps; return what each micro-batch and each evaluation leaves, and the shards after each step.

    Arguments: those of the toy, exchanges (whether the student's b.10 sends gradients; otherwise the shards get the
    gradients `updates`), evaluate (the steps after which the model is evaluated without gradients), rate.
    """
    arguments = context.arguments
    model = BlocksToy(context, inputs)
    trained = {model.toy.numbered[k] for k in model.uses}
    if not arguments["exchanges"]:
        take_gradients_here(lesson, lambda block: len(trained.intersection(block.flat.parameters)))

    def make_optimizer(groups: list[Fields]) -> torch.optim.Optimizer:
        return torch.optim.SGD(groups, lr=arguments["rate"])

    model.sharded = sharded = lesson.ShardedModel(model, model.blocks, make_optimizer)
    report: dict[str, list[object]] = {"finishes": [], "steps": [], "evaluations": []}
    for step, micros in enumerate(inputs["gradients"]):
        for number, gradients in enumerate(micros):
            context.event("backward", step=step, micro=number)
            torch.autograd.backward(model(f"{step} {number}", gradients))
            release(context, arguments["late"])
            context.event("backward ended")
            if arguments["exchanges"]:
                sharded.finish()
            else:
                for piece, update in zip(sharded.pieces, inputs["updates"][step], strict=True):
                    if piece.gathering is not None:  # a block that no place has waited for
                        piece.wait()
                    piece.free()
                    piece.shard.gradient = update.clone()
            context.event("finished")
            left = [k for k, parameter in enumerate(model.toy.numbered) if parameter.grad is not None]
            means = described("mean", [piece.shard.gradient for piece in sharded.pieces])
            report["finishes"].append({"step": step, "number": number, "left": left, "notes": model.notes} | means)
        sharded.step()
        sharded.zero_grad()
        shards = described("shard", [piece.shard.values for piece in sharded.pieces])
        report["steps"].append(shards | {"in memory": model.in_memory()})
        if step in arguments["evaluate"]:
            context.event("evaluation", step=step)
            with torch.no_grad():
                model(f"{step} evaluation", inputs["gradients"][step][0])
            context.event("evaluation ended")
            report["evaluations"].append({"step": step, "notes": model.notes, "in memory": model.in_memory()})
    return report


# --- models ---


@dataclass(frozen=True, kw_only=True)
class ModelSetting(ShardSetting):
    """A model of blocks, and its steps; every micro-batch uses the same parameters.

    places: for each use, a block, or the root before (-1) or after the blocks; evaluate: the steps after which the
    model is evaluated without gradients; exchanges: whether the student's b.10 sends gradients.
    """

    places: list[int]
    evaluate: tuple[int, ...] = ()
    exchanges: bool = True

    @property
    def arguments(self) -> Fields:
        own = {"places": self.places, "evaluate": list(self.evaluate), "exchanges": self.exchanges, "rate": RATE}
        return super().arguments | own


def model_of(
    blocks: list[list[int]], begin: list[int], end: tuple[int, ...] = (), unused: tuple[int, ...] = (),
    micros: tuple[int, ...] = (1, 1), **others: Any,
) -> ModelSetting:  # fmt: skip
    """Return a setting whose root uses `begin` before and `end` after the blocks. micros: how many, in each step."""
    inside = [(place, k) for place, block in enumerate(blocks) for k in block]
    every = [*((BEGIN, k) for k in begin), *inside, *((len(blocks), k) for k in end)]
    used = [(place, k) for place, k in every if k not in unused]
    one_micro = [[k for _, k in used]]  # the same on all ranks
    uses: Uses = [[one_micro] * count for count in micros]
    return ModelSetting(blocks=blocks, places=[place for place, _ in used], uses=uses, **others)


# Three blocks whose sizes differ and divide by no number of ranks; a root before and after them.
THREE: Fields = {
    "shapes": [[3, 4], [5], [7], [2, 6], [4, 3], [11], [3, 3], [6], [5, 2]],
    "blocks": [[0, 1], [2, 3], [4, 5]],
    "begin": [6, 7],
    "end": (8,),
}
PLAIN = model_of(**THREE)
SPECIAL = model_of(**THREE, micros=(1,), zero=[2, 3], infinite=[0])  # block 1 and a number of block 0, on one rank
LATE = replace(PLAIN, late=1)  # one rank is behind: a rank that waits for it too early waits forever
# No rank uses a parameter of block 1, so none of its hooks is called, nor the last one of the root.
UNUSED = model_of(**THREE, unused=(2, 3, 8))
# 1 is in two blocks (so it is the root's), 4 is frozen, 6 is never used.
ODD = model_of(
    shapes=[[4, 3], [5], [2, 3], [3, 3], [7], [6, 2], [3], [4, 2], [9]],
    blocks=[[0, 1], [2, 3, 4], [1, 5, 6], [7]], begin=[8], frozen=[4], unused=(6,), micros=(2, 1, 3), evaluate=(0, 1),
)  # fmt: skip
# Block 1 is in bfloat16, and so large that a wrong dtype shows in the bytes.
HALF = model_of(
    shapes=[[3, 4], [60, 40], [9], [5, 3], [6]], dtypes=["float32", "bfloat16", "bfloat16", "float32", "float32"],
    blocks=[[0], [1, 2], [3]], begin=[4], micros=(1, 2, 1),
)  # fmt: skip
LARGE = model_of([[0], [1, 2], [3]], [4], micros=(1,), shapes=[[3, 4], [640, 1024], [5], [4, 3], [6]])  # 2.6 MB
TRAINED = ((3, PLAIN), (2, ODD), (4, ODD), (2, HALF), (2, LARGE), (1, ODD))


# --- one run ---


def why_model_is_stuck(result: Result) -> str:
    """Say why no rank can continue; "" if it is no known mistake."""
    waits = waits_for_held_back(result)
    if "all_gather" in waits:
        return (
            f"{waits} before the block needs it: start the gather of the next block, and wait just before it computes"
        )
    return toy_shared.why_backward_is_stuck(result) if waits else ""


class Key(NamedTuple):
    """What a rank notes when it reaches it: a block has computed in forward, or a parameter's gradient is next."""

    text: str
    direction: str
    place: int
    parameter: int | None


class Pass(NamedTuple):
    """A micro-batch, or an evaluation (number: None), on one rank.

    calls: the messages after each number of keys; the last ones were sent when backward had ended.
    """

    name: str
    step: int
    number: int | None
    calls: list[list[Call]]


class BlockMessage(NamedTuple):
    """A call of a pass, and what it does."""

    subject: Subject
    call: Call


class ModelRun(OptimizerRun):
    """One run of a model. Its buckets are the student's `pieces`: the blocks from last to first, then the root."""

    setting: ModelSetting
    part = "block"
    why_stuck = staticmethod(why_model_is_stuck)

    def __init__(self, grade: Grade, ranks: int, setting: ModelSetting) -> None:
        self.updates: list[list[Arrays]] = []  # [rank][step][piece], instead of the student's gradients
        self.hints = HINTS | SENT_EARLY if setting.exchanges else HINTS
        self.depth, self.root = len(setting.blocks), len(setting.blocks)
        super().__init__(grade, ranks, setting, train)
        # [step][piece] -> a row for each rank; before every step, and after the last one.
        self.shards = [[setting.flat(bucket, self.initial, ranks) for bucket in self.buckets]]
        for step, micros in enumerate(setting.uses):
            updates = [self.mean(step, len(micros) - 1, i) for i in range(len(self.buckets))]
            if not setting.exchanges:
                updates = [np.asarray([own[step][i] for own in self.updates]) for i in range(len(self.buckets))]
            self.shards.append([old - RATE * new for old, new in zip(self.shards[-1], updates, strict=True)])

    def more_inputs(self, rank: int) -> Fields:
        if self.setting.exchanges:
            return {}
        generator = drawn.generator(self.grade.seed, 18, self.ranks, rank)
        lengths = [self.setting.flat(bucket, self.initial, self.ranks).shape[1] for bucket in self.buckets]
        draws = [[generator.normal(size=length) for length in lengths] for _ in self.setting.uses]
        self.updates.append([[np.asarray(update, np.float32) for update in step] for step in draws])
        return {"updates": self.updates[-1]}

    def name(self, i: int) -> str:
        return self.place_name(self.depth - 1 - i)

    def place_name(self, place: int) -> str:
        return f"block {place}" if 0 <= place < self.depth else "the root"

    def piece(self, block: int) -> int:
        """Return the place of a block in `pieces`."""
        return self.depth - 1 - block

    def parameters(self, step: int) -> dict[int, np.ndarray]:
        """Return what the parameters are before a step, in their dtype."""
        pairs = zip(self.buckets, self.shards[step], strict=True)
        return {k: value for pair in pairs for k, value in self.setting.parameters_of(*pair).items()}

    # --- what a rank did ---

    def keys(self, evaluation: bool) -> list[Key]:
        """Return the keys of a pass in the order in which the model reaches them."""
        forward = [Key(f"forward {place}", "forward", place, None) for place in range(BEGIN, self.depth + 1)]
        uses = list(enumerate(zip(self.setting.places, self.setting.uses[0][0][0], strict=True)))
        backward = [
            Key(str(use), "backward", place, k) for use, (place, k) in reversed(uses) if k not in self.setting.frozen
        ]
        return forward if evaluation else [*forward, *backward]

    def passes(self, rank: int) -> list[Pass]:
        """Return the passes of a rank. Fail if it does not compute them as the model does."""
        passes, reached = list[Pass](), list[list[str]]()
        for event in self.result.ranks[rank].events:
            if event.name in ("backward", "evaluation"):
                step, number = event.data["step"], event.data.get("micro")
                name = f"the evaluation after step {step}" if number is None else f"step {step}, micro-batch {number}"
                passes.append(Pass(name, step, number, [[]]))
                reached.append([])
            elif event.name in ("reached", "backward ended", "evaluation ended"):
                reached[-1].append(event.data.get("key", "ended"))
                passes[-1].calls.append([])
            elif passes and isinstance(event, Call) and is_message(event):
                passes[-1].calls[-1].append(event)
        for one, keys in zip(passes, reached, strict=True):
            number = "evaluation" if one.number is None else one.number
            if keys != [*(f"{one.step} {number} {key.text}" for key in self.keys(one.number is None)), "ended"]:
                self.grade.fail(
                    observed=f"{one.name}: rank {rank} does not compute block after block, as the model does"
                )
        return passes

    def messages(self, rank: int, one: Pass) -> list[list[BlockMessage]]:
        """Return what each call of a pass does. Fail for one that neither gathers nor sends."""
        return [[BlockMessage(self._subject(rank, one, call), call) for call in calls] for calls in one.calls]

    def _subject(self, rank: int, one: Pass, call: Call) -> Subject:
        """Return whether a call gathers or sends, and which piece; fail if it does neither."""
        where, pieces = f"{one.name}: rank {rank}", range(len(self.buckets))
        if call.name == "all_gather":
            is_evaluation = one.number is None
            shards = self.shards[one.step + 1 if is_evaluation else one.step]
            rows = [shard[rank][None] for shard in shards]
            what = "its shard of one block, as the step before has left it"
            return "gathers", bucket_of(self, where, call, rows, what)
        if call.name not in ("reduce_scatter", "all_to_all") or one.number is None:
            self.grade.fail(
                f"{where} calls {call.name} ({call.where}): parameters need an all_gather, gradients a reduce_scatter "
                "or an all_to_all; an all_reduce gives every rank all shards, and moves twice as many bytes"
            )
        rows = [self.rows(rank, one.step, one.number, i) for i in pieces]
        what = "its own gradients of one block in this micro-batch, as take_gradients returns them"
        return "sends", bucket_of(self, where, call, rows, what)
