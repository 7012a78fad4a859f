"""Judges what averages gradients: sync_gradients and average_gradients, on drawn gradients, alone."""

import numpy as np

from grader.checks import diagnosis, reference
from grader.grading import Grade
from grader.ranks.outcome import Result
from grader.verdicts import Crashed, Verdict
from grader.wire import drawn, values
from grader.wire.values import Fields

GATHER_AND_SCATTER = {"gather", "scatter"}
WORLD_SIZES = (3, 4)  # 3 first: there no wrong factor looks like another; 2 and 1 come with check_any_size_and_type
ODD_SIZES = (3,)  # which gradients are missing has nothing to do with the number of workers
PLAIN: Fields = {
    "shapes": [list(shape) for shape in drawn.SHAPES],
    "frozen": [],
    "without": [[], []],  # of each round: the function is called twice, as in a training loop
    "zero": [],
    "tied": False,
    "dtype": "float32",
}
ODD = PLAIN | {
    "shapes": [[4, 3], [5], [4, 3], [2, 2], [3, 5], [6], [4, 3]],
    "frozen": [1],
    "without": [[3, 5], [0, 5]],
    "zero": [2],
    "tied": True,
}
# 2.6 MB beside some bytes: more than a usual bucket. One call is enough, and takes half the time.
LARGE = PLAIN | {"shapes": [[3], [640, 1024], [2, 4], [5]], "without": [[]]}
HALF = [PLAIN | {"dtype": "bfloat16"}, PLAIN | {"dtype": "float16"}]
WORDS_OF_CRASHES = {
    "must be alike, got ()": "mean() without a dimension also averages the elements: pass the workers' dimension",
    "gather_list`` must be": "rank 0 is the root of the gather: dst=0, and the list on rank 0 only",
    "scatter_list`` must be": "rank 0 is the root of the scatter: src=0, and the list on rank 0 only",
}


def averaged(grade: Grade, function: str, world_size: int, setting: dict) -> Result:
    """One run of the student's function. Raises the verdict if it did not return on every rank."""
    each = inputs(grade, world_size, setting)
    result = grade.run("grader.probes.sync:average", world_size, payloads=True, function=function, each=each, **setting)
    if verdict := grade.verdict(result):
        raise _explained(verdict)
    return result


def _explained(verdict: Verdict) -> Verdict:
    """A crash whose message is torch's, with the reason before it."""
    reasons = [reason for words, reason in WORDS_OF_CRASHES.items() if words in str(verdict)]
    return Crashed(f"{reasons[0]}\n{verdict}") if reasons and isinstance(verdict, Crashed) else verdict


def inputs(grade: Grade, world_size: int, setting: dict) -> list[list[list[np.ndarray]]]:
    """[rank][round][parameter]: gradients before they are averaged; those of `zero` are zero on the last rank alone."""
    rounds = range(len(setting["without"]))
    each = [
        [drawn.gradients(grade.seed + 1_000_003 * number, rank, setting["shapes"]) for number in rounds]
        for rank in range(world_size)
    ]
    for mine in each[-1]:
        for k in setting["zero"]:
            mine[k] = np.zeros_like(mine[k])
    dtype = setting["dtype"]
    return [
        [[np.asarray(values.to_array(dtype, [*x.shape], values.to_bytes(x, dtype))) for x in mine] for mine in rounds]
        for rounds in each
    ]


def kept(setting: dict, number: int) -> list[int]:
    """The parameters that have a gradient in a round."""
    left_out = [*setting["frozen"], *setting["without"][number]]
    return [k for k in range(len(setting["shapes"])) if k not in left_out]


def check_mean(
    grade: Grade, function: str, setting: dict = PLAIN, world_sizes: tuple[int, ...] = WORLD_SIZES,
    by: set[str] | None = None,
) -> None:  # fmt: skip
    """Every rank must hold the mean in every param.grad, and None where there was none; all else stays as it is.

    `by`: the collectives that the lesson is about, where the mean counts only with them.
    """
    for world_size in world_sizes:
        result = averaged(grade, function, world_size, setting)
        each = inputs(grade, world_size, setting)
        for number in range(len(setting["without"])):
            got = [rounds[number] for rounds in result.values]
            _check_round(grade, result, setting, number, got, [rounds[number] for rounds in each])
        must_be_by_hand(grade, result)
        if by:
            must_use(grade, result, by)


