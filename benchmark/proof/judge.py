"""Whether what an engine did in a case is right; what is wrong in a few words, such as x 0.5000 (every parameter)."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import Tensor

from benchmark.proof.cases import Case, Reference
from benchmark.proof.wire import SentMessage, by_kind


@dataclass(frozen=True)
class Limits:
    """Relative errors that right engines stay below; docs/measurements.md has theirs.

    parameter: of one parameter's update. noise: in units of the whole update, since some gradients are nothing else.
    scale: of all updates together, from 1. rounding: of a stored parameter. norm, loss: of a step.
    """

    parameter: float
    noise: float
    scale: float
    rounding: float
    norm: float
    loss: float


FP32 = Limits(parameter=1e-3, noise=2e-6, scale=1e-4, rounding=2**-23, norm=1e-4, loss=1e-5)
HALF = Limits(parameter=0.15, noise=2e-4, scale=5e-3, rounding=2**-23, norm=1e-2, loss=5e-3)
ADAM_FP32 = Limits(parameter=2e-3, noise=4e-5, scale=1e-3, rounding=2**-23, norm=1e-3, loss=1e-4)
ADAM_HALF = Limits(parameter=0.4, noise=2e-2, scale=2e-2, rounding=2**-23, norm=3e-2, loss=1e-2)


def limits(case: Case, precision: str) -> Limits:
    if case.optimizer == "sgd":
        return FP32 if precision == "fp32" else HALF
    return ADAM_FP32 if precision == "fp32" else ADAM_HALF


@dataclass
class Observed:
    """What an engine did in a case, as the first worker knows it.

    parameters: before the first step and after each. norms: None where the engine knows none. losses: of all workers.
    sent: in the first step; None where torch's recorder does not know.
    """

    parameters: list[dict[str, Tensor]] = field(default_factory=list)
    norms: list[float | None] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    sent: list[SentMessage] | None = None


@dataclass(frozen=True)
class Update:
    """A change of all parameters beside the right one. scale: how many times the right one. error: relative.

    fault: what is wrong; empty if nothing is.
    """

    scale: float
    error: float
    fault: str


@dataclass(frozen=True)
class CaseResult:
    """A case's faults, the gravest first, and its figures."""

    case: str
    faults: list[str]
    scale: float = math.nan
    error: float = math.nan
    norm: float | None = None  # in units of the right one, the farthest from 1; None: not known
    sent: dict[str, int] = field(default_factory=dict)  # bytes of the first step, by collective and dtype


def judge(
    case: Case, precision: str, right: Reference, observed: Observed, norms: list[list[float | None]], more: list[str]
) -> CaseResult:
    """Compare a case with its reference. norms: of each worker, step by step. more: faults found elsewhere."""
    allowed = limits(case, precision)
    ends = list(range(1, case.steps + 1)) if case.optimizer == "sgd" else [case.steps]
    updates, begin = [], 0
    faults = start(observed.parameters[0], right.parameters[0], 2**-8 if precision == "bf16" else 2**-20)
    for end in ends:
        got, want = (
            change(parameters[begin], parameters[end]) for parameters in (observed.parameters, right.parameters)
        )
        if case.optimizer == "adamw":  # it divides by the gradient's size: what is noise gets an update of any sign
            for name in got.keys() & want.keys():
                got[name][right.is_noise[name]] = want[name][right.is_noise[name]] = 0.0
        updates.append(compare(got, want, right.parameters[begin], allowed))
        if updates[-1].fault:
            faults.append(f"{updates[-1].fault} in step {end}")
        begin = end
    ratios = [got / want for own in norms for got, want in zip(own, right.norms, strict=True) if got is not None]
    norm = max(ratios, key=lambda ratio: distance(ratio, 1.0), default=None)
    if norm is not None and not distance(norm, 1.0) <= allowed.norm:
        faults.append(f"norm x {norm:.4f}")
    faults += more
    for step, (loss, expected) in enumerate(zip(observed.losses, right.losses, strict=True), 1):
        if not distance(loss, expected) <= allowed.loss * expected:
            faults.append(f"loss {loss:.5f} instead of {expected:.5f} in step {step}")
    shown = max(updates, key=lambda update: -math.inf if math.isnan(update.error) else update.error)
    return CaseResult(case.name, faults, shown.scale, shown.error, norm, by_kind(observed.sent or []))


