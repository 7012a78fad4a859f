"""Judges when a sharded model gathers its blocks and sends their gradients, and how many bytes that takes.

All of it is the broker's: the messages with their bytes, and between them when each permit was given. What a message
holds says which block it is about.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from grader.checks.beyond import in_transit
from grader.checks.beyond.sharded_model.sharded_model import ModelRun
from grader.checks.beyond.sharded_model.sharded_model_settings import BEGIN
from grader.ranks.calls import Call

SENDS = ("reduce_scatter", "all_to_all")
FREE = ("send", "recv", "barrier", "measurement", "init_process_group")  # calls that are not looked at


@dataclass
class Pass:
    """What one rank did in a micro-batch (or an evaluation): each call, with the number of permits given before it.

    ended: how many had been given when backward ended; calls after it are those of finish.
    """

    step: int
    micro: int | None  # None: an evaluation
    given: list[str] = field(default_factory=list)
    calls: list[tuple[int, bool, Call]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"the evaluation after step {self.step}" if self.micro is None else f"step {self.step}"


def read(run: ModelRun, rank: int) -> list[Pass]:
    passes: list[Pass] = []
    ended = False
    for event in run.result.ranks[rank].events:
        if event.name in ("micro-batch", "evaluation"):
            passes.append(Pass(event.data["step"], event.data.get("micro")))
            ended = False
        elif event.name == "backward ended":
            ended = True
        elif event.name == "given":
            step, what, rest = event.data["key"].split(maxsplit=2)
            now = passes and (str(passes[-1].step), "evaluation" if passes[-1].micro is None else str(passes[-1].micro))
            if not passes or now != (step, what) or ended:
                run.grade.fail(f"rank {rank} asks for the gradients of step {step} before its backward computes them")
            passes[-1].given.append(rest)
        elif isinstance(event, Call) and event.name not in FREE and passes:
            passes[-1].calls.append((len(passes[-1].given), ended, event))
    for one in passes:
        _check_given(run, rank, one)
    return passes


def _check_given(run: ModelRun, rank: int, one: Pass) -> None:
    """Permits are asked for by the computation, in its own order."""
    depth = run.setting.depth
    expected = [f"forward {place}" for place in range(BEGIN, depth + 1)]
    if one.micro is not None:
        trained = [u for u, (_, k) in enumerate(run.setting.uses()) if k not in run.setting.frozen]
        expected += [f"backward {use}" for use in reversed(trained)]
    if one.given != expected:
        run.grade.fail(f"{one.name}: rank {rank} does not compute its blocks one after the other, as the model does")


# --- what a message is about ---


def gathered(run: ModelRun, rank: int, one: Pass, call: Call) -> int | None:
    """The block whose shard of this rank a message holds, in the dtype of the block; None for none."""
    values = run.right.steps[one.step].before if one.micro is not None else run.right.steps[one.step].after
    sent = call.sent_arrays().ravel()
    for block in range(run.setting.depth + 1):
        if sent.size == run.right.length(block):
            mine = run.right.flat(values, block)[rank]
            slack = 2e-2 if run.right.half(block) else 1e-4
            if np.allclose(sent, mine, rtol=slack, atol=slack):
                return block
    return None


def sent_block(run: ModelRun, rank: int, one: Pass, call: Call) -> int | None:
    """The block whose gradients on this rank a message holds, divided by the number of ranks or not; None for none."""
    if one.micro is None:
        return None
    own, sent = run.right.steps[one.step].own[rank][one.micro], call.sent_arrays().ravel().astype(np.float64)
    for block in range(run.setting.depth + 1):
        mine = run.right.flat(own, block).ravel()
        slack = 2e-2 if run.right.half(block) else 1e-4
        if sent.size == mine.size and any(
            np.allclose(sent * factor, mine, rtol=slack, atol=slack) for factor in (1, run.n)
        ):
            return block
    return None


def about(run: ModelRun, rank: int, one: Pass, call: Call) -> tuple[str, int]:
    """("gather" or "send", block) of a message; fails where it is neither."""
    which: Callable[[ModelRun, int, Pass, Call], int | None] | None = None
    which = gathered if call.name == "all_gather" else sent_block if call.name in SENDS else None
    place = f"{one.name}: rank {rank} calls {call.name} #{call.number} ({call.where})"
    if which is None:
        run.grade.fail(
            f"{place}: parameters need an all_gather, gradients a reduce_scatter or an all_to_all; an all_reduce "
            "gives every rank all shards, and moves twice as many bytes"
        )
    block = which(run, rank, one, call)
    if block is None:
        run.grade.fail(f"{place}, {_strange(run, rank, one, call)}")
    half = run.right.half(block)
    if which is gathered and half and call.dtype != "bfloat16":
        run.grade.fail(
            f"{place} for {run.name(block)} in {call.dtype}: send the shard in the dtype of flat.values, bfloat16"
        )
    return ("gather" if which is gathered else "send"), block


def _strange(run: ModelRun, rank: int, one: Pass, call: Call) -> str:
    """What a message holds that is not what it should be."""
    sent, right = call.sent_arrays().ravel().astype(np.float64), run.right
    step = right.steps[one.step]
    if call.name == "all_gather":
        values = step.before if one.micro is not None else step.after
        earlier = step.before if one.micro is None else (right.steps[one.step - 1].before if one.step else None)
        for block in range(run.setting.depth + 1):
            if sent.size != right.length(block):
                continue
            for other in range(run.n):
                if other != rank and np.allclose(sent, right.flat(values, block)[other], rtol=1e-3, atol=1e-3):
                    return (
                        f"with the shard of rank {other} of {run.name(block)}: rank r owns the elements r L to (r+1) L"
                    )
            if earlier is not None and np.allclose(sent, right.flat(earlier, block)[rank], rtol=1e-4, atol=1e-4):
                return f"with the values that {run.name(block)} had before the last step"
        return "but what it sends is not the shard of any block"
    micros = [step.own[rank][micro] for micro in range(run.setting.micros[one.step])]
    for block in range(run.setting.depth + 1):
        mine = right.flat(micros[one.micro or 0], block)
        if sent.size != mine.size:
            continue
        if not np.any(sent):
            return f"but the gradients of {run.name(block)} in it are all zero"
        so_far = np.sum([right.flat(m, block) for m in micros[: (one.micro or 0) + 1]], axis=0).ravel()
        if one.micro and np.allclose(sent, so_far, rtol=1e-3):
            return (
                f"with the gradients of {run.name(block)} of all micro-batches so far: take_gradients sets them to None"
            )
    return "but what it sends is not this rank's gradients of a block, in the order of flat.values"


# --- when ---


def check_gathers(run: ModelRun) -> None:
    """A block is gathered while the one before it computes, in forward and in backward, and once in each."""
    for rank in range(run.n):
        for one in read(run, rank):
            found = [(given, ended, call, *about(run, rank, one, call)) for given, ended, call in one.calls]
            gathers = [(given, call, block) for given, _, call, kind, block in found if kind == "gather"]
            _check_gathers(run, rank, one, gathers)


def _check_gathers(run: ModelRun, rank: int, one: Pass, gathers: list[tuple[int, Call, int]]) -> None:
    depth, last = run.setting.depth, run.setting.depth - 1
    forward = len(range(BEGIN, depth + 1))
    due = [("forward", block, block) for block in range(depth)] + [("forward", depth, 0)]
    if one.micro is not None:
        due += [("backward", block, _begins(run, one, block + 1)) for block in range(depth - 1)]
    for direction, block, place in due:
        mine = [
            (given, call) for given, call, b in gathers if b == block and (given < forward) == (direction == "forward")
        ]
        if not mine:
            run.grade.fail(f"{one.name}: rank {rank} does not gather {run.name(block)} in {direction}")
        given, call = mine[0]
        if len(mine) > 1:
            run.grade.fail(
                f"{one.name}: rank {rank} gathers {run.name(block)} {len(mine)} times in {direction} ({call.where})"
            )
        where = f"{one.name}: rank {rank} gathers {run.name(block)} in {direction}"
        before = _before(run, direction, block)
        if given > place:
            run.grade.fail(
                f"{where} only after {_computed(run, one, given)} ({call.where}), expected while "
                f"{before} computes: start the gather in before_{direction} of {before}"
            )
        if given < place:
            run.grade.fail(
                f"{where} before {before} computes ({call.where}): that keeps one more block in memory. Gather only "
                "the next block"
            )
    extra = [(call, b) for given, call, b in gathers if given >= forward and b >= last]
    if extra and one.micro is not None:
        call, block = extra[0]
        why = "it stays after forward, since backward begins with it" if block == last else "it stays until it is sent"
        run.grade.fail(f"{one.name}: rank {rank} gathers {run.name(block)} again in backward ({call.where}): {why}")


def _begins(run: ModelRun, one: Pass, place: int) -> int:
    """How many permits have been given when backward of this place begins."""
    uses = run.setting.uses()
    for count, name in enumerate(one.given):
        direction, number = name.split()
        if direction == "backward" and uses[int(number)][0] <= place:
            return count
    return len(one.given)


def _before(run: ModelRun, direction: str, block: int) -> str:
    if block == run.setting.depth or (direction == "forward" and block == 0):
        return "the root"
    return run.name(block - 1 if direction == "forward" else block + 1)


def _computed(run: ModelRun, one: Pass, given: int) -> str:
    """What has computed when so many permits have been given."""
    direction, number = one.given[given - 1].split()
    place = int(number) if direction == "forward" else run.setting.uses()[int(number)][0]
    return f"{run.place(place)} has computed"


def check_sends(run: ModelRun) -> None:
    """A block's gradients are sent once, when the last of them is there and before the next one is."""
    for rank in range(run.n):
        for one in read(run, rank):
            if one.micro is None:
                continue
            found = [(given, ended, call, *about(run, rank, one, call)) for given, ended, call in one.calls]
            messages = [(block, call) for *_, call, kind, block in found if kind == "send"]
            sizes = [run.right.size(block) for block in range(run.setting.depth + 1)]
            in_transit.check(run.grade, f"{one.name}: rank {rank}", messages, sizes, run.name)
            for block in range(run.setting.depth + 1):
                sends = [(given, ended, call) for given, ended, call, kind, b in found if kind == "send" and b == block]
                if len(sends) != 1:
                    run.grade.fail(_missing(run, rank, one, block, len(sends)))
                _check_send(run, rank, one, block, *sends[0])