def must_be_by_hand(grade: Grade, result: Result) -> None:
    """Fails if a library's function makes a collective: what it computes is no work of the student's."""
    for rank in result.ranks:
        other = next((call for call in rank.calls if call.inside and call.name != "init_process_group"), None)
        if other:
            grade.fail(
                f"{other.name} is called inside {other.inside}{f' ({other.where})' if other.where else ''}, not by "
                "your own line: average the gradients with torch.distributed's collectives"
            )


def must_use(grade: Grade, result: Result, names: set[str]) -> None:
    """Fails if workers exchange anything with other collectives than these."""
    used = names_used(result)
    if len(result.ranks) > 1 and used != names:
        grade.fail(f"expected {_words(names)} and nothing else, got {_words(used)}")


def _check_round(
    grade: Grade, result: Result, setting: dict, number: int, got: list[dict], inputs: list[list[np.ndarray]]
) -> None:
    names = kept(setting, number)
    for rank, value in enumerate(got):
        if value["moved"]:
            grade.fail(f"the parameters themselves changed on rank {rank}: average only param.grad")
        for k in set(range(len(setting["shapes"]))) - set(names):
            if value["grads"][k] is not None:
                what = "is frozen" if k in setting["frozen"] else "had no gradient"
                grade.fail(f"parameter {k} {what} on every worker, but has a gradient on rank {rank} now")
    means, grads = [value["grads"] for value in got], [[mine[k] for k in names] for mine in inputs]
    again = (
        "in the second call, with different gradients: do not reuse anything from the first call\n" if number else ""
    )
    if setting["dtype"] == "float32":
        check_means(grade, result, [[mine[k] for k in names] for mine in means], grads, names, again)
    else:
        _check_half(grade, setting["dtype"], got, inputs)
    for rank, value in enumerate(got):
        if value["changed"]:
            grade.fail(f"averaging changes {value['changed'][0]} on rank {rank}, but must leave it unchanged")


def _check_half(grade: Grade, dtype: str, got: list[dict], inputs: list[list[np.ndarray]]) -> None:
    """As exact as a sum in a 16-bit type can be, and of that type."""
    for rank, value in enumerate(got):
        for k, mean in enumerate(reference.means(inputs)):
            if value["dtypes"][k] != dtype:
                grade.fail(f"expected parameter {k}'s gradient in {dtype}, got {value['dtypes'][k]} on rank {rank}")
            limit = 0.04 * np.abs([mine[k] for mine in inputs]).max(axis=0) + 1e-6
            mine = value["grads"][k]
            if np.shape(mine) != mean.shape or not np.all(np.abs(np.asarray(mine, np.float64) - mean) <= limit):
                words = diagnosis.parameter_words(f"parameter {k}", mine, mean)
                grade.fail(f"gradients of {dtype}: expected the mean of all workers on rank {rank}, {words}")


def check_any_size_and_type(grade: Grade, function: str, by: set[str] | None = None) -> None:
    """The mean of a tensor of megabytes beside small ones, of 16-bit gradients, and for one worker."""
    check_mean(grade, function, LARGE, (2,), by)
    for setting, world_size in zip(HALF, (3, 2), strict=True):
        check_mean(grade, function, setting, (world_size,), by)
    check_mean(grade, function, PLAIN, (1,), by)


def check_means(grade: Grade, result: Result, got: list, inputs: list, names: list, when: str = "") -> None:
    """Fails with the first difference between `got[rank][k]` and the mean, and the mistake that it looks like."""
    means = reference.means(inputs)
    total = reference.norm({str(k): mean for k, mean in enumerate(means)})
    for rank, mine in enumerate(got):
        for k, mean in enumerate(means):
            if reference.close(mine[k], mean, total):
                continue
            where = diagnosis.parameter_words(f"parameter {names[k]}", mine[k], mean)
            unsent = diagnosis.unsent(result, inputs)
            cause = diagnosis.forgotten_waits(result) or diagnosis.name_wrong_mean(got, inputs, unsent)
            text = f"{when}expected the mean of {len(inputs)} workers' gradients; on rank {rank}, {where}"
            grade.fail(f"{cause}\n{text}" if cause else text)


def bytes_handed_in(result: Result, name: str) -> list[int]:
    """Per rank, the bytes of all calls of one operation."""
    return [sum(call.sent for call in rank.calls if call.name == name) for rank in result.ranks]


def names_used(result: Result) -> set[str]:
    """The operations that were called, without the join and barriers."""
    return {call.name for rank in result.ranks for call in rank.calls} - {"init_process_group", "barrier"}


def size_of(setting: dict) -> int:
    """Bytes of the gradients of all rounds in float32."""
    rounds = [kept(setting, number) for number in range(len(setting["without"]))]
    return sum(4 * int(np.prod(setting["shapes"][k])) for names in rounds for k in names)


