"""Questions on a student's own runs: drawn from their code, records and timelines, with the answer and where to see it.

    draw(Subject(code, runs), 4, seed)

Each kind below is a function that returns one question. It computes the answer from the records; the wrong choices are
what usual mistakes would give: the other rank, the first iteration counted, a sum instead of a mean. Where these would
give the answer away by its size, other numbers are among them.
"""

import random
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from common.errors import InputError
from common.record import PHASES
from common.timeline.boxes import Box, Timeline
from common.timeline.parts import Parts, parts
from common.timeline.trace import read_trace
from handin.findings import cores
from handin.gpt2 import epochs_of
from handin.records import DAMAGED, Run, Runs

NAMES = {"task1": "task 1", "task2a": "task 2a", "task2b": "task 2b", "task3": "task 3 (DDP)", "task4": "task 4"}
SEVERAL = ("task2a", "task2b", "task3")
CLOSE = 0.08  # two numbers that differ by less than this share are one choice
CHOICES = 4
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
        """Return whether this is the letter of the answer, the answer itself, or a number close to it."""
        given = given.strip().casefold()
        if given in ("abcdefgh"[self.choices.index(self.answer)], self.answer.casefold()):
            return True
        try:
            value, right = float(given.split()[0]), float(self.answer.split()[0])
        except (ValueError, IndexError):
            return False
        return abs(value - right) <= CLOSE / 2 * abs(right)


@dataclass(frozen=True)
class _Drawn:
    """What a kind returns: numbers get `unit` and three digits; other choices are texts."""

    text: str
    answer: float | str
    wrong: Sequence[float | str]
    where: str
    unit: str = ""


Kind = Callable[[Subject, random.Random], _Drawn]
KINDS: list[Kind] = []


def _kind(function: Kind) -> Kind:
    KINDS.append(function)
    return function


def draw(subject: Subject, count: int, seed: str) -> list[OwnRunQuestion]:
    """Return up to `count` questions of different kinds; the same seed and records give the same ones.

    A kind whose records are missing is left out.
    """
    rng, questions = random.Random(seed), []
    for kind in rng.sample(KINDS, len(KINDS)):
        try:
            drawn = kind(subject, rng)
        except (*DAMAGED, InputError):
            continue
        if drawn.answer and len(choices := _choices(drawn, rng)) > 1:
            answer = choices[0]
            rng.shuffle(choices)
            questions.append(OwnRunQuestion(kind.__name__.strip("_"), drawn.text, tuple(choices), answer, drawn.where))
        if len(questions) == count:
            break
    return questions


def _choices(drawn: _Drawn, rng: random.Random) -> list[str]:
    """Return the answer and then wrong choices, each of which differs visibly from the others."""
    if isinstance(drawn.answer, str):
        return [*dict.fromkeys(map(str, (drawn.answer, *drawn.wrong)))][:CHOICES]
    kept = [drawn.answer]
    below = rng.randrange(CHOICES)  # drawn, so that nobody gets far by taking the second largest number each time
    for is_below, count in ((True, below), (False, CHOICES - 1 - below)):
        mistakes = [float(of) for of in drawn.wrong if (float(of) < drawn.answer) == is_below]
        others = [drawn.answer * (0.7 if is_below else 1.4) ** power for power in range(1, CHOICES + 2)]
        for value in (*mistakes, *others):
            new = all(abs(value - of) > CLOSE * max(abs(value), abs(of)) for of in kept)
            if new and count and not (drawn.unit == "%" and value > 100):
                kept.append(value)
                count -= 1
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


# --- Timelines ---


@_kind
def last_to_arrive(subject: Subject, rng: random.Random) -> _Drawn:
    run, timeline = _timeline(subject, rng, *SEVERAL)
    number, by_rank = _messages(timeline, rng)
    index = rng.randrange(min(map(len, by_rank.values())))
    starts = {rank: boxes[index].start for rank, boxes in by_rank.items()}
    last = max(starts, key=lambda rank: starts[rank])
    text = f"{_name(run)}, step {number}: which rank arrives last at {by_rank[0][index].name} number {index + 1}?"
    return _Drawn(text, f"rank {last}", _ranks(run, last), "timeline.json: the latest start of this box")


