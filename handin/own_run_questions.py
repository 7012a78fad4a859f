"""Questions on a student's own runs: drawn from their code, records and timelines, with the answer and where to see it.

    draw(Subject(code, runs), 4, seed)

Each kind computes its answer from the records; the wrong choices are
what usual mistakes would give: the other rank, the first iteration counted, a sum instead of a mean. Where these would
give the answer away by its size, other numbers are among them.
"""

import itertools
import operator
import random
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from common.errors import InputError
from common.record import PHASES
from common.timeline.boxes import Box, Timeline
from common.timeline.parts import Parts, parts
from common.timeline.trace import read_trace
from handin.findings import cores
from handin.gpt2 import bound_of, epochs_of
from handin.records import DAMAGED, Run, Runs

NAMES = {"task1": "task 1", "task2a": "task 2a", "task2b": "task 2b", "task3": "task 3 (DDP)", "task4": "task 4"}
SEVERAL = ("task2a", "task2b", "task3")
ALL = tuple(NAMES)
ALIKE = {  # the same for all whose code and seed are equal
    "best_epoch", "forgotten_division", "line_of_a_call", "longest_phase", "loss_of_the_batch", "lowest_loss",
    "memory_at_the_peak",
}  # fmt: skip
CLOSE = 0.08  # two numbers that differ by less than this share are one choice
CHOICES = 4
FEWEST = 3  # messages of which one is asked for
NUMBER = re.compile(r"-?\d+(?:[.,]\d+)?(?:e[+-]?\d+)?")
CALL = re.compile(r"\b(?:dist|distributed)\.(\w+)\(|\.(backward|step)\(|\bDistributedDataParallel\(")


@dataclass(frozen=True)
class Subject:
    """Whom the questions are about. `code`: file -> text, of what the student may change."""

    code: dict[str, str]
    runs: Runs


@dataclass(frozen=True)
class OwnRunQuestion:
    """A question with its choices, one of which is the answer."""

    kind: str
    text: str
    choices: tuple[str, ...]
    answer: str
    where: str

    def is_right(self, given: str) -> bool:
        """Return whether this is the letter of the answer, the answer itself or its number, such as 2 for "rank 2"; a
        number that was measured may be a close one."""
        given = given.strip().casefold()
        if given.rstrip(".)") == "abcdefgh"[self.choices.index(self.answer)] or given == self.answer.casefold():
            return True
        found, right = NUMBER.search(given), NUMBER.search(self.answer)
        if found is None or right is None:
            return False
        value, wanted = (float(number[0].replace(",", ".")) for number in (found, right))
        is_measured = self.answer.startswith(right[0])
        return abs(value - wanted) <= CLOSE / 2 * abs(wanted) * is_measured


@dataclass(frozen=True)
class _Drawn:
    """What a kind returns: numbers get `unit` and three digits; other choices are texts."""

    text: str
    answer: float | str
    wrong: Sequence[float | str]
    where: str
    unit: str = ""


@dataclass(frozen=True)
class _Row:
    """A kind that asks about one run, or the parts of one of its steps. `values`: the answer, and then mistakes."""

    runs: Sequence[str]
    text: str
    unit: str
    where: str
    values: Callable[..., Sequence[Any]]


def draw(subject: Subject, count: int, seed: str) -> list[OwnRunQuestion]:
    """Return up to `count` questions of different kinds; the same seed and records give the same ones.

    A kind whose records are missing is left out. At most one has an answer that follows from code and seed alone, and
    that somebody with the same seed knows.
    """
    rng = random.Random(seed)
    questions: list[OwnRunQuestion] = []
    names = [*OF_A_STEP, *OF_A_RUN, *OTHERS]
    for name in rng.sample(names, len(names)):
        if name in ALIKE and any(question.kind in ALIKE for question in questions):
            continue
        try:
            drawn = _drawn(name, subject, rng)
        except (*DAMAGED, InputError):
            continue
        if drawn.answer and len(choices := _choices(drawn, rng)) > 1:
            answer = choices[0]
            rng.shuffle(choices)
            questions.append(OwnRunQuestion(name, drawn.text, tuple(choices), answer, drawn.where))
        if len(questions) == count:
            break
    return questions


def _drawn(name: str, subject: Subject, rng: random.Random) -> _Drawn:
    if name in OTHERS:
        return OTHERS[name](subject, rng)
    if name in OF_A_STEP:
        kind = OF_A_STEP[name]
        run, timeline = _timeline(subject, rng, *kind.runs)
        ranks = _of_step(timeline, rng)
        of = max(ranks, key=lambda part: part.waiting or 0) if name == "wait_of_a_rank" else rng.choice(ranks)
        values, text = kind.values(run, of), f"step {of.step}: {kind.text.format(of.rank)}"
    else:
        kind = OF_A_RUN[name]
        run = _run(subject, rng, *kind.runs)
        i = rng.randrange(1, len(run.losses))
        values, text = kind.values(run, i), kind.text.format(i + 1)
    if scale := {"ms": 1000, "%": 100}.get(kind.unit):
        values = [scale * value for value in values]
    return _Drawn(f"{_name(run)}, {text}", values[0], values[1:], kind.where, kind.unit)


