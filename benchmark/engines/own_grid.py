"""The bonus lessons on tensor parallelism, 1F1B and grids as strategies: beyond/on_grid.py behind the Engine.

own_tensor has all workers on the tensor axis, own_1f1b on the pipeline axis, own_grid on the axes that --grid names.
Forward and backward are interleaved by the schedule, so both count as backward. They compute in fp32.
"""

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import GPT2Config, GPT2LMHeadModel

from benchmark.engines.engine import Engine, micro_batches, optimizer_class, validation_sums
from benchmark.settings import Settings
from benchmark.strategies import STRATEGIES
from beyond.on_grid import OnGrid
from beyond.tensor_parallel import ColumnParallel, RowParallel, attention_columns, own_part
from common.arguments import check_cut, parse_grid
from common.evaluation import text_metrics
from common.workers.process_group import Worker


class OwnGrid(Engine):
    """Each worker has one cell of the grid: some blocks, a slice of their matrices, a part of the batch."""

    cuts_model = True
    grid: OnGrid

    def __init__(self, settings: Settings, worker: Worker, model: GPT2LMHeadModel) -> None:
        self.config: GPT2Config = model.config
        cuts = STRATEGIES[settings.strategy].cuts
        strategy = "1f1b" if cuts == "pipeline" else cuts
        self.sizes = parse_grid(strategy, settings.grid if cuts == "grid" else None, settings.world_size)
        check_cut(model.config.n_layer, model.config.n_head, self.sizes)
        super().__init__(settings, worker, model)

    def wrap(self, model: nn.Module) -> nn.Module:
        assert isinstance(model, GPT2LMHeadModel)
        settings, grid = self.settings, self.sizes
        # The workers of a replica compute the examples of all of them together.
        examples = settings.batch_size * grid.pipeline * grid.tensor
        chunks = micro_batches(examples, grid.pipeline) if grid.pipeline > 1 else 1
        model.transformer.wte.to(self.worker.device)  # where a model's first parameter is, OnGrid draws dropout masks
        self.grid = OnGrid(model, grid, optimizer_class(settings), settings.weight_decay, "1f1b", chunks)
        return self.grid.model.to(self.worker.device)

    def make_optimizer(self) -> Optimizer:
        return self.grid.optimizer

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """The examples of this worker's replica (B * workers of a replica, T)."""
        tokens = self.of_all_workers(batch["input_ids"])
        return tokens.chunk(dist.get_world_size(self.grid.data))[dist.get_rank(self.grid.data)]

    def backward(self, loss: Tensor, last: bool) -> Tensor:
        value = self.grid.forward_backward(loss)  # loss: the tokens that forward returned
        if last:
            self.divide_by_accumulation(self.bare.parameters())
            self.grid.finish()
        return value

    def clip(self, norm: float) -> Tensor:
        return self.grid.clip(norm)

    def validate(self, batches: Iterable[dict[str, Tensor]], kind: str) -> dict[str, float]:
        sums = torch.zeros(3, dtype=torch.float64, device=self.worker.device)
        with self.grid.evaluating():
            for batch in self.worker.batches(batches):
                logits = self.grid.runner.only_forward(batch["input_ids"])
                if logits is not None:
                    values = validation_sums(logits, batch, kind)
                    sums += torch.tensor(values, dtype=sums.dtype, device=sums.device)
        dist.all_reduce(sums, group=self.grid.pipeline)
        total, right, tokens = sums.tolist()
        return text_metrics(total, int(right), int(tokens))

    def full_parameters(self) -> dict[str, Tensor]:
        """Each worker sends its cell to the first, which puts slices and stages together."""
        first = self.worker.is_first
        places = self.places()
        own_cell = [(name, p.detach().cpu(), places.get(id(p))) for name, p in self.names()]
        cells = [own_cell] * self.worker.world_size if first else []
        dist.gather_object(own_cell, cells if first else None)
        if not first:
            return {}
        with torch.device("meta"):
            shapes = {name: p.shape for name, p in GPT2LMHeadModel(self.config).named_parameters()}
        whole = {name: torch.empty(shape) for name, shape in shapes.items()}
        for name, value, place in (entry for cell in cells for entry in cell):
            if place is None:
                whole[name].copy_(value)
            else:
                whole[name].index_copy_(place[0], place[1], value)
        return whole

    def copies(self, full: dict[str, Tensor]) -> Iterator[tuple[str, Tensor, Tensor]]:
        places = self.places()
        for name, p in self.names():
            place, whole = places.get(id(p)), full[name]
            yield name, p.detach().cpu(), whole if place is None else whole.index_select(*place)

    def names(self) -> Iterable[tuple[str, nn.Parameter]]:
        """This worker's parameters by the names of the whole model."""
        stage = self.grid.model
        for name, parameter in stage.named_parameters():
            kind, _, rest = name.partition(".")
            if kind == "blocks":
                number, _, rest = rest.partition(".")
                yield f"transformer.h.{stage.first_block + int(number)}.{rest}", parameter
            elif kind == "head":
                yield f"transformer.wte.{rest}", parameter
            else:
                yield f"transformer.{name}", parameter

    def places(self) -> dict[int, tuple[int, Tensor]]:
        """Of each parameter that is cut, by its id, the place of this slice in the whole: dimension and indices."""
        places: dict[int, tuple[int, Tensor]] = {}
        group, width = self.grid.tensor, self.config.n_embd
        heads = own_part(self.config.n_head, group)
        columns = attention_columns(width, heads, width // self.config.n_head)
        hidden = own_part(self.config.n_inner or 4 * width, group)
        for block in self.grid.model.blocks:
            layers = ((block.attn, "c_attn", columns), (block.attn, "c_proj", columns[: len(columns) // 3]))
            for part, name, indices in (*layers, (block.mlp, "c_fc", hidden), (block.mlp, "c_proj", hidden)):
                layer = getattr(part, name)
                if isinstance(layer, ColumnParallel):
                    places[id(layer.weight)], places[id(layer.bias)] = (1, indices), (0, indices)
                elif isinstance(layer, RowParallel):
                    places[id(layer.weight)] = (0, indices)
        return places

    def unrecorded_bytes(self) -> float:
        """gloo's point to point: activations and their gradients between stages, the shared matrix's gradient."""
        settings, stages = self.settings, self.sizes.pipeline
        if stages == 1:
            return 0.0
        tokens = settings.batch_size * self.worker.world_size // self.sizes.data * settings.length
        boundaries = 2 * 4 * tokens * self.config.n_embd * (stages - 1) * settings.accumulation
        shared = 2 * 4 * self.config.vocab_size * self.config.n_embd
        return (boundaries + shared) / stages  # each pipeline sends as much

    def group_sizes(self) -> dict[str, int]:
        groups = (self.grid.data, self.grid.tensor, self.grid.pipeline)
        return {group.group_name: dist.get_world_size(group) for group in groups}
