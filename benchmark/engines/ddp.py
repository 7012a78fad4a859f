"""DistributedDataParallel behind the benchmark's Engine."""

import contextlib

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmark.engines.engine import Engine
from common.errors import InputError

UNUSED = "some parameters get no gradient in a step; add --find_unused_parameters"


class DDP(Engine):
    """Each worker holds all; gradients are summed by all_reduce, bucket by bucket, while backward goes on."""

    model: DistributedDataParallel

    def wrap(self, model: nn.Module) -> DistributedDataParallel:
        device_ids = [self.worker.device.index] if self.worker.device.type == "cuda" else None
        # The gradients lie in the buckets: without this DDP keeps them twice.
        find = self.settings.find_unused_parameters
        return DistributedDataParallel(
            model, device_ids=device_ids, gradient_as_bucket_view=True, find_unused_parameters=find
        )

    micro_batches = 0

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        # DDP decides in forward whether the backward will communicate: with a step's last micro-batch only.
        self.micro_batches += 1
        last = self.micro_batches % self.settings.accumulation == 0
        with contextlib.nullcontext() if last else self.model.no_sync():
            try:
                return super().forward(batch)
            except RuntimeError as error:
                if "find_unused_parameters" not in str(error):
                    raise
                raise InputError(f"--strategies {self.settings.strategy}: {UNUSED}") from error

    def validated(self) -> nn.Module:
        return self.bare  # nothing to exchange
