"""How a model is cut: which rank has which parameters, and in which order a stage works."""

from benchmark.cost.architecture import Architecture, Weight
from benchmark.cost.cell import Cell

CHUNKS_A_STAGE = 4
SLICED = ("attn.c_attn.weight", "attn.c_attn.bias", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_fc.bias",
          "mlp.c_proj.weight")  # fmt: skip


def stage_of(block: int, stages: int, blocks: int) -> int:
    """Return the stage that has a block."""
    return block * stages // blocks


def on_stage(cell: Cell, model: Architecture, stage: int) -> list[Weight]:
    """Return the parameters of a stage, before they are sliced; the first and the last have the embedding matrix."""
    last = cell.stages - 1
    found = []
    for weight in model.weights:
        if weight.block is not None:
            there = {stage_of(weight.block, cell.stages, model.n_blocks)}
        elif "wte" in weight.name:
            there = {0, last}
        else:
            there = {0} if "wpe" in weight.name else {last}
        if stage in there:
            found.append(weight)
    return found


def micro_batches(cell: Cell) -> int:
    """Return into how many micro-batches a replica's examples are cut: as many as divide them, up to four a stage."""
    if cell.stages == 1:
        return 1
    total = cell.batch * cell.stages * cell.tensor
    return max(count for count in range(1, min(total, CHUNKS_A_STAGE * cell.stages) + 1) if total % count == 0)


def one_forward_one_backward(stage: int, stages: int, count: int) -> list[tuple[str, int]]:
    """Return what a stage does, in order, as ("forward" or "backward", micro-batch): the schedule 1F1B."""
    ahead = min(stages - stage, count)
    order = [("forward", i) for i in range(ahead)]
    for i in range(count):
        order.append(("backward", i))
        if ahead + i < count:
            order.append(("forward", ahead + i))
    return order


def elements_of_rank(weight: Weight, slices: int) -> float:
    """Return the elements of a parameter on one rank of a tensor axis."""
    return weight.elements / (slices if weight.name.endswith(SLICED) else 1)