@_kind
def wait_of_a_rank(subject: Subject, rng: random.Random) -> _Drawn:
    run, timeline = _timeline(subject, rng, *SEVERAL)
    of = max(_of_step(timeline, rng), key=lambda part: part.waiting or 0)
    wrong = [of.exposed or 0, of.computing, (of.waiting or 0) + (of.exposed or 0), of.seconds]
    text = f"{_name(run)}, step {of.step}: how long does rank {of.rank} wait for ranks that have not arrived?"
    return _Drawn(text, 1e3 * (of.waiting or 0), [1e3 * x for x in wrong], "rank file, timeline.steps: waiting", "ms")


@_kind
def exposed_communication(subject: Subject, rng: random.Random) -> _Drawn:
    run, timeline = _timeline(subject, rng, *SEVERAL)
    of = rng.choice(_of_step(timeline, rng))
    wrong = [
        of.waiting or 0,
        (of.exposed or 0) + (of.waiting or 0),
        of.seconds - of.computing,
        of.hidden or of.computing,
    ]
    text = f"{_name(run)}, step {of.step}: how much communication of rank {of.rank} is exposed?"
    return _Drawn(text, 1e3 * (of.exposed or 0), [1e3 * x for x in wrong], "rank file, timeline.steps: exposed", "ms")


@_kind
def hidden_communication(subject: Subject, rng: random.Random) -> _Drawn:
    run, timeline = _timeline(subject, rng, "task3")
    of = max(_of_step(timeline, rng), key=lambda part: part.hidden or 0)
    wrong = [of.exposed or 0, (of.hidden or 0) + (of.exposed or 0), of.waiting or 0, of.computing]
    text = f"{_name(run)}, step {of.step}: how much of rank {of.rank}'s communication runs beside computing?"
    return _Drawn(text, 1e3 * (of.hidden or 0), [1e3 * x for x in wrong], "rank file, timeline.steps: hidden", "ms")


@_kind
def computing_share(subject: Subject, rng: random.Random) -> _Drawn:
    run, timeline = _timeline(subject, rng, *SEVERAL)
    of = rng.choice(_of_step(timeline, rng))
    share = of.computing / of.seconds
    wrong = [1 - share, share / run.workers, share + (of.waiting or 0) / of.seconds]
    text = f"{_name(run)}, step {of.step}: what share of its step does rank {of.rank} compute?"
    return _Drawn(text, 100 * share, [100 * x for x in wrong], "rank file, timeline.steps: computing / seconds", "%")


@_kind
def longest_message(subject: Subject, rng: random.Random) -> _Drawn:
    run, timeline = _timeline(subject, rng, *SEVERAL)
    number, by_rank = _messages(timeline, rng)
    by_time = sorted(range(len(by_rank[0])), key=lambda i: by_rank[0][i].start - by_rank[0][i].end)
    wrong = [f"number {i + 1}" for i in [*by_time[1:3], len(by_rank[0]) - 1, 0] if i != by_time[0]]
    text = f"{_name(run)}, step {number}: which of rank 0's collectives takes longest (counted from 1)?"
    return _Drawn(text, f"number {by_time[0] + 1}", wrong, "timeline.json: boxes of rank 0's network row")


@_kind
def what_one_message_would_save(subject: Subject, rng: random.Random) -> _Drawn:
    run, timeline = _timeline(subject, rng, "task2b")
    number, by_rank = _messages(timeline, rng)
    times = [box.end - box.start for box in by_rank[0]]
    wrong = [sum(times), max(times), sum(times) / len(times), (sum(times) - max(times)) / run.workers]
    text = f"{_name(run)}, step {number}: all of rank 0's messages but the longest take together"
    return _Drawn(text, 1e3 * (sum(times) - max(times)), [1e3 * x for x in wrong], "timeline.json: network row", "ms")


