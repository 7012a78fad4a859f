"""What works on this machine's GPUs: the checks of docs/gpu.md, and one file with versions, outcomes and losses.

    python -m cluster.gpu_check --hours 1

Runs the checks that need 1, 2 or 4 GPUs, as many as this machine has, until the time is over. Exit code 0 if all checks
that were run passed, 1 if one failed, 2 if nothing was checked because PyTorch sees no GPU. Send back --output.
"""

import common.workers.environment  # isort: skip  # noqa: F401 (stops with a message if torch is missing)

import argparse
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from common.errors import exit_on_input_error
from common.flags import Parser
from common.paths import ROOT, atomic_write
from common.record import versions
from common.workers.machine import count_gpus

NO_GPU = "no GPU that PyTorch can see: nothing was checked; use a machine with one, and a build of PyTorch for it"
TOLERANCE = 1e-4  # of a loss; docs/gpu.md says why it is more than on CPUs
MOST_SECONDS = 900.0  # for one command


@dataclass(frozen=True)
class Check:
    """A shell command, the GPUs that it needs and sees, and a pattern that its output must contain.

    number: in docs/gpu.md. as_on_cpu: its losses must be those of the same command without GPUs.
    """

    number: int
    gpus: int
    command: str
    pattern: str
    as_on_cpu: bool = False


@dataclass(frozen=True)
class CheckResult:
    """outcome: passed, failed with a reason, or not run with a reason."""

    number: int
    command: str
    outcome: str
    seconds: float = 0.0
    losses: tuple[float, ...] = ()
    losses_on_cpu: tuple[float, ...] = ()
    end_of_output: str = ""


LAUNCH = "python -m cluster.launch --workers"
FLAGS = "--max_steps 5 --dropout 0 --output_dir runs/gpu_check --overwrite_output_dir"
SHARDS = "runs/gpu_check_shards"
SANITIZER = "TORCH_CUDA_SANITIZER=1 "  # needs CUDA
SAVE = f"{LAUNCH} 2 -- beyond/run_gpt2.py {FLAGS} --strategy zero2 --save_to {SHARDS}"
HELLO = "python cluster/hello.py --master_port 6591 --world_size 2 --hang_seconds 20"
DTYPE = """python -c 'import torch; from benchmark.engines.single import Autocast
model = Autocast(torch.nn.Linear(4, 4).cuda(), lambda: torch.autocast("cuda", torch.bfloat16))
print(torch.nn.DataParallel(model)(input=torch.ones(4, 4).cuda()).dtype)'"""
SWEEP = "python -m benchmark.sweep --only single,ddp --workers 1 --batch_sizes 8 --steps 8 --output_dir $(mktemp -d)"


def lesson(number: int, gpus: int, strategy: str, before: str = "") -> Check:
    command = f"{before}{LAUNCH} {gpus} -- beyond/run_gpt2.py {FLAGS} --strategy {strategy}"
    return Check(number, gpus, command, "first losses", as_on_cpu=True)


def pipeline(gpus: int, words: str) -> Check:
    return Check(8, gpus, f"{words} {FLAGS}", "first losses", as_on_cpu=True)


CHECKS = (
    Check(1, 1, "python -m pytest -q tests --ignore=tests/own", r"\d+ passed"),
    Check(2, 1, f"{LAUNCH} 4 -- cluster/hello.py --step all_reduce", "CPU"),
    Check(3, 2, "python -m cluster.ladder --workers 2 --iterations 5", r"3 DDP(?!.* 0\.00)", as_on_cpu=True),
    Check(3, 4, "python -m cluster.ladder --workers 4 --iterations 5", r"3 DDP(?!.* 0\.00)", as_on_cpu=True),
    Check(4, 2, f"{HELLO} --step all_reduce --local_rank 0 & {HELLO} --step join --local_rank 1; wait", "all_reduce"),
    *(lesson(5, 2, name) for name in ("ring", "overlap", "zero1", "zero2", "zero3", "tensor", "1f1b")),
    lesson(5, 2, "1f1b --schedule gpipe"),
    *(lesson(5, 4, name) for name in ("1f1b", "grid")),
    *(lesson(6, 2, name, SANITIZER) for name in ("zero3", "overlap")),
    *(lesson(6, 2, name, "CUDA_LAUNCH_BLOCKING=1 ") for name in ("zero3", "overlap")),
    lesson(7, 2, f"zero2 --resume_from {SHARDS}", before=f"{SAVE} && "),
    *(pipeline(1, f"python pipeline/run_gpt2.py --model_parallel_mode {m}") for m in ("none", "model_parallel")),
    *(pipeline(n, "python pipeline/run_gpt2.py --model_parallel_mode pipeline_parallel") for n in (1, 2, 4)),
    *(pipeline(2, f"{LAUNCH} 2 -- pipeline/run_gpt2.py --schedule {s}") for s in ("gpipe", "1f1b", "interleaved")),
    Check(9, 2, DTYPE, "torch.bfloat16"),
    *(Check(10, 1, f"{SWEEP} -- --precision {name}", '"strategy": "ddp"') for name in ("fp32", "fp16", "bf16")),
    Check(10, 2, "python -m benchmark.compare --workers 2 --max_steps 8 --only ddp,fsdp,own_overlap,own_zero3", "rows"),
    Check(10, 4, "python -m benchmark.compare --workers 4 --max_steps 8 --only tensor,pipeline,own_grid", "rows"),
)


