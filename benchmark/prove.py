"""The proof that a strategy computes the right gradient; a wrong one is named, and the exit code is 1.

    python -m benchmark.prove                                                  # all strategies that run here
    python -m benchmark.prove --strategies zero2,fsdp --accumulation 4 --precision bf16 --workers 3
    python -m benchmark.prove --engine my_engine.py:MyEngine                   # an Engine outside of this repository

Each strategy trains a small model a few times, see proof/cases.py: plain SGD without clipping, so that a factor shows,
with accumulation, with modules that are used twice, with clipping, and with AdamW. The reference is plain PyTorch in
fp64 on one process that takes the workers' micro-batches in turn. Compared are all parameters of all workers after
every step, the norm by which the engine clips, the losses, and the dtype of everything that is sent.

An engine of your own is a class or function `(settings, worker, model) -> Engine`, see engines/engine.py; several names
of a file are separated by commas. It has the limits of the strategy that --like names (ddp). benchmark.compare and
benchmark.run time it with the same flags. Other flags are those of benchmark.compare.
"""

import argparse
import json
import os
import sys
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import common.workers.environment  # isort: skip  # noqa: F401 (stops with a message if torch is missing)

from tqdm.auto import tqdm

from benchmark.arguments import parse
from benchmark.engines.operators import compile_operators
from benchmark.measure.machine import environment
from benchmark.measure.output import MB, Json, cell, text_table
from benchmark.names import STRATEGY_FLAGS
from benchmark.proof.judge import CaseResult
from benchmark.proof.prover import Proof, Prover
from benchmark.settings import Settings
from benchmark.strategies import STRATEGIES, why_not
from benchmark.training.model_config import kind_of
from benchmark.training.workload import load_workload, what_is_trained
from benchmark.workers import STARTER_REPORTS, join, prepare, reports, start_workers, without
from common.errors import InputError, exit_on_input_error
from common.paths import atomic_write
from common.workers.process_group import Worker, process_group

CASES = 5  # of a strategy, at most
MOST_PARTS = 8  # blocks and heads that a small model is given at most
FORMS = {"scale": ".4f", "error": ".1e"}  # of these figures


def that_run(settings: Settings, names: list[str]) -> tuple[list[str], list[Proof]]:
    """The strategies that can be proved here; and the others, with the reason."""
    reasons = {name: why_not(replace(settings, strategy=name)) for name in names}
    left_out = [Proof(name, left_out=reason) for name, reason in reasons.items() if reason]
    return [name for name, reason in reasons.items() if not reason], left_out


def small_model(model: str, workers: int) -> str:
    """The model that is proved instead of a large one: of its kind, small, and with parts for so many workers."""
    kind = kind_of(model)
    if kind == "own":
        return model
    if kind == "gpt2" and 4 % workers and workers <= MOST_PARTS:  # gpt2-tiny has four blocks and four heads
        return f"gpt2-{workers}x{64 * workers}"
    return f"{kind}-tiny"


def small_settings(settings: Settings) -> Settings:
    """The settings of a proof of what `settings` trains: with a small model, and few examples."""
    small = replace(settings, model=small_model(settings.model, settings.world_size), batch_size=2, resume=False)
    if kind_of(small.model) != "own":
        small = replace(small, tokenizer_name="", data_dir=None, length=32)
    if settings.precision == "fp16":
        small = replace(small, precision="fp32")  # a step that the gradient scaler skips would count as wrong
    return small


def prove_all(settings: Settings, worker: Worker, names: list[str], keep: Path | None = None) -> list[Proof]:
    """Prove all in turn, with a bar on the first worker; after each, write the rows to `keep`. A collective."""
    proofs: list[Proof] = []
    workload = load_workload(settings)
    hidden = None if worker.is_first else True  # None: on the first worker, but not in a pipe
    with tqdm(total=CASES * len(names), desc="proof", disable=hidden, leave=False) as bar:

        def tell(what: str) -> None:
            worker.pulse.beat()
            bar.set_postfix_str(what)
            bar.update()

        prover = Prover(settings, worker, workload, tell)
        save(keep, proofs)
        for name in names:
            proofs.append(prover.prove(name))
            save(keep, proofs)
    return proofs


def save(path: Path | None, proofs: list[Proof]) -> None:
    if path:
        with atomic_write(path) as file:
            json.dump([proof.row() for proof in proofs], file)