@_kind
def who_waits_most(subject: Subject, rng: random.Random) -> _Drawn:
    run, timeline = _timeline(subject, rng, *SEVERAL)
    waits = {rank: sum(of.waiting or 0 for of in parts(timeline) if of.rank == rank) for rank in range(run.workers)}
    most = max(waits, key=lambda rank: waits[rank])
    text = f"{_name(run)}: which rank waits most in the steps of the timeline?"
    return _Drawn(text, f"rank {most}", _ranks(run, most), "rank files, timeline.steps: sums of waiting")


@_kind
def longest_step(subject: Subject, rng: random.Random) -> _Drawn:
    run, timeline = _timeline(subject, rng, *SEVERAL, "pipeline")
    steps = sorted((step for step in timeline.steps if step.rank == 0), key=lambda step: step.start - step.end)
    wrong = [f"step {step.number}" for step in steps[1:]]
    text = f"{_name(run)}: which step of its timeline is rank 0's longest?"
    return _Drawn(text, f"step {steps[0].number}", wrong, "timeline.json: steps")


@_kind
def idle_stage(subject: Subject, rng: random.Random) -> _Drawn:
    run, timeline = _timeline(subject, rng, "pipeline")
    ranks = _of_step(timeline, rng)
    idle = {of.rank: ((of.waiting or 0) + (of.exposed or 0)) / of.seconds for of in ranks}
    rank, (k, m) = rng.choice(sorted(idle)), (run.workers, run.config["n_chunk"])
    wrong = [(k - 1) / (m + k - 1), (k - 1) / m, 1 - idle[rank], *(share for of, share in idle.items() if of != rank)]
    text = f"{_name(run)}, step {ranks[0].step}: for what share of the step does stage {rank} wait or communicate?"
    return _Drawn(text, 100 * idle[rank], [100 * x for x in wrong], "rank file, timeline.steps: waiting, exposed", "%")


# --- Records ---


@_kind
def mean_time(subject: Subject, rng: random.Random) -> _Drawn:
    run = _run(subject, rng, *NAMES)
    times = [1e3 * second for second in run.seconds]
    wrong = [statistics.fmean(times), sum(times[1:]) / len(times), max(times[1:]), min(times), times[0]]
    text = f"{_name(run)}: the mean time of rank 0's iterations without the first?"
    return _Drawn(text, statistics.fmean(times[1:]), wrong, "rank0.json: iterations, seconds", "ms")


@_kind
def slowest_iteration(subject: Subject, rng: random.Random) -> _Drawn:
    run = _run(subject, rng, *NAMES)
    by_time = sorted(range(1, len(run.seconds)), key=lambda i: -run.seconds[i])
    wrong = [f"iteration {i + 1}" for i in (by_time[1], 0, by_time[-1])]
    text = f"{_name(run)}: which iteration after the first takes rank 0 longest (counted from 1)?"
    return _Drawn(text, f"iteration {by_time[0] + 1}", wrong, "rank0.json: iterations, seconds")


@_kind
def first_iteration(subject: Subject, rng: random.Random) -> _Drawn:
    run = _run(subject, rng, *NAMES)
    mean = statistics.fmean(run.seconds[1:])
    wrong = [mean / run.seconds[0], run.seconds[0] / sum(run.seconds[1:]), len(run.seconds) - 1, 1.0]
    text = f"{_name(run)}: how many times as long as the mean of the others is rank 0's first iteration?"
    return _Drawn(text, run.seconds[0] / mean, wrong, "rank0.json: iterations, seconds")


@_kind
def loss_of_the_batch(subject: Subject, rng: random.Random) -> _Drawn:
    run = _run(subject, rng, *SEVERAL)
    i = rng.randrange(1, len(run.losses))
    losses = [record["losses"][i] for record in run.records]
    wrong = [*(f"{loss:.4f}" for loss in losses), f"{sum(losses):.4f}", f"{run.losses[i - 1]:.4f}"]
    text = f"{_name(run)}: the loss of the whole batch in iteration {i + 1}?"
    return _Drawn(text, f"{run.losses[i]:.4f}", wrong, "rank files: the mean over the ranks")


