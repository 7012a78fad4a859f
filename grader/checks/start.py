"""Judges the start of task 2b's run_gpt2.py: where its workers join (2b.6), and the processes it starts (2b.9)."""

import ast
import re
from collections.abc import Mapping
from types import MappingProxyType

from grader.checks.joining import check_address, check_identity, check_met, joins, run_join
from grader.grading import Grade
from grader.ranks.outcome import Result
from grader.verdicts import builds_on, last_words, not_attempted
from grader.wire.values import Fields

NOTHING: Mapping[str, str] = MappingProxyType({})
COURSE_HOSTS, COURSE_PORT = ("127.0.0.1", "localhost"), "11868"
WORKERS = 2  # of the whole script, see probes.start
PATIENCE = 3.0  # seconds in which all processes must be seen running at once
LOSS_ERROR = 1e-4  # of a loss; the workers' gradients are added up in another order than one worker's


def check_setup_address(grade: Grade) -> None:
    """setup(rank, world_size, backend) meets at the course's address, where none is set."""
    for world_size in (3, 1):
        _check_setup(grade, world_size, "gloo", {}, COURSE_HOSTS, COURSE_PORT)


def check_setup(grade: Grade) -> None:
    """setup(rank, world_size, backend) joins with what it was given, at an address or a port that is set already."""
    host, port = f"10.10.1.{grade.draw.integers(2, 250)}", str(grade.draw.integers(2000, 9000))
    both = {"MASTER_ADDR": host, "MASTER_PORT": port}
    _check_setup(grade, 2, "gloo", both, (host,), port)
    of_another = {"RANK": "1", "WORLD_SIZE": "2"}  # of a scheduler, or of an earlier call: the arguments count
    _check_setup(grade, 3, "nccl", both, (host,), port, of_another)
    _check_setup(grade, 2, "gloo", {"MASTER_PORT": port}, COURSE_HOSTS, port)
    _check_setup(grade, 2, "gloo", {"MASTER_ADDR": host}, (host,), COURSE_PORT)


def _check_setup(
    grade: Grade,
    world_size: int,
    backend: str,
    environment: dict[str, str],
    hosts: tuple[str, ...],
    port: str,
    ignored: Mapping[str, str] = NOTHING,
) -> None:
    """`environment` and `ignored` are set before setup(); of these it keeps the first, and does not read the second."""
    before = environment | dict(ignored)
    result = run_join(grade, "grader.probes.start:setup", world_size, backend=backend, environment=before)
    already = " and ".join(f"{name}={value}" for name, value in environment.items())
    for rank, join in enumerate(joins(grade, result)):
        check_identity(grade, rank, join, world_size, backend)
        if environment and join.data["address"] not in (accepted := [f"{host}:{port}" for host in hosts]):
            grade.fail(
                f"rank {rank}: {already} is set already, so expected the address {accepted[0]}, got "
                f"{join.data['address']} ({join.where}): keep existing values (os.environ.setdefault)"
            )
        check_address(grade, rank, join, tuple(f"{host}:{port}" for host in hosts))
    grade.must_return(result)
    for rank, value in enumerate(result.values):
        if not value["joined"]:
            grade.fail(f"rank {rank} is not in a process group of size {world_size} when setup() returns")
    check_met(grade, result)
    for rank, value in enumerate(result.values):
        if value["changed"]:
            grade.fail(f"setup() changes {value['changed'][0]} on rank {rank}, but must leave it unchanged")
        kept = {name: value["environment"][name] for name in environment}
        if kept != environment:
            grade.fail(f"{already} was already set, but setup() changes it to {kept}: keep existing values")


def check_started(grade: Grade) -> None:
    """start_workers starts a process for every rank, all before it waits for the first, and waits for all."""
    for world_size, slowest in ((3, 0), (2, 1), (1, 0)):
        _check_start(grade, world_size, slowest)


def _check_start(grade: Grade, world_size: int, slowest: int) -> None:
    _refuse_work_at_import(grade)
    patience = PATIENCE * grade.session.slowness
    setting = {"children": world_size, "slowest": slowest, "patience": patience}
    result = grade.run("grader.probes.start:workers", 1, **setting)
    grade.must_return(result)
    _check_processes(grade, world_size, result.values[0])
    check_counted(grade, result, world_size)
    check_numbers(grade, result, result.values[0]["numbers"], world_size, "run work(rank, config)")