def check_sums(run: ModelRun) -> None:
    """No message adds bfloat16 gradients in bfloat16: the mean is due in fp32."""
    for rank in run.result.ranks:
        for call in rank.calls:
            if call.name == "reduce_scatter" and call.dtype == "bfloat16":
                run.grade.fail(
                    f"rank {rank.rank}: {call.name} #{call.number} ({call.where}) adds in bfloat16, the dtype of its "
                    "tensors: give a reduce_scatter float32, or use all_to_all and add in float32"
                )


def _missing(run: ModelRun, rank: int, one: Pass, block: int, count: int) -> str:
    what = f"{one.name}: rank {rank} sends the gradients of {run.name(block)} {count} times, expected once"
    unused = [k for k in run.right.groups[block] if k in run.setting.unused]
    if count == 0 and unused:
        return (
            f"{what}: parameter {unused[0]} got no gradient, so its hook was not called; finish must send such a block"
        )
    return f"{what} in each backward"


def _check_send(run: ModelRun, rank: int, one: Pass, block: int, given: int, ended: bool, call: Call) -> None:
    mine = run.right.groups[block]
    if any(k in run.setting.unused for k in mine):
        return  # finish sends it
    uses = run.setting.uses()
    names = {f"backward {number}" for number, (_, k) in enumerate(uses) if k in mine}
    due = max(count for count, name in enumerate(one.given, 1) if name in names)
    if ended or given > due:
        late = "after backward has ended" if ended else f"after {_computed(run, one, given)}"
        run.grade.fail(
            f"{one.name}: on rank {rank} the gradients of {run.name(block)} are sent {late} ({call.where}), expected "
            "as soon as they are complete: gradient_ready must send a block when none of its gradients is missing"
        )


