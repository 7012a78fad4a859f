"""Check sentences of the READMEs about communication by measuring what they say.

    python -m benchmark.checks.claims [--only buckets,late] [--quick]

buckets    DDP sends one bucket in the first iteration; later, a bucket closes once it has reached its size
no_sync    with backward alone inside no_sync(), DDP sends the gradients
buffers    DDP broadcasts its buffers before the first forward that follows a backward, and not before each forward
unused     a parameter without a gradient stops DDP in the next forward
order      calls in different orders: wrong numbers if the sizes are equal, a crash if they are not
late       no rank finishes a gather before the last one has called it, but data travels earlier
burst      an emulated link lets a short message through faster than its rate
frames     bytes over payload: below half a percent at 1 Gbit/s, about 5 % at 250 Mbit/s
units      an all_reduce sends two units, an all_gather and an all_to_all one, Gloo's reduce_scatter two
beside     computing takes longer beside a collective
fp16       dividing by the number of workers before sending makes more fp16 gradients subnormal

Claims about an interface need emulated nodes, and are skipped with the reason where there are none. --quick leaves out
those that measure seconds (burst, beside). The last line of stdout is one JSON object; exit code 0 if all others hold.
"""

import common.workers.environment  # isort: skip  # noqa: F401 (stops with a message if torch is missing)

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cluster.emulate import bits_per_second, why_not
from cluster.launch import free_port
from common.errors import InputError, exit_on_input_error
from common.flags import burst_bytes
from common.paths import ROOT
from task4_traffic.expected import example_model

MIB = 2**20
Results = list[dict[str, Any]]
Verdict = tuple[bool, str]