def _choices(drawn: _Drawn, rng: random.Random) -> list[str]:
    """Return the answer and then wrong choices, each of which differs visibly from the others."""
    if isinstance(drawn.answer, str):
        return [*dict.fromkeys(map(str, (drawn.answer, *drawn.wrong)))][:CHOICES]
    kept = [drawn.answer]
    below = rng.randrange(CHOICES)  # drawn, so that nobody gets far by taking the second largest number each time
    for is_below, size in (
        (True, 1 + below),
        (False, CHOICES),
        (True, CHOICES),
    ):  # again: a share has little room above
        mistakes = [float(of) for of in drawn.wrong if (float(of) < drawn.answer) == is_below]
        # Drawn, too: from fixed proportions one could tell which number the others were made from.
        factors = [rng.uniform(*((0.6, 0.85) if is_below else (1.2, 1.7))) for _ in range(2 * CHOICES)]
        for value in (*mistakes, *(drawn.answer * factor for factor in itertools.accumulate(factors, operator.mul))):
            new = all(abs(value - of) > CLOSE * max(abs(value), abs(of)) for of in kept)
            if new and len(kept) < size and not (drawn.unit == "%" and value > 100):
                kept.append(value)
    return [f"{_digits(value)} {drawn.unit}".strip() for value in kept]