def check_nothing_waits(run: ModelRun) -> None:
    """No gather ahead and no send waits: a run in which one rank is behind has come to its end."""
    for rank in run.result.ranks:
        for call in rank.calls:
            if call.name not in FREE and not call.asynchronous:
                run.grade.fail(
                    f"rank {rank.rank} waits in {call.name} #{call.number} ({call.where}): pass async_op=True, and "
                    "keep the handle that it returns"
                )


# --- bytes ---


def check_bytes(run: ModelRun) -> None:
    """A micro-batch moves three times (N-1)/N of the parameters, less what stays: the last block, and the root."""
    depth, n = run.setting.depth, run.n
    sizes = [run.right.bytes(block) for block in range(depth + 1)]
    unit = (n - 1) / n
    for rank in range(n):
        for one in read(run, rank):
            rounds = sum(sizes) if one.micro is None else 2 * sum(sizes) + sum(sizes[: depth - 1])
            if one.micro is not None and not run.setting.finish:
                rounds -= sum(sizes)
            moved = sum(call.price for _, _, call in one.calls)
            if moved > 1.001 * unit * rounds + 64:
                names = ", ".join(sorted({call.name for _, _, call in one.calls}))
                times = moved / max(unit * sum(sizes), 1)
                run.grade.fail(
                    f"{one.name}: rank {rank} sends {moved:.0f} bytes ({names}), {times:.2f} times (N-1)/N "
                    f"of the parameters; expected at most {unit * rounds:.0f}: gather in forward, gather in "
                    "backward, and send gradients only to the rank that owns them"
                )