def check_counted(grade: Grade, result: Result, wanted: int) -> None:
    """So many processes were there at once: as the system says where it can be asked, and not they themselves."""
    if 0 <= result.children < wanted:
        grade.fail(f"expected {wanted} processes to run at once, got {result.children}: start them all, then wait")


def check_numbers(grade: Grade, result: Result, shown: list[int], wanted: int, does: str) -> None:
    """Each of the started processes does so: it shows a number that only the system's count has told it."""
    seen = len(result.numbers & set(shown))
    if result.children >= 0 and seen != wanted:
        grade.fail(f"expected {wanted} processes that each {does}, got {seen}: start each with target=work")


def _refuse_work_at_import(grade: Grade) -> None:
    """Fails for a call of one of the file's own functions outside of `if __name__ == "__main__":`."""
    try:
        tree = ast.parse((grade.session.tree / grade.file).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return  # running it says what is wrong
    own = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    for statement in tree.body:
        if isinstance(statement, ast.Expr | ast.Assign | ast.For | ast.With | ast.Try):
            names = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)} & own
            if names:
                grade.fail(
                    f"{grade.file}:{statement.lineno} calls {min(names)}() when the file is imported, and every worker "
                    'imports it: put the call under `if __name__ == "__main__":`'
                )


def _check_processes(grade: Grade, world_size: int, value: Fields) -> None:
    if value["in_this_process"]:
        grade.fail("work() runs in the script's own process: pass target=work, not target=work(...), and start() it")
    if value["unfinished"]:
        grade.fail(f"{value['unfinished']} processes still run when start_workers returns: join all of them")
    started = sorted(value["ranks"])
    if -1 in started:
        grade.fail("work(rank, config) got something other than a rank first: pass args=(rank, config), in this order")
    if started != list(range(world_size)):
        grade.fail(f"expected work(rank, config) in {world_size} processes, ranks 0 to {world_size - 1}, got {started}")
    if not value["together"]:
        grade.fail("the processes run one after the other: start all of them before you wait for the first")
    if value["given"] != [str(world_size)]:
        grade.fail(f"work(rank, config): expected the config of the script, got {', '.join(value['given'])}")
    if value["strange"]:
        kinds = ", ".join(sorted(set(value["strange"])))
        grade.fail(f"expected start_workers() to return the list of processes, got a list of {kinds}")
    if value["returned"] != world_size:
        grade.fail(f"expected start_workers() to return {world_size} processes, got {value['returned']}")


def check_script(grade: Grade) -> None:
    """The whole script: two workers train as one worker would with the same examples."""
    grade.check_written(grade.file, "common/data_partition.py")  # the start alone takes many seconds
    _check_start(grade, 3, 0)  # wrongly started, the script's workers would wait for each other first
    slowness = grade.session.slowness
    told = {"drawn": int(grade.draw.integers(1 << 30)), "slowness": slowness}
    waits = {"children": WORKERS, "patience": PATIENCE * slowness}
    result = grade.run("grader.probes.start:script", 1, deadline=60.0, **told, **waits)
    stderr = result.ranks[0].stderr
    if todo := re.search(r"NotImplementedError: TODO ([0-9a-z]+\.[0-9]+)", stderr):
        raise not_attempted(grade.region) if todo[1] == grade.region else builds_on(todo[1])
    grade.must_return(result)
    value, said = result.values[0], last_words(stderr)
    if value["failed"]:
        grade.fail(f"the script ended with an error: {value['failed']}\n{said}")
    if value["records"] != WORKERS:
        grade.fail(f"expected the records of {WORKERS} workers, got {value['records']}\n{said}")
    check_counted(grade, result, WORKERS)
    check_numbers(grade, result, value["numbers"]["joined"], WORKERS, "join the group")
    check_numbers(grade, result, value["numbers"]["read"], WORKERS, "read half of the training data")
    (alone,) = grade.session.run("grader.probes.trusted:one_workers_losses", 1, told).values
    numbers = [len(losses) for losses in value["losses"]]
    if numbers != [len(alone)] * 2:
        grade.fail(f"expected {len(alone)} losses from each worker, got {numbers}")
    if value["losses"][0] == value["losses"][1]:
        grade.fail("both workers record the same losses: they train on the same examples")
    for step, (first, second, right) in enumerate(zip(*value["losses"], alone, strict=True), 1):
        mean = (first + second) / 2
        if not abs(mean - right) <= LOSS_ERROR * right:
            grade.fail(
                f"step {step}: the workers' mean loss is {mean:.6f}, but one worker with all examples has {right:.6f}: "
                "do the two together train on all of the data, and do they average gradients?"
            )
