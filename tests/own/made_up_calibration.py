"""A calibration with round numbers: what a prediction makes of it can be worked out by hand."""

from benchmark.cost.architecture import Architecture, describe
from benchmark.cost.calibration import (
    Calibration,
    Profile,
    SmallCosts,
    TransferTimes,
    these_versions,
    this_machine,
)
from benchmark.cost.collective_times import hops, moved

SIZES = [4, 2**16, 2**20, 2**24]
CORES = 2


def ready_order(architecture: Architecture) -> list[str]:
    """The parameters from the last to the first, as backward completes them; the embeddings come at the end."""
    root = [weight.name for weight in architecture.of_block(None)]
    norms = [name for name in root if "norm" in name or "ln_f" in name]
    blocks = [weight.name for i in range(architecture.n_blocks) for weight in architecture.of_block(i)]
    return [*norms[::-1], *blocks[::-1], *[name for name in root if name not in norms][::-1]]


def made_up_profile(model: str, length: int, batch: int, workers: int) -> Profile:
    """10 ms for each example forward, 20 ms backward, 8 ms for the optimizer; with 4 workers twice as long."""
    architecture = describe(model, length)
    crowd = max(1, workers / CORES)
    order = ready_order(architecture)
    forward = {unit: crowd * 0.010 * batch / len(architecture.flops) for unit in architecture.flops}
    backward = {name: crowd * 0.020 * batch / len(order) for name in order}
    threads = max(1, CORES // workers)
    return Profile(model, length, batch, workers, threads, forward, backward, 0.0, crowd * 0.008, 0.0)


def made_up_transfers(link: str, workers: int, latency: float, bytes_per_second: float, cores: float = 0.0) -> list:
    """Tables that are latency and bandwidth; `cores` is what a transfer takes from a worker's computing."""
    tables = []
    for operation in ("all_reduce", "all_gather", "all_to_all", "exchange", "hop"):
        if operation == "hop" and workers > 2:
            continue
        started = latency * hops(operation, workers)
        seconds = [started + moved(operation, size, workers) / bytes_per_second for size in SIZES]
        tables.append(TransferTimes(link, operation, workers, SIZES, seconds, [cores * s for s in seconds]))
    return tables


def made_up_calibration(model: str = "gpt2-tiny", length: int = 64) -> Calibration:
    """1, 2 and 4 workers; loopback with 1 GB/s and links of 100 Mbit/s and 1 Gbit/s with 0.1 ms for each hop."""
    workers = (1, 2, 4)
    profiles = [made_up_profile(model, length, batch, count) for count in workers for batch in (1, 4)]
    small = [SmallCosts(count, 0.0, {1: 1e-9, 10**6: 1e-3}, {128: 1e-11}, 4e8) for count in workers]
    transfers = []
    for count in workers[1:]:
        transfers += made_up_transfers("loopback", count, 5e-5, 1e9, cores=0.5)
        transfers += made_up_transfers("100mbit", count, 1e-4, 12e6)
        transfers += made_up_transfers("1gbit", count, 1e-4, 120e6)
    machine = this_machine() | {"cores": CORES}
    return Calibration(machine, these_versions(), "2026-01-01", 0.0, 8 * 10**9, profiles, small, transfers)
