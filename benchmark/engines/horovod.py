"""Horovod (Sergeev and Del Balso 2018) behind the benchmark's Engine, built with gloo and without MPI.

Its background thread sums gradients during backward: every millisecond, those that are ready on all workers are copied
into one message. It has a process group of its own. horovodrun would start the workers; here the first worker serves
the addresses by which they find one another.
"""

import os
from types import ModuleType
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.profiler import record_function

from benchmark.engines.engine import Engine
from benchmark.settings import Settings
from common.workers.process_group import Worker


def join(settings: Settings, worker: Worker) -> ModuleType:
    """Return horovod.torch; all workers have joined its process group. A collective, the first time."""
    import horovod.torch as hvd
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.http.http_server import RendezvousServer

    if hvd.is_initialized():
        return hvd
    port = [0]
    if worker.is_first:
        server = RendezvousServer()
        port = [server.start()]
        hosts = ",".join(f"worker{rank}:1" for rank in range(worker.world_size))
        server.init(get_host_assignments(parse_hosts(hosts), worker.world_size))
    dist.broadcast_object_list(port)
    place = {"RANK": worker.rank, "LOCAL_RANK": 0, "CROSS_RANK": worker.rank}
    sizes = {"SIZE": worker.world_size, "LOCAL_SIZE": 1, "CROSS_SIZE": worker.world_size}
    gloo = {"RENDEZVOUS_ADDR": settings.master_ip, "RENDEZVOUS_PORT": port[0]}
    if interface := os.environ.get("GLOO_SOCKET_IFNAME"):
        gloo["IFACE"] = interface
    libraries = {"HOSTNAME": f"worker{worker.rank}", "CONTROLLER": "gloo", "CPU_OPERATIONS": "gloo"}
    words: dict[str, object] = {**place, **sizes, **libraries}
    words |= {f"GLOO_{name}": value for name, value in gloo.items()}
    os.environ.update({f"HOROVOD_{name}": str(value) for name, value in words.items()})
    hvd.init()
    return hvd


class Horovod(Engine):
    """Each worker holds all; DistributedOptimizer averages the gradients."""

    optimizer: Any  # Horovod's own, which has no types

    def wrap(self, model: nn.Module) -> nn.Module:
        self.hvd = join(self.settings, self.worker)
        return model

    def make_optimizer(self) -> Optimizer:
        return self.hvd.DistributedOptimizer(
            super().make_optimizer(),
            named_parameters=self.bare.named_parameters(),
            backward_passes_per_step=self.settings.accumulation,
        )

    def step(self, rate: float) -> None:
        with record_function("gloo:horovod"):  # the profiler sees none of its messages, but that they are waited for
            self.optimizer.synchronize()  # before clipping: the norm is that of the mean
        with self.optimizer.skip_synchronize():
            super().step(rate)

    def unrecorded_bytes(self) -> float:
        return self.ring_bytes()  # the flight recorder sees nothing of Horovod's
