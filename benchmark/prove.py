"""The proof that a strategy computes the right gradient; a wrong one is named, and the exit code is 1.

    python -m benchmark.prove                                                  # all strategies that run here
    python -m benchmark.prove --strategy zero2,fsdp --accumulation 4 --precision bf16 --workers 3
    python -m benchmark.prove --engine my_engine.py:MyEngine                   # an Engine outside of this repository

Each strategy trains a small model a few times, see proof/cases.py: plain SGD without clipping, so that a factor shows,
with accumulation, with modules that are used twice, with clipping, and with AdamW. The reference is plain PyTorch in
fp64 on one process that takes the workers' micro-batches in turn. Compared are all parameters of all workers after
every step, the norm by which the engine clips, the losses, and the dtype of everything that is sent.

An engine of your own is a class or function `(settings, worker, model) -> Engine`, see engines/engine.py; several names
of a file are separated by commas. --strategy then says which strategy's settings it gets (ddp). Other flags are those
of benchmark.compare.
"""

import argparse
import json
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import common.workers.environment  # isort: skip  # noqa: F401 (stops with a message if torch is missing)

from tqdm.auto import tqdm

from benchmark.arguments import parse
from benchmark.measure.machine import environment
from benchmark.measure.output import MB, cell, text_table
from benchmark.names import names_of
from benchmark.proof.judge import CaseResult
from benchmark.proof.prover import MakeEngine, Proof, Prover
from benchmark.settings import Settings
from benchmark.strategies import STRATEGIES, why_not
from benchmark.training.model_config import kind_of
from benchmark.training.workload import load_workload, what_is_trained
from benchmark.workers import join, make_ready, reports, start_workers, without
from common.errors import InputError, exit_on_input_error
from common.paths import atomic_write, import_file
from common.workers.process_group import Worker, process_group

CASES = 5  # of a strategy, at most
MOST_PARTS = 8  # blocks and heads that a small model is given at most
FORMS = {"scale": ".4f", "error": ".1e"}  # of these figures
Engines = dict[str, tuple[str, MakeEngine]]  # name -> the strategy whose settings it gets, and how it is made


def chosen(settings: Settings, names: str, engines: str = "") -> tuple[Engines, list[Proof]]:
    """What to prove, by name: whose settings it gets, and how it is made. And what is left out, with the reason."""
    if engines:
        path, _, engine_names = engines.rpartition(":")
        module = import_file(Path(path).resolve(), Path(path).stem) if path and Path(path).is_file() else None
        missing = [name for name in engine_names.split(",") if not hasattr(module, name)]
        if missing:
            raise InputError(f"--engine: expected FILE.py:NAME, got {engines!r}; there is no {missing[0]} in {path!r}")
        return {name: (names or "ddp", getattr(module, name)) for name in engine_names.split(",")}, []
    chosen_engines: Engines = {}
    left_out: list[Proof] = []
    for name in (
        names_of("--strategy", names, STRATEGIES) if names else [name for name in STRATEGIES if name != "single"]
    ):
        reason = why_not(replace(settings, strategy=name))
        if reason:
            left_out.append(Proof(name, left_out=reason))
        else:
            chosen_engines[name] = (name, STRATEGIES[name].make)
    return chosen_engines, left_out


def small_model(model: str, workers: int) -> str:
    """The model that is proved instead of a large one: of its kind, small, and with parts for so many workers."""
    kind = kind_of(model)
    if kind == "own":
        return model
    if kind == "gpt2" and 4 % workers and workers <= MOST_PARTS:  # gpt2-tiny has four blocks and four heads
        return f"gpt2-{workers}x{64 * workers}"
    return f"{kind}-tiny"


def prove_all(settings: Settings, worker: Worker, engines: Engines, keep: Path | None = None) -> list[Proof]:
    """Prove all engines in turn, with a bar on the first worker; after each, write the rows to `keep`. A collective."""
    proofs: list[Proof] = []
    workload = load_workload(settings)
    with tqdm(total=CASES * len(engines), desc="proof", disable=not worker.is_first, leave=False) as bar:

        def tell(what: str) -> None:
            worker.pulse.beat()
            bar.set_postfix_str(what)
            bar.update()

        prover = Prover(settings, worker, workload, tell)
        save(keep, proofs)
        for name, (strategy, make) in engines.items():
            proofs.append(prover.prove(name, strategy, make))
            save(keep, proofs)
    return proofs


def save(path: Path | None, proofs: list[Proof]) -> None:
    if path:
        with atomic_write(path) as file:
            json.dump([proof.row() for proof in proofs], file)


def table(settings: Settings, rows: list[dict]) -> str:
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


def verdict(rows: list[dict]) -> str:
    """What is wrong, in one line; empty if nothing is. What is not proved is not wrong."""
    wrong = [row["sentence"] for row in rows if row.get("sentence")]
    return f"wrong: {'; '.join(wrong)}" if wrong else ""


def report(settings: Settings, rows: list[dict]) -> None:
    """Print the table and, as the last line, the figures. Exits with 1, and with what is wrong, if anything is."""
    left_out = [row["left_out"] for row in rows if row["left_out"]]
    rows = [row for row in rows if not row["left_out"]]
    wrong = verdict(rows)
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
    add = parser.add_argument
    add("--strategy", dest="names", default="", help="names, separated by commas (all)")
    add("--engine", dest="engines", default="", metavar="FILE.py:NAME", help="an engine outside of this repository")


def prove_on_workers(argv: list[str], settings: Settings, flags: argparse.Namespace) -> list[dict]:
    """The row of each engine, proved on workers that are started here. settings, flags: argv, parsed."""
    engines, left_out = chosen(settings, flags.names, flags.engines)
    proof_file = settings.output_dir / "proof.json"
    load_workload(settings)  # a wrong name or empty data is said once, not by every worker
    make_ready(settings, [strategy for strategy, _ in engines.values()])
    rest = without(argv, "--workers", "--strategy", "--engine")
    rows = [proof.row() for proof in left_out]
    names = list(engines)
    while names:
        proof_file.unlink(missing_ok=True)
        words = ["--strategy", ",".join(names)]
        if flags.engines:
            file = flags.engines.rpartition(":")[0]
            words = ["--strategy", flags.names or "ddp", "--engine", f"{file}:{','.join(names)}"]
        code = start_workers("benchmark.prove", settings.world_size, [*rest, *words])
        new_rows = json.loads(proof_file.read_text()) if proof_file.exists() else []
        rows += new_rows
        names = names[len(new_rows) :]
        if code and not proof_file.exists():  # the workers have not even met
            sys.exit(code)
        if code and names:  # this one stopped all workers; the others have a launch of their own
            rows.append(Proof(names.pop(0), [CaseResult("its workers", [f"exit code {code}"])]).row())
    return rows


def main() -> None:
    argv = sys.argv[1:]
    settings, flags = parse(argv, "prove", __doc__, add_flags)
    if settings.precision == "fp16":
        raise InputError("--precision: the gradient scaler of fp16 skips steps, so prove fp32 or bf16; got fp16")
    if flags.start is not None:
        return report(settings, prove_on_workers(argv, settings, flags))
    engines, left_out = chosen(settings, flags.names, flags.engines)
    with process_group(settings, join) as worker:
        proofs = prove_all(settings, worker, engines, settings.output_dir / "proof.json" if worker.is_first else None)
    if reports(settings):
        report(settings, [proof.row() for proof in [*left_out, *proofs]])


if __name__ == "__main__":
    exit_on_input_error(main)
