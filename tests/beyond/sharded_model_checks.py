"""Checks of b.9 and b.10: when a rank gathers and sends, the values that blocks compute with, and what is freed.

Messages, their content and their order are from the broker.
"""

from __future__ import annotations

from grader.arithmetic import Tolerance, norm
from grader.compare import Expected, check
from tests.beyond.sharded_model_shared import BlockMessage, ModelRun, Pass, Subject
from tests.beyond.toy_shared import BYTES, check_in_transit, once_in_bfloat16

EACH_ONCE = (
    "gather each block once in forward and once in backward, just before it is needed: each one more needs memory"
)
ADVICE = {  # for a message that is missing
    "gathers in forward": "before_forward must start the gather of the next block: it travels while this one computes",
    "gathers in backward": "before_backward must start the gather of the block that backward needs next, and "
    "backward goes from the last block to the first",
    "sends in backward": "gradient_ready must send a block as soon as none of its gradients is missing",
    "sends in finish": "a parameter without a gradient never calls its hook, so finish must send such a block",
}


# --- messages ---


def due(run: ModelRun, evaluation: bool) -> list[list[Subject]]:
    """Return the messages that are due after each number of keys; the last list: when backward has ended."""
    keys, depth = run.keys(evaluation), run.depth
    moments: list[list[Subject]] = [[] for _ in range(len(keys) + 2)]
    moments[0] = [("gathers", run.root), ("gathers", run.piece(0))]
    for block in range(1, depth):  # while the block before computes: after the keys of the root and `block - 1` blocks
        moments[block].append(("gathers", run.piece(block)))
    if evaluation:
        return moments
    for block in range(depth - 1):  # while the next block computes in backward
        begins = (n for n, key in enumerate(keys) if key.direction == "backward" and key.place <= block + 1)
        moments[next(begins, len(keys))].append(("gathers", run.piece(block)))
    for i, bucket in enumerate(run.buckets if run.setting.exchanges else []):
        ready = {key.parameter: n for n, key in enumerate(keys, 1) if key.parameter in bucket}
        moments[max(ready.values()) if len(ready) == len(bucket) else -1].append(("sends", i))
    return moments


def check_messages(run: ModelRun) -> None:
    """Check that a block is gathered while the one before it computes, and its gradients are sent once complete."""
    sizes = [sum(run.initial[k].size for k in bucket) for bucket in run.buckets]
    for rank in range(run.ranks):
        for one in run.passes(rank):
            messages = run.messages(rank, one)
            sends = [(piece, call) for sent in messages for (kind, piece), call in sent if kind == "sends"]
            check_in_transit(run.grade, f"{one.name}: rank {rank}", sends, sizes, run.name)
            for n, expected in enumerate(due(run, one.number is None)):
                if sorted(expected) != sorted(message.subject for message in messages[n]):
                    fail_at(run, f"{one.name}: {when(run, one, n)}, rank {rank}", one, n, expected, messages)


def fail_at(
    run: ModelRun, where: str, one: Pass, n: int, expected: list[Subject], messages: list[list[BlockMessage]]
) -> None:
    """Fail: the messages after n keys are not those that are due. Name the likely cause."""
    got = [message.subject for message in messages[n]]
    missing = next((subject for subject in expected if subject not in got), None)
    keys, advice = run.keys(one.number is None), EACH_ONCE
    key = keys[min(n, len(keys) - 1)]
    if missing:
        advice = ADVICE[f"{missing[0]} in {'finish' if n > len(keys) else key.direction}"]
        later = [(m, call) for m in range(n + 1, len(messages)) for what, call in messages[m] if what == missing]
        if later:
            advice += f"; it does this only {when(run, one, later[0][0])} ({later[0][1].where})"
    elif key.direction == "backward" and ("gathers", run.piece(key.place)) in got:
        advice = f"{run.place_name(key.place)} stays after forward: backward begins with it"
    elif key.direction == "backward" and key.place == 0 and ("gathers", run.piece(run.depth - 1)) in got:
        advice = "no block comes before block 0, and self.blocks[-1] is the last one"
    place = f" ({messages[n][0].call.where})" if messages[n] else ""
    run.grade.fail(f"{where} {doing(run, got)}{place}, expected that it {doing(run, expected)}: {advice}")