def _digits(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


# --- What the kinds below read ---


def _run(subject: Subject, rng: random.Random, *kinds: str) -> Run:
    return rng.choice([subject.runs.of(kind)[0] for kind in kinds if subject.runs.of(kind)])


def _timeline(subject: Subject, rng: random.Random, *kinds: str) -> tuple[Run, Timeline]:
    run = rng.choice([found[0] for kind in kinds if (found := subject.runs.with_timeline(kind))])
    return run, read_trace(run.folder / "timeline.json")


def _name(run: Run) -> str:
    return f"{NAMES.get(run.kind, run.kind)} (`{run.name}`)"


def _of_step(timeline: Timeline, rng: random.Random) -> list[Parts]:
    """Return the parts of one step of each rank. Raises ValueError on a GPU, where waiting is not measured."""
    if timeline.on_gpu:
        raise ValueError("no waits")
    number = rng.choice(sorted({step.number for step in timeline.steps}))
    return [of for of in parts(timeline) if of.step == number]


def _messages(timeline: Timeline, rng: random.Random) -> tuple[int, dict[int, list[Box]]]:
    """Return the number of a step, and the collectives of each rank in it, in their order."""
    number = rng.choice(sorted({step.number for step in timeline.steps}))
    spans = {step.rank: step for step in timeline.steps if step.number == number}
    inside = [box for box in timeline.boxes if box.row == "network" and box.start >= spans[box.rank].start]
    inside = [box for box in inside if box.start < spans[box.rank].end]
    return number, {
        rank: sorted((box for box in inside if box.rank == rank), key=lambda box: box.start) for rank in spans
    }


def _phases(run: Run, phase: str, rank: int = 0) -> list[float]:
    return [step["phases"][phase] or 0.0 for step in run.records[rank]["iterations"]]


def _ranks(run: Run, but: int) -> list[str]:
    return [f"rank {rank}" for rank in range(run.workers) if rank != but]


def _means(run: Run, phase: str, rank: int = 0) -> float:
    return statistics.fmean(_phases(run, phase, rank)[1:])


def _share(run: Run, phase: str, rank: int) -> float:
    return _means(run, phase, rank) / statistics.fmean(step["seconds"] for step in run.records[rank]["iterations"][1:])


def _largest(values: Sequence[float]) -> list[int]:
    """Return the indices of values, the largest first."""
    return sorted(range(len(values)), key=lambda i: -values[i])


def _cores(run: Run, rank: int) -> float:
    return run.records[rank]["processor"]["own"] / run.records[rank]["processor"]["seconds"]


OF_A_STEP = {
    "wait_of_a_rank": _Row(
        SEVERAL, "how long does rank {} wait for ranks that have not arrived?", "ms", "rank file, timeline: waiting",
        lambda run, of: [of.waiting, of.exposed, of.computing, of.waiting + of.exposed, of.seconds]),
    "exposed_communication": _Row(
        SEVERAL, "how much communication of rank {} is exposed?", "ms", "rank file, timeline: exposed",
        lambda run, of: [of.exposed, of.waiting, of.exposed + of.waiting, of.seconds - of.computing, of.computing]),
    "hidden_communication": _Row(
        ("task3",), "how much of rank {}'s communication runs beside computing?", "ms", "rank file, timeline: hidden",
        lambda run, of: [of.hidden, of.exposed, of.hidden + of.exposed, of.waiting, of.computing]),
    "computing_share": _Row(
        SEVERAL, "what share of its step does rank {} compute?", "%", "rank file, timeline: computing / seconds",
        lambda run, of: [x / of.seconds for x in (
            of.computing, of.seconds - of.computing, of.computing / run.workers, of.computing + of.waiting)]),
    "idle_stage": _Row(
        ("pipeline",), "what share of the step does stage {} wait or communicate?", "%",
        "rank file, timeline: (waiting + exposed) / seconds",
        lambda run, of: [(of.waiting + of.exposed) / of.seconds, 1 - bound_of(run)[1],
                         (run.workers - 1) / run.config["n_chunk"], of.computing / of.seconds]),
}  # fmt: skip
OF_A_RUN = {
    "mean_time": _Row(
        ALL, "the mean time of rank 0's iterations without the first?", "ms", "rank0.json: seconds",
        lambda run, i: [statistics.fmean(run.seconds[1:]), statistics.fmean(run.seconds), max(run.seconds[1:]),
                        sum(run.seconds[1:]) / len(run.seconds), min(run.seconds), run.seconds[0]]),
    "first_iteration": _Row(
        ALL, "rank 0's first iteration over the mean of the others?", "", "rank0.json: seconds",
        lambda run, i: [run.seconds[0] / (mean := statistics.fmean(run.seconds[1:])), mean / run.seconds[0], 1.0]),
    "loss_of_the_batch": _Row(
        SEVERAL, "the loss of the whole batch in iteration {}?", "", "rank files: the mean over the ranks",
        lambda run, i: [run.losses[i], *(of["losses"][i] for of in run.records), run.losses[i] * run.workers]),
    "forgotten_division": _Row(
        SEVERAL, "the mean of the ranks' losses in iteration {}, had you forgotten to divide?", "",
        "rank files: the sum over the ranks",
        lambda run, i: [run.losses[i] * n for n in (run.workers, 1, 1 / run.workers, run.workers**2)]),
    "communication_share": _Row(
        ("task2a", "task2b"), "what share of rank 1's iterations after the first is communication?", "%",
        "rank1.json: phases",
        lambda run, i: [share := _share(run, "communication", 1), 1 - share, _share(run, "backward", 1),
                        _share(run, "communication", 0), share / run.workers]),
    "root_and_other": _Row(
        ("task2a",), "how much longer is rank 1's communication than rank 0's, on average without the first iteration?",
        "ms", "rank files: phases",
        lambda run, i: [(other := _means(run, "communication", 1)) - (root := _means(run, "communication")),
                        root, other]),
    "processor_use": _Row(
        ALL, "how many cores did rank 0 keep busy on average while it trained?", "cores",
        "rank0.json: processor, own / seconds",
        lambda run, i: [_cores(run, 0), 1.0, sum(_cores(run, rank) for rank in range(run.workers)), run.workers]),
    "cores_of_all": _Row(
        SEVERAL, "how many cores did all ranks together keep busy on average?", "cores", "rank files: processor",
        lambda run, i: [total := sum(_cores(run, rank) for rank in range(run.workers)), total / run.workers,
                        run.workers]),
    "tokens_per_second": _Row(
        ("pipeline",), "tokens per second, without the first epoch if there are several?", "", "rank0.json: seconds",
        lambda run, i: [speed := epochs_of(run)[1].mean, speed / run.setting["tokens per example"], speed / 2]),
    "memory_at_the_peak": _Row(
        ("beyond",), "how much more memory than it keeps does rank 0 need at the peak of a step?", "MB",
        "rank0.json: memory",
        lambda run, i: [((peak := run.records[0]["memory"]["peak_bytes"])
                         - (kept := run.records[0]["memory"]["persistent_bytes"])) / 1e6, peak / 1e6, kept / 1e6]),
    "slowest_iteration": _Row(
        ALL, "which iteration after the first takes rank 0 longest (counted from 1)?", "", "rank0.json: seconds",
        lambda run, i: [f"iteration {n}" for n in (
            *(n + 2 for n in _largest(run.seconds[1:])[:2]), 1, len(run.seconds))]),
    "lowest_loss": _Row(
        SEVERAL, "in which iteration is the loss of the whole batch lowest?", "", "rank files: the mean over the ranks",
        lambda run, i: [f"iteration {n + 1}" for n in (
            _largest(run.losses)[-1], *(_largest(of["losses"])[-1] for of in run.records),
            *_largest(run.losses)[-3:])]),
    "longest_phase": _Row(
        ALL, "which phase takes rank 0 longest, on average without the first iteration?", "", "rank0.json: phases",
        lambda run, i: [PHASES[n] for n in _largest([_means(run, phase) for phase in PHASES])]),
    "best_epoch": _Row(
        ("task1",), "after which epoch is the metric highest for the first time?", "", "rank0.json: evaluations",
        lambda run, i: [f"epoch {n + 1}" for n in _largest([
            next(iter(of["metrics"].values())) for of in run.records[0]["evaluations"]])]),
}  # fmt: skip


def _last_to_arrive(subject: Subject, rng: random.Random) -> _Drawn:
    run, timeline = _timeline(subject, rng, *SEVERAL)
    number, by_rank = _messages(timeline, rng)
    index = rng.randrange(min(map(len, by_rank.values())))
    starts = {rank: boxes[index].start for rank, boxes in by_rank.items()}
    last = max(starts, key=lambda rank: starts[rank])
    text = f"{_name(run)}, step {number}: which rank arrives last at {by_rank[0][index].name} number {index + 1}?"
    return _Drawn(text, f"rank {last}", _ranks(run, last), "timeline.json: the latest start of this box")


def _longest_message(subject: Subject, rng: random.Random) -> _Drawn:
    run, timeline = _timeline(subject, rng, *SEVERAL)
    number, by_rank = _messages(timeline, rng)
    if len(by_rank[0]) < FEWEST:
        raise ValueError("too few to choose from")
    by_time = sorted(range(len(by_rank[0])), key=lambda i: by_rank[0][i].start - by_rank[0][i].end)
    wrong = [f"number {i + 1}" for i in [*by_time[1:3], len(by_rank[0]) - 1, 0] if i != by_time[0]]
    text = f"{_name(run)}, step {number}: which of rank 0's collectives takes longest (counted from 1)?"
    return _Drawn(text, f"number {by_time[0] + 1}", wrong, "timeline.json: boxes of rank 0's network row")


def _what_one_message_would_save(subject: Subject, rng: random.Random) -> _Drawn:
    run, timeline = _timeline(subject, rng, "task2b")
    number, by_rank = _messages(timeline, rng)
    times = [box.end - box.start for box in by_rank[0]]
    wrong = [sum(times), max(times), sum(times) / len(times), (sum(times) - max(times)) / run.workers]
    text = f"{_name(run)}, step {number}: how long do rank 0's messages take together, without the longest one?"
    return _Drawn(text, 1e3 * (sum(times) - max(times)), [1e3 * x for x in wrong], "timeline.json: network row", "ms")


def _who_waits_most(subject: Subject, rng: random.Random) -> _Drawn:
    run, timeline = _timeline(subject, rng, *SEVERAL)
    waits = {rank: sum(of.waiting or 0 for of in parts(timeline) if of.rank == rank) for rank in range(run.workers)}
    most = max(waits, key=lambda rank: waits[rank])
    text = f"{_name(run)}: which rank waits most in the steps of the timeline?"
    return _Drawn(text, f"rank {most}", _ranks(run, most), "rank files, timeline.steps: sums of waiting")


def _speed_up(subject: Subject, rng: random.Random) -> _Drawn:
    one, run = _run(subject, rng, "task1"), _run(subject, rng, *SEVERAL)
    factor = statistics.fmean(one.seconds[1:40]) / statistics.fmean(run.seconds[1:40])
    wrong = [1 / factor, factor / run.workers, float(run.workers), float(min(cores(run), run.workers * 2))]
    text = f"{_name(run)}: its speed-up over task 1, from the means of iterations 2 to 40?"
    return _Drawn(text, factor, wrong, "rank0.json of both runs: seconds")


def _line_of_a_call(subject: Subject, rng: random.Random) -> _Drawn:
    file = rng.choice(sorted(name for name in subject.code if re.match(r"task(2a|2b|3|4).*/run_glue\.py", name)))
    calls: dict[str, list[int]] = {}
    for number, line in enumerate(subject.code[file].splitlines(), start=1):
        if match := CALL.search(line):
            calls.setdefault(match[1] or match[2] or "DistributedDataParallel", []).append(number)
    name = rng.choice([call for call, lines in sorted(calls.items()) if len(lines) == 1])
    wrong = [f"line {lines[0]}" for call, lines in sorted(calls.items()) if call != name]
    rng.shuffle(wrong)
    return _Drawn(f"{file}: which line of yours calls {name}?", f"line {calls[name][0]}", wrong, file)


OTHERS: dict[str, Callable[[Subject, random.Random], _Drawn]] = {
    kind.__name__.strip("_"): kind
    for kind in (
        _last_to_arrive,
        _longest_message,
        _what_one_message_would_save,
        _who_waits_most,
        _speed_up,
        _line_of_a_call,
    )
}
