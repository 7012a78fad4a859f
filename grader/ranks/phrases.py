"""Makes sentences about ranks: `rank 0 waits in scatter #2 (lesson.py:88); ranks 1-3 wait in gather #2 (:85)`."""

from collections.abc import Iterable
from typing import NamedTuple

PLURAL = {"calls": "call", "joins": "join", "waits": "wait", "has": "have", "was": "were"}


class Phrase(NamedTuple):
    """What one rank does, and where: Phrase(0, "waits", "in scatter #2", "lesson.py:88")."""

    rank: int
    verb: str
    rest: str
    where: str = ""


def rank_names(ranks: Iterable[int]) -> str:
    """Return `rank 2` or `ranks 0, 2-4`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    names = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    only = len(runs) == 1 and len(runs[0]) == 1
    return f"rank{'' if only else 's'} {', '.join(names)}"


def sentence(phrases: Iterable[Phrase]) -> str:
    """Join the phrases, with one clause for all ranks that do the same; a file is named in full only the first time."""
    ranks: dict[tuple[str, str, str], list[int]] = {}
    for phrase in phrases:
        ranks.setdefault((phrase.verb, phrase.rest, phrase.where), []).append(phrase.rank)
    clauses, last_file = [], ""
    for (verb, rest, where), group in ranks.items():
        file, _, line = where.rpartition(":")
        place = f" ({':' + line if file == last_file else where})" if where else ""
        last_file = file or last_file
        verb = verb if len(group) == 1 else PLURAL.get(verb, verb)
        clauses.append(f"{rank_names(group)} {verb} {rest}{place}")
    return "; ".join(clauses)


def short(text: object, limit: int = 300) -> str:
    """Return something that a student's code returned as text, cut to `limit` characters for a message."""
    whole = text if isinstance(text, str) else repr(text)
    return whole if len(whole) <= limit else f"{whole[:limit]}... ({len(whole)} characters)"