@_kind
def forgotten_division(subject: Subject, rng: random.Random) -> _Drawn:
    run = _run(subject, rng, *SEVERAL)
    i, n = rng.randrange(len(run.losses)), run.workers
    mean = run.losses[i]
    text = f"{_name(run)}: averaging the ranks' losses of iteration {i + 1} without dividing would give"
    return _Drawn(text, n * mean, [mean, mean / n, n * n * mean], "rank files: the sum over the ranks")


@_kind
def lowest_loss(subject: Subject, rng: random.Random) -> _Drawn:
    run = _run(subject, rng, *SEVERAL)
    order = sorted(range(len(run.losses)), key=lambda i: run.losses[i])
    alone = [min(range(len(of["losses"])), key=lambda i: of["losses"][i]) for of in run.records]
    wrong = [f"iteration {i + 1}" for i in [*alone, len(run.losses) - 1, order[1], order[-1]] if i != order[0]]
    text = f"{_name(run)}: in which iteration is the loss of the whole batch lowest?"
    return _Drawn(text, f"iteration {order[0] + 1}", wrong, "rank files: the mean over the ranks")


@_kind
def communication_share(subject: Subject, rng: random.Random) -> _Drawn:
    run = _run(subject, rng, "task2a", "task2b")
    rank = rng.randrange(len(run.records))
    seconds = [step["seconds"] for step in run.records[rank]["iterations"]]
    share = sum(_phases(run, "communication", rank)[1:]) / sum(seconds[1:])
    wrong = [1 - share, sum(_phases(run, "backward", rank)[1:]) / sum(seconds[1:]), share / run.workers,
             sum(_phases(run, "communication", rank)[1:]) / sum(seconds)]  # fmt: skip
    text = f"{_name(run)}: what share of rank {rank}'s iterations after the first is communication?"
    return _Drawn(text, 100 * share, [100 * x for x in wrong], f"rank{rank}.json: phases", "%")


@_kind
def root_and_other(subject: Subject, rng: random.Random) -> _Drawn:
    run = _run(subject, rng, "task2a")
    root, other = (statistics.fmean(_phases(run, "communication", rank)[1:]) for rank in (0, 1))
    wrong = [1e3 * root, 1e3 * other, 1e3 * (root + other), 1e3 * (root - other)]
    text = (
        f"{_name(run)}: how much longer is rank 1's communication than rank 0's in an iteration (mean, first left out)?"
    )
    return _Drawn(text, 1e3 * (other - root), wrong, "rank files: phases, communication", "ms")


@_kind
def longest_phase(subject: Subject, rng: random.Random) -> _Drawn:
    run = _run(subject, rng, *NAMES)
    means = {phase: statistics.fmean(_phases(run, phase)[1:]) for phase in PHASES}
    order = sorted(means, key=lambda phase: -means[phase])
    text = f"{_name(run)}: which phase takes rank 0 longest, on average without the first iteration?"
    return _Drawn(text, order[0], order[1:4], "rank0.json: phases")


@_kind
def speed_up(subject: Subject, rng: random.Random) -> _Drawn:
    one, run = _run(subject, rng, "task1"), _run(subject, rng, *SEVERAL)
    factor = statistics.fmean(one.seconds[1:40]) / statistics.fmean(run.seconds[1:40])
    wrong = [1 / factor, factor / run.workers, float(run.workers), float(min(cores(run), run.workers * 2))]
    text = f"{_name(run)}: its speed-up over task 1, from the means of iterations 2 to 40?"
    return _Drawn(text, factor, wrong, "rank0.json of both runs: seconds")


