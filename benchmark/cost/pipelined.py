"""Strategies in which every worker has some of the blocks, and micro-batches travel through all of them."""

from benchmark.cost.architecture import BYTES
from benchmark.cost.cell import Cell
from benchmark.cost.compute_times import ComputeTimes
from benchmark.cost.program import Kind, Start, Wait
from benchmark.cost.writer import Writer
from common.errors import InputError

TOKEN = 8  # bytes
PICKLED = (8, 21)  # all_gather_object of one number: its length, then its bytes


def stage_of(block: int, stages: int, blocks: int) -> int:
    """Return the stage that has a block."""
    return block * stages // blocks


def micro_batches(cell: Cell) -> int:
    """Return into how many micro-batches a step is cut: as many as divide it, at most four for each stage."""
    total = cell.batch * cell.workers
    return max(count for count in range(1, min(total, 4 * cell.workers) + 1) if total % count == 0)


def one_forward_one_backward(stage: int, stages: int, count: int) -> list[tuple[str, int]]:
    """Return what a stage does, in order, as ("forward" or "backward", micro-batch): the schedule 1F1B."""
    ahead = min(stages - stage, count)
    order = [("forward", i) for i in range(ahead)]
    for i in range(count):
        order.append(("backward", i))
        if ahead + i < count:
            order.append(("forward", ahead + i))
    return order


def pipeline(cell: Cell, times: ComputeTimes) -> list[Kind]:
    """One kind for each stage. Raises InputError for more stages than blocks, or fewer examples than stages."""
    model, stages = times.architecture, cell.workers
    if model.kind != "gpt2":
        raise InputError(f"--strategy {cell.strategy} cuts GPT-2 into stages, got {cell.model}; use --model gpt2-tiny")
    if stages > model.n_blocks:
        raise InputError(
            f"--workers: {cell.model} has {model.n_blocks} blocks, expected at most as many stages, got {stages}"
        )
    count = micro_batches(cell)
    if count < stages:
        raise InputError(f"--batch_size: a pipeline of {stages} stages needs as many examples, got {count}")
    return [Kind([stage], tuple(_stage(cell, times, stage, count))) for stage in range(stages)]


def _stage(cell: Cell, times: ComputeTimes, stage: int, count: int) -> list:
    stages, model = cell.workers, times.architecture
    size = cell.batch * stages / count  # examples of a micro-batch
    writer = Writer(cell, times, stage, size)
    everybody, last = tuple(range(stages)), stages - 1
    seconds = {"forward": _forward(writer, stage), "backward": _backward(writer, stage)}
    passed_on = size * cell.length * model.width * BYTES

    def together(name: str, operation: str, bytes_: float) -> None:
        if stages > 1:
            writer.instructions += [Start(name, operation, bytes_, stages, everybody), Wait(name)]

    together("tokens", "all_gather", cell.batch * cell.length * TOKEN)
    for direction, i in one_forward_one_backward(stage, stages, count):
        before, after = (stage - 1, stage + 1) if direction == "forward" else (stage + 1, stage - 1)
        if 0 <= before <= last:
            writer.instructions.append(Wait(f"{direction} {i} from {before}"))
        writer.compute("forward" if direction == "forward" else "backward", seconds[direction])
        if 0 <= after <= last:
            key = f"{direction} {i} from {stage}"
            writer.instructions.append(Start(key, "hop", passed_on, 2, (stage,)))
    if last and stage in (0, last):  # both have the matrix of embedding and head
        shared = max(weight.bytes for weight in model.of_block(None))
        writer.instructions += [Start("shared", "exchange", shared, 2, (0, last)), Wait("shared")]
        writer.copy("communication", shared)
    together("loss", "broadcast", BYTES)
    for size_of_part in PICKLED:
        together(f"norm {size_of_part}", "all_gather", size_of_part)
    mine = [w for w in model.weights if w.block is not None and stage_of(w.block, stages, model.n_blocks) == stage]
    mine += [w for w in model.of_block(None) if stage in _stages_of_root(w.name, last)]
    writer.update(len(mine), sum(weight.elements for weight in mine))
    return writer.instructions


def _stages_of_root(name: str, last: int) -> set[int]:
    """Which stages have a parameter that is in no block: the first has embeddings, the last ln_f and the head."""
    if "wte" in name:
        return {0, last}
    return {0} if "wpe" in name else {last}


def _forward(writer: Writer, stage: int) -> float:
    stages, blocks = writer.workers, writer.model.n_blocks
    here = [f"block {i}" for i in range(blocks) if stage_of(i, stages, blocks) == stage]
    here += ["before"] * (stage == 0) + ["after"] * (stage == stages - 1)
    return sum(writer.step.forward[unit] for unit in here)


def _backward(writer: Writer, stage: int) -> float:
    """A micro-batch's backward; the head's is counted with the first gradient that becomes ready, of the last norm."""
    stages, blocks = writer.workers, writer.model.n_blocks
    block_of = {weight.name: weight.block for weight in writer.model.weights}
    total = 0.0
    for name, seconds in writer.step.backward.items():
        block = block_of[name]
        last_norm = block is None and "wte" not in name and "wpe" not in name
        there = (stages - 1 if last_norm else 0) if block is None else stage_of(block, stages, blocks)
        total += seconds * (there == stage)
    return total + writer.step.tail * (stage == 0)
