"""A run's record: made of what one worker measured, and as a table for people."""

from dataclasses import asdict
from typing import TYPE_CHECKING

import torch

from benchmark.measure.intervals import interval, interval_text
from benchmark.measure.machine import machine_line
from benchmark.measure.output import MB, Json, cell
from benchmark.measure.record import Communication, Memory, RunRecord, Steps
from benchmark.settings import Settings
from benchmark.strategies import STRATEGIES

if TYPE_CHECKING:
    from benchmark.training.log import Log
    from benchmark.training.loop import Measured


def assemble(settings: Settings, begin: Json, shapes: list[torch.Size], measured: "Measured", log: "Log") -> RunRecord:
    """Return this worker's record. begin: the machine as it was before. shapes: of all parameters. A collective."""
    plan, memory = measured.plan, measured.memory
    steps_ms = [step["wall"] * 1e3 for step in measured.steps]
    count, row = sum(shape.numel() for shape in shapes), STRATEGIES[settings.strategy]
    return RunRecord(
        strategy=settings.strategy,
        model=settings.model,
        parameters=count,
        world_size=settings.world_size,
        batch_size=settings.batch_size,
        accumulation=settings.accumulation,
        length=settings.length,
        precision=settings.precision,
        steps=Steps(plan.dropped, plan.timed, plan.traced),
        steps_ms=steps_ms,
        step_ms_95=list(interval(steps_ms)[1:]) if steps_ms else [None, None],
        phases_ms=phases(measured.steps) if steps_ms else {},
        losses=log.agree(),
        norms=[None if norm is None else float(norm) for norm in measured.norms],
        evaluations=log.evaluations,
        communication=Communication(*measured.traced, *measured.sent),
        memory=Memory(
            persistent_ideal=row.ideal_bytes(count, settings.world_size),
            persistent_counted=measured.persistent,
            peak=memory.bytes,
            process_peak=memory.process_bytes,
            device_reserved=measured.reserved,
        ),
        utilisation=measured.utilisation,
        environment=begin,
        settings=settings.as_json(),
    )


def phases(steps: list[dict[str, float]]) -> dict[str, float]:
    """Return the mean ms of each phase; what is sent in one is a part of it."""
    means = {name: sum(step[name] for step in steps) / len(steps) * 1e3 for name in steps[0]}
    return means | {"wall": means.pop("wall")}  # last, as the sum


def table(record: RunRecord) -> str:
    """For people: a figure in each line."""
    rows = {
        "model": f"{record.model}, {record.parameters:,} parameters, {record.precision}",
        "examples": f"{record.batch_size} x {record.accumulation} on each of {record.world_size} workers",
        "steps": ", ".join(f"{count} {name}" for name, count in asdict(record.steps).items()),
    }
    if record.losses:
        rows["loss"] = f"{record.losses[0]} -> {record.losses[-1]}"
    if record.norms and record.norms[-1] is not None:
        rows["gradient norm"] = f"{record.norms[-1]:.4f} in the last step, before clipping"
    for evaluation in record.evaluations:
        words = ", ".join(f"{name} {value:.4f}" for name, value in evaluation.items() if name != "step")
        rows[f"validation after {evaluation['step']}"] = words
    if record.bleu is not None:
        rows["BLEU"] = f"{record.bleu:.2f}"
    if record.step_ms is not None:
        rows["step, ms"] = f"{interval_text(record.step_ms, *record.step_ms_95, digits=1)} (median, 95 %)"
        rows |= {f"  {name}": f"{cell(value):>9} ms" for name, value in record.phases_ms.items()}
        tokens = "" if record.tokens_per_second is None else f", {record.tokens_per_second:.0f} tokens/s"
        rows["throughput"] = f"{record.samples_per_second:.1f} examples/s{tokens}"
    if record.utilisation:
        rows["CPU utilisation"] = f"{record.utilisation.cpu_utilisation:.2f} cores"
    if record.utilisation and record.environment["gpu"]:
        gpu = record.utilisation
        rows["GPU"] = f"{cell(gpu.gpu_utilisation)} %, {cell(gpu.gpu_power)} W, {cell(gpu.gpu_temperature)} degrees C"
    sent = record.communication
    if sent.total_ms is not None:
        rows["in traced steps"] = f"communication {sent.total_ms:.2f} ms, exposed {cell(sent.exposed_ms)}"
    if sent.sent_bytes is not None:
        rows["sent per step"] = f"{sent.sent_bytes / MB:.3f} MB in {sent.sent_calls:.0f} calls"
    rows |= {f"{name.replace('_', ' ')}": f"{cell(size, 2, MB):>9} MB" for name, size in asdict(record.memory).items()}
    lines = [f"\n{record.strategy}", *(f"  {name:<22} {value}" for name, value in rows.items())]
    return "\n".join([*lines, machine_line(record.environment)])