def table(settings: Settings, rows: list[Json]) -> str:
    lines = [["strategy", "gradient", "scale", "error", "norm", "sent in the first step"]]
    for row in rows:
        scale, error = ("nan" if row[name] is None else format(row[name], form) for name, form in FORMS.items())
        sent: dict[str, float] = defaultdict(float)
        for what, size in row["sent"].items():
            sent[what.split()[-1]] += size / MB
        words = ", ".join(f"{size:.2f} MB {dtype}" for dtype, size in sent.items())
        lines.append([row["strategy"], row["gradient"][:42], scale, error, cell(row["norm"], 4), words or "-"])
    about = "scale, error and norm: the largest deviation of all SGD steps"
    return f"{what_is_trained(settings)}, {settings.precision}; {about}\n{text_table(lines)}"


def verdict(sentences: Iterable[str]) -> str:
    """What is wrong, in one line; empty if nothing is. What is not proved is not wrong."""
    wrong = [sentence for sentence in sentences if sentence]
    return f"wrong: {'; '.join(wrong)}" if wrong else ""


def report(settings: Settings, rows: list[Json]) -> None:
    """Print the table and, as the last line, the figures. Exits with 1, and with what is wrong, if anything is."""
    left_out = [row["left_out"] for row in rows if row["left_out"]]
    rows = [row for row in rows if not row["left_out"]]
    wrong = verdict(row["sentence"] for row in rows)
    result = {
        "wrong": {row["strategy"]: row["gradient"] for row in rows if row["gradient"] != "ok"},
        "rows": rows,
        "left_out": left_out,
        "environment": environment(),
    }
    print("\n".join([table(settings, rows), *(f"left out: {reason}" for reason in left_out), wrong or "all ok"]))
    print(json.dumps(result), flush=True)
    if wrong:
        sys.exit(wrong)
    if not rows:
        raise InputError("nothing was proved: see left out")


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(batch_size=2, length=32, usual_workers=2)


def prove_on_workers(argv: list[str], settings: Settings, names: list[str], file: str) -> list[Json]:
    """The row of each strategy, proved on workers that are started here. file: of engines outside of this repository.

    What stops all workers is wrong; the strategies behind it have a launch of their own.
    """
    proof_file = settings.output_dir / "proof.json"
    prepare(settings.output_dir)
    rest, rows, todo = without(argv, "--workers", "--engine", *STRATEGY_FLAGS), list[Json](), list(names)
    while todo:
        proof_file.unlink(missing_ok=True)
        ours = ",".join(name for name in todo if not STRATEGIES[name].is_from_file)
        others = ",".join(name for name in todo if STRATEGIES[name].is_from_file)
        words = ["--strategies", ours] * bool(ours) + ["--engine", f"{file}:{others}"] * bool(others)
        code = start_workers("benchmark.prove", settings.world_size, [*rest, *words])
        if code and not proof_file.exists():  # the workers have not even met
            sys.exit(code)
        new_rows = json.loads(proof_file.read_text())
        rows += new_rows
        todo = todo[len(new_rows) :]
        if code and todo:
            rows.append(Proof(todo.pop(0), [CaseResult("its workers", [f"exit code {code}"])]).row())
    return rows


def main() -> None:
    argv = sys.argv[1:]
    settings, flags = parse(argv, "prove", __doc__, add_flags)
    if settings.precision == "fp16":
        raise InputError("--precision: the gradient scaler of fp16 skips steps, so prove fp32 or bf16; got fp16")
    asked = [name for name in flags.names if name != "single" or flags.strategies != "all"]
    names, left_out = that_run(settings, asked)
    refused = [proof.row() for proof in left_out]
    if STARTER_REPORTS not in os.environ:
        compile_operators(names, settings.no_cuda)
    if flags.starts_workers:
        load_workload(settings)  # a wrong name or empty data is said once, not by every worker
        rows = prove_on_workers(argv, settings, names, flags.engine.rpartition(":")[0])
        return report(settings, [*refused, *rows])
    with process_group(settings, join) as worker:
        proofs = prove_all(settings, worker, names, settings.output_dir / "proof.json" if worker.is_first else None)
    if reports(settings):
        report(settings, [*refused, *(proof.row() for proof in proofs)])


if __name__ == "__main__":
    exit_on_input_error(main)
