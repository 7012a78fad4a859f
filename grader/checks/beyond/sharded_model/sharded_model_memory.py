"""The memory that a sharded model may have, at the points where its toy measures."""

from grader.checks.beyond import in_transit
from grader.checks.beyond.sharded_model import memory_limits
from grader.checks.beyond.sharded_model.memory_limits import Limit
from grader.checks.beyond.sharded_model.sharded_model import ModelRun

RANKS = 4


def check_shards(run: ModelRun) -> None:
    """Between steps a rank has its shards: values, and after the first step the optimizer's state."""
    shard = _shard(run)
    limits = [
        Limit("made", "after ShardedModel is made", {"values": shard}, "free every block when its shard is copied")
    ]
    for step in range(len(run.setting.micros)):
        parts = {"values": shard} | ({"state of the optimizer": shard} if run.setting.finish else {})
        if run.setting.finish:
            gradients = {"values": shard, "gradients": shard} | ({"state of the optimizer": shard} if step else {})
            when = f"after finish of step {step}"
            advice = "free every block when it is sent, and release the tensors of the message when it is received; a "
            advice += "gradient that is a view of `received` keeps all of it"
            limits.append(Limit(f"{step} gradients", when, gradients, advice))
        advice = "only the shards remain between steps; is there still a reference to whole parameters or gradients?"
        limits.append(Limit(f"{step} ended", f"after step {step}", parts, advice))
        if step in run.setting.evaluate:
            when = f"after the evaluation after step {step}"
            limits.append(
                Limit(f"{step} evaluated", when, parts, "without gradients, free every block after it has computed")
            )
    _check(run, limits)


def check_blocks(run: ModelRun) -> None:
    """While a block computes, at most two are whole, the one that computes and the next one."""
    shard, whole, limits = _shard(run), run.right.bytes(0), list[Limit]()
    for step in range(len(run.setting.micros)):
        shards = shard * (1 + bool(step and run.setting.finish))
        for direction in ("forward", "backward"):
            for place in range(run.setting.depth):
                advice = "free a block after it has computed, and gather only one block ahead"
                parts = {"shards": shards, "two blocks": 2 * whole}
                sent = run.setting.depth - 1 - place if direction == "backward" and run.setting.finish else 0
                if sent:
                    parts["gradients of its shards"] = sent * whole // RANKS
                    parts["messages in transit"] = in_transit.COPIES * whole * min(sent, in_transit.MOST)
                    advice += "; receive must release the tensors of a message before many others are sent"
                when = f"while block {place} computes in {direction} of step {step}"
                limits.append(Limit(f"{step} 0 {direction} {place}", when, parts, advice))
    _check(run, limits)


def _shard(run: ModelRun) -> int:
    """Bytes of a rank's shards of all blocks."""
    return sum(4 * run.right.length(block) for block in range(run.setting.depth + 1))


def _check(run: ModelRun, limits: list[Limit]) -> None:
    memory_limits.check_seen(run.grade, run.result, limits)
    memory_limits.check_order(run.grade, run.result)
    memory_limits.check(run.grade, run.run, limits, run.right.bytes(0) // 5)