def start(got: dict[str, Tensor], want: dict[str, Tensor], allowed: float) -> list[str]:
    """Weights that are not those of the model. DeepSpeed rounds them to bf16 first."""
    different = [
        name
        for name, value in want.items()
        if name not in got or not norm_of([got[name].double() - value]) <= allowed * norm_of([value])
    ]
    return [f"other weights at the start ({short(different)})"] if different else []


def distance(value: float, expected: float) -> float:
    return abs(value - expected)  # NaN is within no limit


def change(before: dict[str, Tensor], after: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: before[name].double() - after[name].double() for name in before}


def compare(got: dict[str, Tensor], want: dict[str, Tensor], before: dict[str, Tensor], allowed: Limits) -> Update:
    """Compare updates parameter by parameter, and as one vector. before: the values whose rounding is in the update."""
    if missing := [name for name in want if name not in got]:
        return Update(math.nan, math.nan, f"missing ({short(missing)})")
    whole = norm_of(want.values())

    def limit(name: str) -> float:
        of_itself = allowed.parameter * norm_of([want[name]]) + allowed.rounding * norm_of([before[name]])
        return of_itself + allowed.noise * whole

    wrong = [name for name in want if not norm_of([got[name] - want[name]]) <= limit(name)]  # NaN is within no limit
    scale = sum(float((got[name] * want[name]).sum()) for name in want) / whole**2
    error = norm_of(got[name] - want[name] for name in want) / whole
    if wrong or not distance(scale, 1.0) <= allowed.scale:
        return Update(scale, error, words(got, want, wrong or list(want), scale, allowed))
    return Update(scale, error, "")


def words(got: dict[str, Tensor], want: dict[str, Tensor], wrong: list[str], scale: float, allowed: Limits) -> str:
    """Say what is wrong: a factor where there is one, otherwise the error of the parameter that is the most wrong."""
    factors = {name: float((got[name] * want[name]).sum() / want[name].square().sum()) for name in wrong}
    rest = {name: norm_of([got[name] - factors[name] * want[name]]) / norm_of([want[name]]) for name in wrong}
    if any(math.isnan(factor) for factor in factors.values()):
        return f"nan ({short([name for name in wrong if math.isnan(factors[name])])})"
    straight = max(0.02, 2 * allowed.parameter)  # what is left without the factor
    left = norm_of(got[name] - scale * want[name] for name in want) / norm_of(want.values())
    is_factor = not distance(scale, 1.0) <= allowed.scale
    if is_factor and len(wrong) > len(want) / 2 and left < straight * max(1.0, abs(scale)):
        return f"x {scale:.4f} (every parameter)"
    worst = max(wrong, key=lambda name: distance(factors[name], 1.0) + rest[name])
    names = short([worst, *(name for name in wrong if name != worst)])
    if distance(factors[worst], 1.0) > rest[worst] and rest[worst] < straight * max(1.0, abs(factors[worst])):
        return f"x {factors[worst]:.4f} ({names})"
    return f"error {distance(factors[worst], 1.0) + rest[worst]:.2g} ({names})"


def short(names: list[str]) -> str:
    """The first name without what all names begin with, and how many follow."""
    first = names[0].removeprefix("model.").removeprefix("transformer.")
    return first if len(names) == 1 else f"{first} and {len(names) - 1} more"


def norm_of(tensors: Iterable[Tensor]) -> float:
    return math.sqrt(sum(float(tensor.square().sum()) for tensor in tensors))