def on_ranks(claim: str, workers: int, rate: str | None = None, may_fail: bool = False) -> tuple[Results, list[int]]:
    """Run a claim on loopback (rate None) or on emulated nodes; return the results, and each rank's exit code."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["benchmark/checks/claims_rank.py", claim, folder, "--world_size", str(workers)]
        if rate is None:
            place = ["--master_port", str(free_port())]
            ranks = [[sys.executable, *words, *place, "--local_rank", str(rank)] for rank in range(workers)]
        else:
            place = ["--master_ip", "10.10.1.1", "--master_port", "6585", "--local_rank", "{rank}"]
            emulate = [sys.executable, "-m", "cluster.emulate", "--nodes", str(workers), "--rate", rate, "--"]
            ranks = [[*emulate, "python", *words, *place]]
        output = Path(folder) / "output"
        with output.open("w") as log:
            started = [subprocess.Popen(rank, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT) for rank in ranks]
            codes = [one.wait() for one in started]
        if any(codes) and not may_fail:
            raise InputError(f"{claim} failed: {output.read_text()[-1500:]}")
        found = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("result_*.json"))]
        return found, codes


def buckets() -> Verdict:
    (found, *_), _ = on_ranks("buckets", 2)
    first, later = ([size / MIB for size in found[key]] for key in ("first", "later"))
    shown = f"first iteration {[round(size, 1) for size in first]} MiB, later {[round(size, 1) for size in later]}"
    return len(first) == 1 and later[0] > 1 and max(later[1:]) > 25 and len(later) > 2, shown


def no_sync() -> Verdict:
    (found, *_), _ = on_ranks("no_sync", 2)
    return found["backward_alone"] > 0 == found["both"], f"buckets sent: {found}"


def buffers() -> Verdict:
    (found, *_), _ = on_ranks("buffers", 2)
    return found["evaluation"] == 1 and found["steps"] == [0, 1], f"broadcasts: {found}"


def unused() -> Verdict:
    (found, *_), _ = on_ranks("unused", 2)
    return found == {"step": 1, "where": "forward"}, f"error: {found}"


def order() -> Verdict:
    equal, _ = on_ranks("order_equal", 2)
    _, codes = on_ranks("order_unequal", 2, may_fail=True)
    wrong = all(result == {"ones": 11.0, "tens": 11.0} for result in equal)
    return wrong and any(codes), f"equal sizes: {equal[0]} for 2 and 20; different sizes: exit codes {codes}"


def late() -> Verdict:
    found, _ = on_ranks("late", 4, "1gbit")
    early = [result["early"] / 1e6 for result in found]
    shown = "MB sent before the last rank's call: " + ", ".join(f"{size:.1f}" for size in early)
    return min(early[1], early[2]) > 0.5 * found[0]["bytes"] / 1e6 > early[3], shown


def burst() -> Verdict:
    (_, found), _ = on_ranks("burst", 2, "100mbit")
    rate = bits_per_second("100mbit") / 8
    plain, least = found["bytes"] / rate, (found["bytes"] - burst_bytes(8 * rate)) / rate
    shown = f"{found['seconds'] * 1e3:.1f} ms; {plain * 1e3:.1f} by the rate, {least * 1e3:.1f} with the burst"
    return least <= found["seconds"] < plain, shown


def frames() -> Verdict:
    shares = {rate: on_ranks("frames", 2, rate)[0][0]["all_reduce"] / 2 for rate in ("1gbit", "300mbit", "250mbit")}
    holds = shares["1gbit"] < 1.005 and shares["300mbit"] < 1.005 and 1.04 < shares["250mbit"] < 1.06
    return holds, "bytes over payload: " + ", ".join(f"{rate} {share:.3f}" for rate, share in shares.items())


def units() -> Verdict:
    expected = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 2, "all_to_all": 1}
    found = on_ranks("frames", 4, "1gbit")[0][0]
    shown = ", ".join(f"{name} {found[name]:.2f}" for name in expected)
    return all(abs(found[name] / units - 1) < 0.02 for name, units in expected.items()), f"units: {shown}"


def beside() -> Verdict:
    found, _ = on_ranks("beside", 2, "1gbit")
    ratios = [result["ratio"] for result in found]
    holds = sum(ratios) > len(ratios) and all(result["under_way"] for result in found)
    return holds, "computing takes " + " and ".join(f"{ratio:.2f}" for ratio in ratios) + " times as long"


def fp16() -> Verdict:
    """Of the tiny BERT's gradients that are not zero, the share below fp16's smallest normal number."""
    torch.manual_seed(0)
    model = example_model("tiny")
    gradients = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).abs()
    gradients = gradients[gradients > 0]
    least = torch.finfo(torch.float16).smallest_normal
    before, after = ((gradients / divisor < least).float().mean().item() for divisor in (1, 4))
    return after > before, f"subnormal or zero in fp16: {before:.0%}, divided by 4 {after:.0%}"


@dataclass(frozen=True)
class Claim:
    check: Callable[[], Verdict]
    needs_nodes: bool = False
    measures_seconds: bool = False


CLAIMS = {
    "buckets": Claim(buckets),
    "no_sync": Claim(no_sync),
    "buffers": Claim(buffers),
    "unused": Claim(unused),
    "order": Claim(order),
    "late": Claim(late, needs_nodes=True),
    "burst": Claim(burst, needs_nodes=True, measures_seconds=True),
    "frames": Claim(frames, needs_nodes=True),
    "units": Claim(units, needs_nodes=True),
    "beside": Claim(beside, needs_nodes=True, measures_seconds=True),
    "fp16": Claim(fp16),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(CLAIMS), help="claims, separated by commas (all)")
    parser.add_argument("--quick", action="store_true", help="leave out the claims that measure seconds")
    arguments = parser.parse_args()
    names = arguments.only.split(",")
    if unknown := set(names) - set(CLAIMS):
        raise InputError(f"--only: expected some of {', '.join(CLAIMS)}; got {min(unknown)!r}")
    no_nodes, found = why_not(), {}
    for name in names:
        claim = CLAIMS[name]
        if claim.needs_nodes and no_nodes:
            holds, shown = True, f"skipped: {no_nodes}"
        elif claim.measures_seconds and arguments.quick:
            holds, shown = True, "skipped: --quick"
        else:
            holds, shown = claim.check()
        found[name] = {"holds": holds, "measured": shown}
        print(f"{name:<10} {'holds' if holds else 'FAILS':<6} {shown}", flush=True)
    print(json.dumps(found))
    sys.exit(0 if all(row["holds"] for row in found.values()) else 1)


if __name__ == "__main__":
    exit_on_input_error(main)
