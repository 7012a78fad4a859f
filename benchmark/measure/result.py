"""The figures of a run: what one worker measured as a dict, and as a table for people."""

from typing import Any

import torch

from benchmark.measure.intervals import interval, interval_text
from benchmark.measure.machine import machine_line
from benchmark.settings import Settings
from benchmark.strategies import STRATEGIES


def assemble(settings: Settings, begin: dict, shapes: list[torch.Size], measured: dict, log: Any) -> dict[str, Any]:
    """All figures of this worker; seconds in ms, bytes in bytes, None for what could not be measured.

    begin: the machine as it was before.
    """
    plan, steps = measured["plan"], measured["steps"]
    parameters = sum(shape.numel() for shape in shapes)
    result: dict[str, Any] = {
        "strategy": settings.strategy,
        "model": settings.model,
        "parameters": parameters,
        "world_size": settings.world_size,
        "batch_size": settings.batch_size,
        "accumulation": settings.accumulation,
        "length": settings.length,
        "precision": settings.precision,
        "steps": {"dropped": plan.dropped, "timed": plan.timed, "traced": plan.traced},
        "losses": log.agree(),
        "norms": [None if norm is None else float(norm) for norm in measured["norms"]],
        "evaluations": log.evaluations,
        "first_loss": log.means[0] if log.means else None,
        "last_loss": log.means[-1] if log.means else None,
        "environment": begin,
        "settings": settings.as_json(),
        "steps_ms": [step["wall"] * 1e3 for step in steps],
    }
    if steps:
        median, low, high = interval([step["wall"] * 1e3 for step in steps])
        wall = sum(step["wall"] for step in steps)
        result |= {
            "step_ms": median,
            "step_ms_95": [low, high],
            "wall_s": wall,
            "phases_ms": phases(steps, measured["trace"]),
            "samples_per_second": settings.examples_per_step * len(steps) / wall,
            "tokens_per_second": settings.examples_per_step * settings.length * len(steps) / wall,
            "utilisation": measured["utilisation"],
        }
    trace = measured["trace"] or {}
    result["last_norm"] = result["norms"][-1] if result["norms"] else None
    result["communication"] = {
        "total_ms": trace.get("communication_ms"),
        "exposed_ms": trace.get("exposed_ms"),
        **{f"sent_{k}": v for k, v in (measured["payload"] or {"bytes": None, "calls": None}).items()},
    }
    result["memory"] = memory(settings, shapes, measured)
    return result


def phases(steps: list[dict], trace: dict | None) -> dict[str, float | None]:
    """Mean ms per step; what the trace saw as exposed communication is taken out of the phase it was in."""
    means = {name: sum(step[name] for step in steps) / len(steps) * 1e3 for name in steps[0] if name != "wall"}
    traced_shares = (trace or {}).get("exposed_shares")
    shares = traced_shares or {}
    communication = {name: means[name] * shares.get(name, 0.0) for name in means}
    phases_ms: dict[str, float | None] = {name: means[name] - communication[name] for name in means}
    phases_ms["communication"] = sum(communication.values()) if traced_shares is not None else None
    phases_ms["wall"] = sum(means.values())
    return phases_ms


def memory(settings: Settings, shapes: list[torch.Size], measured: dict) -> dict[str, Any]:
    """What stays, in three versions; what a step needs at its peak, and the process in that time."""
    count, row = sum(shape.numel() for shape in shapes), STRATEGIES[settings.strategy]
    return {
        "persistent_ideal": row.ideal_bytes(count, settings.world_size),
        "persistent_documented": row.documented_bytes(shapes, settings.world_size),
        "persistent_counted": measured["persistent"],
        "peak": measured["memory"].bytes,
        "process_peak": measured["memory"].process_bytes,
        "device_reserved": measured["reserved"],
    }


def table(result: dict[str, Any]) -> str:
    """For people."""
    rows: list[tuple[str, str]] = [
        ("model", f"{result['model']}, {result['parameters']:,} parameters, {result['precision']}"),
        ("examples", f"{result['batch_size']} x {result['accumulation']} on each of {result['world_size']} workers"),
        ("steps", ", ".join(f"{count} {name}" for name, count in result["steps"].items())),
        ("loss", f"{result['first_loss']} -> {result['last_loss']}"),
    ]
    if result["last_norm"] is not None:
        rows.append(("gradient norm", f"{result['last_norm']:.4f} in the last step, before clipping"))
    for evaluation in result["evaluations"]:
        words = ", ".join(f"{name} {value:.4f}" for name, value in evaluation.items() if name != "step")
        rows.append((f"validation after {evaluation['step']}", words))
    if "bleu" in result:
        rows.append(("BLEU", f"{result['bleu']:.2f}"))
    if "step_ms" in result:
        rows.append(("step, ms", f"{interval_text((result['step_ms'], *result['step_ms_95']), 1)} (median, 95 %)"))
        for name, value in result["phases_ms"].items():
            rows.append((f"  {name}", "not measured" if value is None else f"{value:9.2f} ms"))
        rows.append(
            ("throughput", f"{result['samples_per_second']:.1f} examples/s, {result['tokens_per_second']:.0f} tokens/s")
        )
        used = result["utilisation"]
        rows.append(("CPU utilisation", f"{used['cpu_utilisation']:.2f} cores"))
        if result["environment"]["gpu"] is not None:
            percent = used["gpu_utilisation"]
            rows.append(("GPU utilisation", "not measured" if percent is None else f"{percent:.0f} %"))
    communication, memory = result["communication"], result["memory"]
    if communication["total_ms"] is not None:
        rows.append(
            (
                "in traced steps",
                f"communication {communication['total_ms']:.2f} ms, exposed {communication['exposed_ms']:.2f}",
            )
        )
    if communication["sent_bytes"] is not None:
        rows.append(
            ("sent per step", f"{communication['sent_bytes'] / 1e6:.3f} MB in {communication['sent_calls']:.0f} calls")
        )
    for name, value in memory.items():
        rows.append((name.replace("_", " "), "not measured" if value is None else f"{value / 1e6:.2f} MB"))
    lines = [f"\n{result['strategy']}", *(f"  {name:<22} {value}" for name, value in rows)]
    return "\n".join([*lines, machine_line(result["environment"])])
