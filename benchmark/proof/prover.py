"""Takes an engine through the cases, on every worker."""

import gc
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor

from benchmark.engines.engine import Engine
from benchmark.measure.output import Json
from benchmark.measure.payload import Payload
from benchmark.proof import wire
from benchmark.proof.cases import Case, Reference, built, cases, reference
from benchmark.proof.judge import CaseResult, Observed, judge
from benchmark.settings import Settings
from benchmark.strategies import STRATEGIES
from benchmark.training.workload import Workload
from benchmark.workers import of_everybody
from common.errors import InputError
from common.workers.process_group import Worker

NOT_PROVED = "not proved"


@dataclass
class Proof:
    """What is known about an engine after its cases. left_out: why it cannot be proved here."""

    name: str
    verdicts: list[CaseResult] = field(default_factory=list)
    left_out: str = ""

    @property
    def gradient(self) -> str:
        """The column: ok, the first fault, or not proved."""
        faults = (fault.partition(" in step ")[0] for verdict in self.verdicts for fault in verdict.faults)
        return next(faults, NOT_PROVED if self.left_out else "ok")

    @property
    def sentence(self) -> str:
        """What is wrong in the first case that shows it; empty if nothing is."""
        wrong = next((verdict for verdict in self.verdicts if verdict.faults), None)
        return f"{self.name} with {wrong.case}: {', '.join(wrong.faults[:3])}" if wrong else ""

    def row(self) -> Json:
        """The figures for JSON, which has no NaN. scale, error and norm: the worst of all steps of SGD."""
        sgd = [verdict for verdict in self.verdicts if verdict.case != "AdamW"]
        scales = [verdict.scale for verdict in sgd]
        norms = [verdict.norm for verdict in sgd if verdict.norm is not None]
        return {
            "strategy": self.name,
            "gradient": self.gradient,
            "sentence": self.sentence,
            "left_out": self.left_out,
            "scale": finite(max(scales, key=lambda scale: abs(scale - 1), default=math.nan)),
            "error": finite(max((verdict.error for verdict in sgd), default=math.nan)),
            "norm": finite(max(norms, key=lambda norm: abs(norm - 1), default=math.nan)),
            "sent": self.verdicts[0].sent if self.verdicts else {},
            "cases": {verdict.case: verdict.faults for verdict in self.verdicts},
        }


class Prover:
    """Proves engines one after another; each reference is computed once, by the first worker."""

    def __init__(self, settings: Settings, worker: Worker, workload: Workload, tell: Callable[[str], None]) -> None:
        """`tell` is called with an engine's name and the case that begins."""
        self.settings, self.worker, self.workload, self.tell = settings, worker, workload, tell
        self.references: dict[Case, Reference] = {}

    def prove(self, name: str) -> Proof:
        """Take an engine through its cases, up to the first that is wrong. A collective."""
        settings, proof = replace(self.settings, strategy=name), Proof(name)
        self.cuts_model = False
        for case in cases(settings.accumulation):
            if case.twice and self.cuts_model:
                continue
            self.tell(f"{name}, {case.name}")
            verdict, error, refused = None, "", ""
            try:
                verdict = self.run(case, settings)
            except InputError as refusal:
                refused = str(refusal)
            except Exception as failure:  # whatever a framework raises
                error = f"{type(failure).__name__}: {' '.join(str(failure).split())[:200]}"
            ends = of_everybody((error, refused, bool(verdict and verdict.faults)), self.worker)
            proof.left_out = next((refused for _, refused, _ in ends if refused), "")
            if error := next((error for error, _, _ in ends if error), ""):
                verdict = CaseResult(case.name, [error])
            proof.verdicts += [verdict] if verdict else []
            if error or proof.left_out or any(is_wrong for _, _, is_wrong in ends):
                break
        gc.collect()  # engines have hooks, and so circles
        return proof

    def run(self, case: Case, settings: Settings) -> CaseResult | None:
        """One case; the first worker returns the verdict."""
        worker = self.worker
        if worker.is_first and case not in self.references:
            self.references[case] = reference(case, settings, self.workload)
        limit = [self.references[case].max_grad_norm if worker.is_first else 0.0]
        dist.broadcast_object_list(limit)
        settings = case.settings(settings, limit[0])
        model = built(case, self.workload.build(settings, worker.device))
        elements = sum(p.numel() for p in model.parameters() if p.requires_grad)
        engine = STRATEGIES[settings.strategy].make(settings, worker, model)
        del model
        self.cuts_model = engine.cuts_model
        observed = self.steps(case, settings, engine)
        if engine.cuts_model or engine.unrecorded_bytes() or worker.world_size == 1:
            elements = 0  # not all is recorded
        own = (
            disagreement(engine, observed.parameters, worker),
            observed.norms,
            wire.faults(observed.sent, engine.sent_dtypes(), elements) if observed.sent is not None else [],
        )
        everybody = of_everybody(own, worker)
        if not worker.is_first:
            return None
        different, norms, wrong_messages = zip(*everybody, strict=True)
        faults = [*filter(None, different), *dict.fromkeys(fault for rank in wrong_messages for fault in rank)]
        return judge(case, settings.precision, self.references[case], observed, list(norms), faults)

    def steps(self, case: Case, settings: Settings, engine: Engine) -> Observed:
        """Train, and look at parameters, norm and loss after each step."""
        observed = Observed([gathered(engine)])
        batches, losses = self.worker.batches(self.workload.batches(settings)), []
        payload = Payload()
        for step in range(case.steps):
            loss = 0.0
            for micro in range(case.accumulation):
                output = engine.forward(next(batches))
                value = engine.backward(output, last=micro == case.accumulation - 1)
                loss += value.item() / case.accumulation
            engine.step(case.rate(step))
            if step == 0:
                observed.sent = wire.messages(payload.collectives())
            losses.append(loss)
            observed.norms.append(None if engine.norm is None else float(engine.norm))
            observed.parameters.append(gathered(engine))
        mean = torch.tensor(losses, dtype=torch.float64, device=self.worker.device)
        dist.all_reduce(mean)  # workers see different shares of a step
        observed.losses = (mean / self.worker.world_size).tolist()
        return observed


def finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def gathered(engine: Engine) -> dict[str, Tensor]:
    """Copies of all parameters on the first worker."""
    return {name: value.clone() for name, value in engine.full_parameters().items()}


def disagreement(engine: Engine, parameters: list[dict[str, Tensor]], worker: Worker) -> str:
    """Say which parameter has another value on this worker than on the first; empty if none has. A collective."""
    full = [parameters[-1]]
    dist.broadcast_object_list(full)
    for name, own, expected in engine.copies(full[0]):
        expected = expected.to(own.dtype)
        allowed = 8 * torch.finfo(own.dtype).eps * expected.double().norm() + 1e-9
        if not (own.double() - expected.double()).norm() <= allowed:
            return f"rank {worker.rank} has another value than rank 0 ({name.removeprefix('transformer.')})"
    return ""