def check_gather_and_scatter(grade: Grade, function: str) -> None:
    """Rank 0, and no other, gathers every gradient once and scatters a list of as many means."""
    for world_size in (3, 4):
        result = averaged(grade, function, world_size, PLAIN)
        used, size = names_used(result), size_of(PLAIN)
        must_use(grade, result, GATHER_AND_SCATTER)
        must_be_by_hand(grade, result)
        roots = {call.root for rank in result.ranks for call in rank.calls if call.name in used}
        if roots != {0}:
            grade.fail(f"expected rank 0 to gather and to scatter, got the roots {sorted(map(str, roots))}")
        _compare(grade, "gather", bytes_handed_in(result, "gather"), [size] * world_size)
        _compare(grade, "scatter", bytes_handed_in(result, "scatter"), [world_size * size] + [0] * (world_size - 1))
        check_handed_in(grade, result, PLAIN, "gather")
        check_used(grade, result, PLAIN)


def check_reduced_once(grade: Grade, function: str, setting: dict = PLAIN) -> None:
    """All gradients are reduced once: by all_reduce, or by reduce and broadcast."""
    for world_size in (3, 4):
        result = averaged(grade, function, world_size, setting)
        used, size = names_used(result), size_of(setting)
        name = "all_reduce" if used == {"all_reduce"} else "reduce"
        if used not in ({"all_reduce"}, {"reduce", "broadcast"}):
            grade.fail(f"expected the gradients to be reduced with all_reduce, got {_words(used)}")
        must_be_by_hand(grade, result)
        _compare(grade, name, bytes_handed_in(result, name), [size] * world_size)
        if name == "reduce" and sum(bytes_handed_in(result, "broadcast")) != size:
            grade.fail("expected each sum to be broadcast once")
        check_handed_in(grade, result, setting, name)
        check_used(grade, result, setting)


def check_handed_in(grade: Grade, result: Result, setting: dict, name: str) -> None:
    """What each rank hands to these collectives is its own gradients: in any order and cut, times one factor."""
    each = inputs(grade, len(result.ranks), setting)
    for rank, mine in enumerate(result.ranks):
        sent = [call.sent_arrays().ravel() for call in mine.calls if call.name == name]
        own = [rounds[k].ravel() for number, rounds in enumerate(each[rank]) for k in kept(setting, number)]
        got, right = (_sorted(arrays) for arrays in (sent, own))
        factor = np.linalg.norm(right) / max(float(np.linalg.norm(got)), 1e-30)
        if got.shape != right.shape or not np.allclose(got * factor, right, rtol=1e-4, atol=0):
            grade.fail(f"what rank {rank} passes to {name} is not its own gradients")


def check_used(grade: Grade, result: Result, setting: dict) -> None:
    """What was sent counts only where it was used: each rank holds the mean of all gradients, times one factor."""
    each = inputs(grade, len(result.ranks), setting)
    for rank, rounds in enumerate(result.values):
        places = [(number, k) for number in range(len(rounds)) for k in kept(setting, number)]
        got = [rounds[number]["grads"][k] for number, k in places]
        means = reference.means([[mine[number][k] for number, k in places] for mine in each])
        used = all(np.shape(mine) == mean.shape for mine, mean in zip(got, means, strict=True))
        if used:
            held, right = (np.concatenate([np.ravel(x).astype(np.float64) for x in arrays]) for arrays in (got, means))
            factor = held @ right / (right @ right)
            used = factor > 0 and np.linalg.norm(held - factor * right) <= 1e-4 * factor * np.linalg.norm(right)
        if not used:
            grade.fail(
                f"rank {rank} does not use what was sent: its gradients are neither the mean nor the sum "
                "of all workers' gradients"
            )


def _sorted(arrays: list[np.ndarray]) -> np.ndarray:
    """All numbers but zeros, which may fill a buffer up."""
    flat = np.concatenate([array.astype(np.float64) for array in arrays]) if arrays else np.empty(0)
    return np.sort(flat[flat != 0])


def _compare(grade: Grade, name: str, got: list[int], expected: list[int]) -> None:
    for rank, (mine, right) in enumerate(zip(got, expected, strict=True)):
        if not right <= mine <= 1.02 * right:
            relation = f"{mine / right:.2f} times the expected {right}" if right else "expected 0"
            grade.fail(f"rank {rank} passes {mine} bytes to {name}, {relation}: send each gradient once")


def _words(names: set[str]) -> str:
    return " and ".join(sorted(names)) or "no collective at all"
