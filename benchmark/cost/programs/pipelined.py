"""Strategies that cut the model: into stages, through which micro-batches travel, and each matrix into slices."""

from benchmark.cost.architecture import BYTES, Architecture, Weight
from benchmark.cost.cell import Cell
from benchmark.cost.compute_times import ComputeTimes
from benchmark.cost.programs.program import Compute, Instruction, Kind, Start, Wait, Writer
from common.errors import InputError
from common.timeline.boxes import Phase

TOKEN = 8  # bytes
PICKLED = (8, 21)  # all_gather_object of one number: its length, then its bytes
# all_reduces of an activation, forward and backward, for a block that is cut into slices
SUMS: dict[str, tuple[int, int]] = {"tensor": (2, 4)}  # torch cuts q, k and v apart: each gives a gradient to sum
OUR_SUMS = (2, 2)
CHUNKS_A_STAGE = 4
SLICED = ("attn.c_attn.weight", "attn.c_attn.bias", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_fc.bias",
          "mlp.c_proj.weight")  # fmt: skip


def stage_of(block: int, stages: int, blocks: int) -> int:
    """Return the stage that has a block."""
    return block * stages // blocks


def on_stage(cell: Cell, model: Architecture, stage: int) -> list[Weight]:
    """Return the parameters of a stage, before they are sliced; the first and the last have the embedding matrix."""
    last = cell.grid.pipeline - 1
    weights = []
    for weight in model.weights:
        if weight.block is not None:
            there = {stage_of(weight.block, cell.grid.pipeline, model.n_blocks)}
        elif "wte" in weight.name:
            there = {0, last}
        else:
            there = {0} if "wpe" in weight.name else {last}
        if stage in there:
            weights.append(weight)
    return weights


def micro_batches(cell: Cell) -> int:
    """Return into how many micro-batches a replica's examples are cut: as many as divide them, up to four a stage."""
    if cell.grid.pipeline == 1:
        return 1
    total = cell.batch * cell.grid.pipeline * cell.grid.tensor
    return max(count for count in range(1, min(total, CHUNKS_A_STAGE * cell.grid.pipeline) + 1) if total % count == 0)


def one_forward_one_backward(stage: int, stages: int, count: int) -> list[tuple[str, int]]:
    """Return what a stage does, in order, as ("forward" or "backward", micro-batch): the schedule 1F1B."""
    ahead = min(stages - stage, count)
    order = [("forward", i) for i in range(ahead)]
    for i in range(count):
        order.append(("backward", i))
        if ahead + i < count:
            order.append(("forward", ahead + i))
    return order


def cuts_vocabulary(cell: Cell) -> bool:
    """Return whether each rank of a tensor axis has its own part of the embedding matrix, and so of the logits."""
    return cell.strategy == "megatron" and cell.grid.tensor > 1


def elements_of_rank(weight: Weight, cell: Cell) -> float:
    """Return the elements of a parameter on one rank of a tensor axis."""
    is_sliced = weight.name.endswith(SLICED) or ("wte" in weight.name and cuts_vocabulary(cell))
    return weight.elements / (cell.grid.tensor if is_sliced else 1)


def on_grid(times: ComputeTimes) -> list[Kind]:
    """One kind for each stage: its ranks differ in their part of the data or in their slices.

    Raises InputError for a model that cannot be cut so.
    """
    cell, model, grid = times.cell, times.architecture, times.cell.grid
    stages, slices = grid.pipeline, grid.tensor
    if model.kind != "gpt2":
        raise InputError(f"--strategy {cell.strategy} cuts GPT-2 into parts, got {cell.model}; use --model gpt2-tiny")
    if grid.ranks != cell.workers:
        raise InputError(f"--grid: {stages} x {grid.data} x {slices} ranks expected, got --workers {cell.workers}")
    if stages > model.n_blocks:
        raise InputError(
            f"--workers: {cell.model} has {model.n_blocks} blocks, expected at most as many stages, got {stages}"
        )
    if model.n_heads % slices:
        raise InputError(
            f"--workers: expected a number that divides the {model.n_heads} heads of {cell.model}, got {slices}"
        )
    count = micro_batches(cell)
    if count < stages:
        raise InputError(f"--batch_size: a pipeline of {stages} stages needs as many examples, got {count}")
    of_stage = grid.data * slices
    return [
        Kind(range(stage * of_stage, (stage + 1) * of_stage), tuple(StageProgram(times, stage, count).program()))
        for stage in range(stages)
    ]


