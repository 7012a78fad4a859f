"""Strategies that cut the model: into stages, through which micro-batches travel, and each matrix into slices."""

from benchmark.cost.architecture import BYTES, Architecture, Weight
from benchmark.cost.cell import Cell
from benchmark.cost.compute_times import ADDED, ComputeTimes
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


def one_forward_one_backward(stage: int, stages: int, count: int) -> list[tuple[Phase, int]]:
    """Return what a stage does, in order, as ("forward" or "backward", micro-batch): the schedule 1F1B."""
    ahead = min(stages - stage, count)
    order: list[tuple[Phase, int]] = [("forward", i) for i in range(ahead)]
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
        self.sizes = [elements_of_rank(weight, cell) for weight in on_stage(cell, times.architecture, stage)]
        self.elements = sum(self.sizes)

    def program(self) -> list[Instruction]:
        cell, grid, writer = self.cell, self.grid, self.writer
        self.together("tokens", "all_gather", cell.batch * cell.length * TOKEN, cell.workers, self.kinds)
        self.micro_batches()
        if self.last and self.stage in (0, self.last):  # both have the matrix of embedding and head
            shared = max(weight.bytes for weight in writer.model.of_block(None))
            for sender in (self.stage, self.last - self.stage):
                self.message("shared", sender, self.last - sender, shared)
            for sender in (0, self.last):
                writer.instructions.append(Wait(f"shared from {sender}"))
            writer.copy("communication", shared)
        if cell.strategy == "pipeline":
            self.together("loss", "broadcast", BYTES, grid.pipeline, self.kinds)
            for size in PICKLED:
                self.together(f"norm {size}", "all_gather", size, grid.pipeline, self.kinds)
        else:
            self.together("loss", "all_reduce", BYTES, grid.pipeline, self.kinds)
            if grid.data > 1:
                writer.copy("communication", BYTES * self.elements, passes=3)
                self.together("gradients", "all_reduce", BYTES * self.elements, grid.data, (self.stage,))
            self.together("norm of slices", "all_reduce", BYTES, grid.tensor, (self.stage,))
            self.together("norm of stages", "all_reduce", BYTES, grid.pipeline, self.kinds)
        writer.update(self.sizes)
        return writer.instructions

    def together(self, name: str, operation: str, size: float, workers: int, members: tuple[int, ...]) -> None:
        """An operation that is waited for; nothing if there is nobody to talk to."""
        if workers > 1:
            key = name if len(members) > 1 else f"{name} of stage {self.stage}"
            self.writer.instructions += [Start(key, operation, size, workers, members), Wait(key)]

    def micro_batches(self) -> None:
        """Receive, compute, pass on.

        Our stages ask for the next message before they wait for the current one, torch's after they have computed.
        """
        order = one_forward_one_backward(self.stage, self.grid.pipeline, self.count)
        begun, asked = set[int](), set[tuple[Phase, int]]()
        for action, following in zip(order, [*order[1:], None], strict=True):
            direction, i = action
            source = self.neighbour(action, -1)
            if source is not None and action not in asked:
                self.message(f"{direction} {i}", source, self.stage, self.activation)
            if following is not None and self.cell.strategy != "pipeline":
                ahead, number = following
                next_source = self.neighbour(following, -1)
                if next_source is not None and (ahead == "forward" or number in begun):
                    self.message(f"{ahead} {number}", next_source, self.stage, self.activation)
                    asked.add(following)
            if source is not None:
                self.writer.instructions.append(Wait(f"{direction} {i} from {source}"))
            self.micro_batch(direction, i)
            begun.add(i)
            target = self.neighbour(action, 1)
            if target is not None:
                self.message(f"{direction} {i}", self.stage, target, self.activation)

    def neighbour(self, action: tuple[Phase, int], step: int) -> int | None:
        """Return the stage before this one on an action's way (step -1), or after it (1)."""
        stage = self.stage + (step if action[0] == "forward" else -step)
        return stage if 0 <= stage <= self.last else None

    def message(self, name: str, sender: int, receiver: int, size: float) -> None:
        """Send, or say that this stage is ready to receive. Our stages have a connection for each direction."""
        ends = sorted((sender, receiver)) if self.cell.strategy == "pipeline" else (sender, receiver)
        start = Start(f"{name} from {sender}", "hop", size, 2, (sender, receiver), connection=str(tuple(ends)))
        self.writer.instructions.append(start)

    def micro_batch(self, direction: Phase, i: int) -> None:
        """Compute, and exchange what the slices of this stage need from one another."""
        stage, instructions = self.stage, self.writer.instructions
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
        if direction == "backward" and i > 0:
            added = self.writer.times.copies(BYTES * self.elements, passes=ADDED)
            instructions.append(Compute("backward", added, micro_batch=i))
        if self.cuts_vocabulary and direction == "forward":
            for number in ("largest logit", "target's logit", "sum of exponentials"):
                self.together(f"{number} {i}", "all_reduce", self.tokens * BYTES, self.grid.tensor, (stage,))

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