@_kind
def efficiency(subject: Subject, rng: random.Random) -> _Drawn:
    one, run = _run(subject, rng, "task1"), _run(subject, rng, *SEVERAL)
    factor = statistics.fmean(one.seconds[1:40]) / statistics.fmean(run.seconds[1:40])
    wrong = [100 * factor, 100 / factor, 100 / run.workers, 100.0]
    text = f"{_name(run)}: its speed-up over task 1 divided by the number of workers?"
    return _Drawn(text, 100 * factor / run.workers, wrong, "rank0.json of both runs: seconds", "%")


@_kind
def tokens_per_second(subject: Subject, rng: random.Random) -> _Drawn:
    run = _run(subject, rng, "pipeline")
    speed, length = epochs_of(run)[1].mean, run.setting["tokens per example"]
    wrong = [speed / length, speed / 2, speed * run.setting["total batch"], len(run.seconds) / sum(run.seconds)]
    text = f"{_name(run)}: tokens per second, without the first epoch if there are several?"
    return _Drawn(text, speed, wrong, "rank0.json: seconds; config: batch and length")


@_kind
def best_epoch(subject: Subject, rng: random.Random) -> _Drawn:
    run = _run(subject, rng, "task1")
    metric = {of["epoch"]: next(iter(of["metrics"].values())) for of in run.records[0]["evaluations"]}
    best = max(metric, key=lambda epoch: metric[epoch])
    wrong = [f"epoch {epoch}" for epoch in reversed(metric) if epoch != best]
    text = f"{_name(run)}: after which epoch is the metric highest for the first time?"
    return _Drawn(text, f"epoch {best}", wrong, "rank0.json: evaluations")


@_kind
def processor_use(subject: Subject, rng: random.Random) -> _Drawn:
    run = _run(subject, rng, *NAMES)
    rank = rng.randrange(len(run.records))
    used = run.records[rank]["processor"]
    wrong = [1.0, (used["machine"] or 0) / used["seconds"], float(run.workers), float(cores(run)), used["own"]]
    text = f"{_name(run)}: how many cores did rank {rank} keep busy on average while it trained?"
    return _Drawn(text, used["own"] / used["seconds"], wrong, f"rank{rank}.json: processor, own / seconds", "cores")


@_kind
def beside_the_ranks(subject: Subject, rng: random.Random) -> _Drawn:
    run = _run(subject, rng, *SEVERAL)
    used = [record["processor"] for record in run.records]
    total, seconds = sum(of["own"] for of in used), used[0]["seconds"]
    wrong = [total, total / seconds / run.workers, (used[0]["machine"] or 0) / seconds, float(run.workers)]
    text = f"{_name(run)}: how many cores did all ranks together keep busy on average?"
    return _Drawn(text, total / seconds, wrong, "rank files: processor, sum of own / seconds", "cores")


@_kind
def memory_at_the_peak(subject: Subject, rng: random.Random) -> _Drawn:
    run = _run(subject, rng, "beyond")
    memory, size = run.records[0]["memory"], 4 * run.setting["parameters"]
    wrong = [x / 1e6 for x in (memory["peak_bytes"], memory["persistent_bytes"], size, 4 * size)]
    text = f"`{run.name}`: how much more memory than it keeps does rank 0 need at the peak of a step?"
    return _Drawn(text, (memory["peak_bytes"] - memory["persistent_bytes"]) / 1e6, wrong, "rank0.json: memory", "MB")


@_kind
def line_of_a_call(subject: Subject, rng: random.Random) -> _Drawn:
    file = rng.choice(sorted(name for name in subject.code if re.match(r"task(2a|2b|3|4).*/run_glue\.py", name)))
    calls: dict[str, list[int]] = {}
    for number, line in enumerate(subject.code[file].splitlines(), start=1):
        if match := CALL.search(line):
            calls.setdefault(match[1] or match[2] or "DistributedDataParallel", []).append(number)
    name = rng.choice([call for call, lines in sorted(calls.items()) if len(lines) == 1])
    wrong = [f"line {lines[0]}" for call, lines in sorted(calls.items()) if call != name]
    rng.shuffle(wrong)
    return _Drawn(f"{file}: which line of yours calls {name}?", f"line {calls[name][0]}", wrong, file)