class StageProgram:
    """Writes the program of one stage."""

    def __init__(self, times: ComputeTimes, stage: int, count: int) -> None:
        cell = times.cell
        self.cell, self.grid, self.stage, self.count = cell, cell.grid, stage, count
        self.last = self.grid.pipeline - 1
        self.examples = cell.batch * self.grid.pipeline * self.grid.tensor / count  # of a micro-batch
        self.writer = Writer(times, stage, self.examples)
        self.cuts_vocabulary = cuts_vocabulary(cell)
        # Megatron gets no last token, since it has no next one.
        self.tokens = self.examples * (cell.length - self.cuts_vocabulary)
        self.activation = self.tokens * times.architecture.width * BYTES
        self.kinds = tuple(range(self.grid.pipeline))

    def program(self) -> list[Instruction]:
        cell, grid, writer = self.cell, self.grid, self.writer
        self.together("tokens", "all_gather", cell.batch * cell.length * TOKEN, cell.workers, self.kinds)
        for direction, i in one_forward_one_backward(self.stage, grid.pipeline, self.count):
            self.micro_batch("forward" if direction == "forward" else "backward", i)
        if self.last and self.stage in (0, self.last):  # both have the matrix of embedding and head
            shared = max(weight.bytes for weight in writer.model.of_block(None))
            # Both send, as in an exchange; but each direction has a connection of its own, so neither waits.
            self.together("shared", "hop", shared, 2, (0, self.last))
            writer.copy("communication", shared)
        weights = on_stage(cell, writer.model, self.stage)
        sizes = [elements_of_rank(weight, cell) for weight in weights]
        elements = sum(sizes)
        if cell.strategy == "pipeline":
            self.together("loss", "broadcast", BYTES, grid.pipeline, self.kinds)
            for size in PICKLED:
                self.together(f"norm {size}", "all_gather", size, grid.pipeline, self.kinds)
        else:
            self.together("loss", "all_reduce", BYTES, grid.pipeline, self.kinds)
            if grid.data > 1:
                writer.copy("communication", BYTES * elements, passes=3)
                self.together("gradients", "all_reduce", BYTES * elements, grid.data, (self.stage,))
            self.together("norm of slices", "all_reduce", BYTES, grid.tensor, (self.stage,))
            self.together("norm of stages", "all_reduce", BYTES, grid.pipeline, self.kinds)
        writer.update(sizes)
        return writer.instructions

    def together(self, name: str, operation: str, size: float, workers: int, members: tuple[int, ...]) -> None:
        """An operation that is waited for; nothing if there is nobody to talk to."""
        if workers > 1:
            key = name if len(members) > 1 else f"{name} of stage {self.stage}"
            self.writer.instructions += [Start(key, operation, size, workers, members), Wait(key)]

    def micro_batch(self, direction: Phase, i: int) -> None:
        """Receive, compute, pass on."""
        stage, instructions = self.stage, self.writer.instructions
        before, after = (stage - 1, stage + 1) if direction == "forward" else (stage + 1, stage - 1)
        if 0 <= before <= self.last:
            instructions.append(Wait(f"{direction} {i} from {before}"))
        blocks, rest = self.seconds(direction)
        sums = SUMS.get(self.cell.strategy, OUR_SUMS)[direction == "backward"]
        # Where the vocabulary is cut, too: embeddings in forward, in backward the gradient of the head's input.
        pieces = len(blocks) * sums + self.cuts_vocabulary if self.grid.tensor > 1 else 1
        rest = rest / self.grid.tensor if self.cuts_vocabulary else rest
        for piece in range(pieces):
            seconds = (sum(blocks) / self.grid.tensor + rest) / pieces
            instructions.append(Compute(direction, seconds, micro_batch=i))
            if self.grid.tensor > 1:
                name = f"{direction} {i} {piece}"
                self.together(name, "all_reduce", self.activation, self.grid.tensor, (stage,))
        if self.cuts_vocabulary and direction == "forward":
            for number in ("largest logit", "target's logit", "sum of exponentials"):
                self.together(f"{number} {i}", "all_reduce", self.tokens * BYTES, self.grid.tensor, (stage,))
        if 0 <= after <= self.last:
            key = f"{direction} {i} from {stage}"
            instructions.append(Start(key, "hop", self.activation, 2, (stage,)))

    def seconds(self, direction: str) -> tuple[list[float], float]:
        """A micro-batch's seconds in each block of this stage, and in what is cut into no slices.

        The head's backward is counted with the first gradient that becomes ready, that of the last norm.
        """
        step, model, stages = self.writer.step, self.writer.model, self.grid.pipeline
        own_blocks = [i for i in range(model.n_blocks) if stage_of(i, stages, model.n_blocks) == self.stage]
        ends = [("before", 0), ("after", self.last)]
        if direction == "forward":
            rest = sum(step.forward[unit] for unit, stage in ends if stage == self.stage)
            return [step.forward[f"block {i}"] for i in own_blocks], rest
        block_of = {weight.name: weight.block for weight in model.weights}
        blocks, rest = dict.fromkeys(own_blocks, 0.0), (step.tail if self.stage == 0 else 0)
        for name, seconds in step.backward.items():
            block = block_of[name]
            if block is None:
                stage = 0 if "wte" in name or "wpe" in name else self.last
                rest += seconds if stage == self.stage else 0.0
            elif block in blocks:
                blocks[block] += seconds
        return list(blocks.values()), rest