def run(check: Check, seconds: float) -> CheckResult:
    """Run a check; its command may take so long, and as long again on the CPU."""
    begin = time.monotonic()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1,2,3").split(",")[: check.gpus]
    output, code = output_of(check.command, seconds, CUDA_VISIBLE_DEVICES=",".join(visible))
    on_gpu, on_cpu = losses(output), losses("")
    outcome = "passed" if code == 0 and re.search(check.pattern, output) else f"failed: exit code {code}"
    if outcome == "passed" and check.as_on_cpu:
        on_cpu = losses(output_of(check.command.removeprefix(SANITIZER), seconds, CUDA_VISIBLE_DEVICES="")[0])
        if not same(on_gpu, on_cpu):
            outcome = f"failed: losses are not those on the CPU, to {TOLERANCE:g}"
    took = round(time.monotonic() - begin, 1)
    return CheckResult(check.number, check.command, outcome, took, on_gpu, on_cpu, output[-2000:])


def output_of(command: str, seconds: float, **variables: str) -> tuple[str, int]:
    """Return what a shell's command prints, and its exit code, which is 124 if it took too long."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    words = ["timeout", "-k", "20", str(seconds), "sh", "-c", command]
    env = os.environ | {"PATH": path} | variables
    done = subprocess.run(words, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return done.stdout, done.returncode


def losses(output: str) -> tuple[float, ...]:
    """Return the losses that a script or the ladder prints, in order: the numbers with six decimals."""
    return tuple(map(float, re.findall(r"(?<![\d.])\d+\.\d{6}(?!\d)", output)))


def same(left: tuple[float, ...], right: tuple[float, ...]) -> bool:
    """Whether there are losses, as many on both sides, and equal ones."""
    close = [abs(a - b) <= TOLERANCE * max(1.0, abs(b)) for a, b in zip(left, right, strict=False)]
    return bool(left) and len(left) == len(right) and all(close)


def reason_against(check: Check, gpus: int, left: float) -> str:
    """Return why a check is not run; nothing if it is."""
    if check.gpus > gpus:
        return f"not run: needs {check.gpus} GPUs"
    if "benchmark" in check.command and not (ROOT / "benchmark").is_dir():
        return "not run: this copy has no benchmark/"
    return "" if left > 0 else "not run: the time is over"


def main() -> None:
    parser = Parser(prog="python -m cluster.gpu_check", description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--hours", type=float, default=1.0, help="start no check after so long (1)")
    parser.add_argument("--output", type=Path, default=ROOT / "runs" / "gpu_check.json", help="runs/gpu_check.json")
    arguments = parser.parse_args()
    gpus = count_gpus()
    if not gpus:
        print(NO_GPU)
        sys.exit(2)
    names = [torch.cuda.get_device_name(i) for i in range(gpus)]
    about = {"gpus": names, "cuda": torch.version.cuda, "nvidia-smi": output_of("nvidia-smi", 60)[0], **versions()}
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    end, results = time.monotonic() + 3600 * arguments.hours, []
    for check in CHECKS:
        left = end - time.monotonic()
        reason = reason_against(check, gpus, left)
        result = CheckResult(check.number, check.command, reason) if reason else run(check, min(left, MOST_SECONDS))
        results.append(result)
        print(f"{result.number:>2}  {result.outcome:<24} {result.seconds:6.0f} s  {result.command}", flush=True)
        with atomic_write(arguments.output) as file:  # after every check: what is known is kept
            json.dump({**about, "checks": [asdict(entry) for entry in results]}, file, indent=1)
    print(f"result: {arguments.output}")
    sys.exit(1 if any(result.outcome.startswith("failed") for result in results) else 0)


if __name__ == "__main__":
    exit_on_input_error(main)