def doing(run: ModelRun, subjects: list[Subject]) -> str:
    texts = {"gathers": "gathers {}", "sends": "sends the gradients of {}"}
    return " and ".join(texts[kind].format(run.name(piece)) for kind, piece in subjects) or "starts no message"


def when(run: ModelRun, one: Pass, n: int) -> str:
    """Say what a rank does after n keys."""
    keys = run.keys(one.number is None)
    if n < len(keys):
        return f"while {run.place_name(keys[n].place)} computes in {keys[n].direction}"
    return "when the last block has computed" if n == len(keys) else "after backward has ended"


def check_costs(run: ModelRun) -> None:
    """Check that a pass sends only the shards that it gathers, in the parameters' dtype, and each shard's gradients.

    The gradients of bfloat16 parameters may be sent in float32.
    """
    passes = [run.passes(rank) for rank in range(run.ranks)]
    for ranks in zip(*passes, strict=True):
        size = 0
        for kind, piece in (message for messages in due(run, ranks[0].number is None) for message in messages):
            factor = 1 if kind == "gathers" else 4 // BYTES[run.setting.dtype(run.buckets[piece][0])]
            size += run.bytes_of(piece) * factor
        calls = [call for one in ranks for calls in one.calls for call in calls]
        advice = "gather shards in the dtype of flat.values, and send gradients only to the rank that owns them"
        run.check_price(calls, size, ranks[0].name, advice)


# --- what blocks compute with, and what is in memory ---


def check_values(run: ModelRun) -> None:
    """Check that every block computes with the values of all ranks' shards, in forward and in backward."""
    uses = run.setting.uses[0][0][0]
    message = "the block does not compute with the parameters that the shards of all ranks hold together"
    for rank, value in enumerate(run.result.values):
        for one in (*value["finishes"], *value["evaluations"]):
            trains = "number" in one
            right = run.parameters(one["step"] if trains else one["step"] + 1)  # an evaluation runs after the step
            for use, (place, k) in enumerate(zip(run.setting.places, uses, strict=True)):
                if k not in right:  # it is frozen
                    continue
                for direction in ("forward", "backward") if trains else ("forward",):
                    is_half, total = run.setting.dtype(k) == "bfloat16", norm([*right.values()])
                    tolerance = once_in_bfloat16(right[k], total) if is_half else Tolerance(total)
                    name = f"{direction} of {run.place_name(place)}, parameter {k}"
                    expected = {f"{direction} {use}": Expected(right[k], message, name, tolerance=tolerance)}
                    where = f"step {one['step']}, rank {rank} of {run.ranks}: in "
                    check(run.grade, where, one["notes"], expected, run.result)


def check_in_memory(run: ModelRun) -> None:
    """Check that a block computes with only itself, the next one and the root in memory, and that steps leave none."""
    for rank, value in enumerate(run.result.values):
        for one in (*value["evaluations"], *value["finishes"]):
            for at, got in one["notes"].items():
                if " at " in at:
                    direction, place = at.split(" at ")
                    check_blocks(run, f"step {one['step']}, rank {rank}", direction, int(place), "number" in one, got)
        for after in (*value["steps"], *value["evaluations"]):
            words = (
                "in memory after a step or an evaluation: {got}; expected nothing, since the next forward gathers again"
            )
            check(run.grade, f"rank {rank}: ", after, {"in memory": Expected("nothing", words)})


def check_blocks(run: ModelRun, where: str, direction: str, place: int, trains: bool, got: str) -> None:
    """Check which blocks are in memory when a place begins to compute."""
    last = run.depth - 1
    blocks = {place, place + 1} if direction == "forward" else {place, place - 1}
    if place == run.depth:
        blocks = {last} if trains else set()
    names = [run.place_name(block) for block in sorted(blocks) if 0 <= block <= last]
    advice = {
        "forward": "gather one block ahead, and free a block when it has computed, the last one only if no backward "
        "follows (torch.is_grad_enabled)",
        "backward": "gather one block ahead, and free a block when its gradients are complete and are sent",
    }
    words = f"while {run.place_name(place)} computes in {direction}{'' if trains else ' without gradients'}, it has "
    words += f"{{got}} in memory, expected {{expected}}: {advice[direction]}"
    check(run.grade, f"{where}: ", {"": got}, {"": Expected(", ".join([*names, "the root"]), words)})
