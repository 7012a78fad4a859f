"""Run every attack of the bank, but those on a class, with all defences and without the ones it targets.

    python -m staff.attacks [--jobs N] [--mode root|user] [NAME...]

An attack that fails even without its defence proves nothing and is reported. What a rank is still believed is a row of
docs/grading_limits.md: an attack of such a row gains its points with all defences, and one that gains nothing shows
that the row can go. Default mode: both when run as root, otherwise user.
staff/banks/attacks/README.md describes the entries. Exit code 0 only if every attack that is no row's fails with all
defences and succeeds without its own, and every row's gains points and does no harm.
"""

import common.workers.environment  # isort: skip  # noqa: F401 (stops with a message if torch is missing)

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

from common.errors import InputError, exit_on_input_error
from staff.proofs import attack_bank
from staff.proofs.attack_bank import Attack
from staff.proofs.attack_runs import Gain, attempt
from staff.sandbox import kernel
from staff.sandbox.graded_run import CONFINING, become_other, probe

Row = tuple[Attack, Gain, Gain]


def try_both(attack: Attack) -> Row:
    """What an attack gains with all defences, and without its own; that of a row has no defence to be without."""
    defended = attempt(attack, ())
    return attack, defended, defended if attack.row else attempt(attack, attack.off)


def show(mode: str, attack: Attack, defended: Gain, undefended: Gain) -> None:
    if attack.row:
        stale = "" if defended.points else f"   <-- GAINS NOTHING: row {attack.row} can go"
        print(f"{mode} {attack.name}: {attack.what}{stale}\n     row {attack.row}: {defended}", flush=True)
        return
    complaint = "" if not defended else "   <-- SUCCEEDS DESPITE ALL DEFENCES"
    complaint += "" if undefended.has(attack.wants) else "   <-- FAILS EVEN WITHOUT ITS DEFENCE: proves nothing"
    print(f"{mode} {attack.name}: {attack.what}{complaint}")
    print(f"     with all defences: {defended}; without {', '.join(attack.off)}: {undefended}", flush=True)


def run_mode(mode: str, attacks: Sequence[Attack], jobs: int) -> dict[str, int]:
    """All attacks in this mode, as the user that this process is."""
    held = probe()
    print(f"{mode}: {held['level']}")
    missing = {wall for wall in CONFINING if not held[wall]} - {"user"}
    if missing:
        names = ", ".join(sorted(missing))
        print(f"{mode}: not available on this machine, so attacks against these may succeed: {names}")
    with ThreadPoolExecutor(jobs) as pool:
        rows = []
        for row in pool.map(try_both, [attack for attack in attacks if mode in attack.modes]):
            show(mode, *row)
            rows.append(row)
    return figures(rows)


def figures(rows: Iterable[Row]) -> dict[str, int]:
    """The totals: gained, leaked and left_running count attacks that had success with all defences; the points of
    believed ones are counted apart, in `rows`."""
    rows = list(rows)
    return {
        "attacks": len(rows),
        "rows": sum(bool(attack.row and defended.points) for attack, defended, _ in rows),
        "gained": sum(bool(defended.harm or (defended.points and not attack.row)) for attack, defended, _ in rows),
        "leaked": sum(bool(defended.secret) for _, defended, _ in rows),
        "left_running": sum(bool(defended.running) for _, defended, _ in rows),
        "unproven": sum(not undefended.has(attack.wants) for attack, _, undefended in rows),
    }


def as_user(attacks: Sequence[Attack], jobs: int) -> dict[str, int]:
    """The same in a process without any rights: that of a user who is nobody else."""
    if os.geteuid() != 0:
        return run_mode("user", attacks, jobs)
    sys.stdout.flush()
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork"), initializer=become_nobody) as pool:
        return pool.submit(run_mode, "user", attacks, jobs).result()


def become_nobody() -> None:
    become_other()
    kernel.prctl(kernel.DUMPABLE, 1)
    os.environ.pop("COS598D_CACHE", None)
    probe.cache_clear()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="names of attacks (default: all)")
    parser.add_argument(
        "--jobs", type=int, default=min(2, os.cpu_count() or 1), help="attacks that run in parallel (%(default)s)"
    )
    parser.add_argument("--mode", choices=["root", "user"], help="default: both when run as root, otherwise user")
    options = parser.parse_args(argv)
    attacks = attack_bank.load(options.names)
    on_a_class = [attack.name for attack in attacks if attack.named]
    if options.names and on_a_class:
        raise InputError(
            f"{on_a_class[0]} is an attack on a class: run `python -m staff.proofs.harmful_class --out DIR`"
        )
    attacks = [attack for attack in attacks if not attack.named]
    root = os.geteuid() == 0
    if options.mode == "root" and not root:
        raise InputError("--mode root needs root; run as root or use --mode user")
    modes = [options.mode] if options.mode else ["root", "user"] if root else ["user"]
    start, total = time.monotonic(), dict[str, int]()
    for mode in modes:
        run = as_user(attacks, options.jobs) if mode == "user" else run_mode(mode, attacks, options.jobs)
        print(f"{mode}: {json.dumps(run)}", flush=True)
        total = {name: count + total.get(name, 0) for name, count in run.items()}
    total |= {"runs": total["attacks"], "attacks": len(attacks), "seconds": round(time.monotonic() - start)}
    print(json.dumps(total))
    sys.exit(1 if any(total[name] for name in ("gained", "leaked", "left_running", "unproven")) else 0)


if __name__ == "__main__":
    assert Path("/proc/self").exists(), "the sandbox is Linux's"
    exit_on_input_error(main)
