"""Stretches of time as (start, end) pairs: merging, subtracting and measuring them."""

from collections.abc import Iterable
from typing import Any

Span = tuple[float, float]


def spans_of(parts: Iterable[Any]) -> list[Span]:
    """Return the spans of boxes, messages and all else that has a `start` and an `end`."""
    return [(part.start, part.end) for part in parts]


def merged(spans: Iterable[Span]) -> list[Span]:
    """Return the same time as spans that neither overlap nor touch, in order."""
    disjoint: list[Span] = []
    for start, end in sorted(spans):
        if disjoint and start <= disjoint[-1][1]:
            disjoint[-1] = (disjoint[-1][0], max(disjoint[-1][1], end))
        elif end > start:
            disjoint.append((start, end))
    return disjoint


def without(spans: Iterable[Span], holes: Iterable[Span]) -> list[Span]:
    """Return the spans without the time that is in `holes`."""
    remaining, cut = [], merged(holes)
    for start, end in spans:
        for first, last in cut:
            if last <= start:
                continue
            if first >= end:
                break
            if first > start:
                remaining.append((start, first))
            start = max(start, last)
        if end > start:
            remaining.append((start, end))
    return remaining


def within(spans: Iterable[Span], limits: Span) -> list[Span]:
    """Return the parts of the spans that are inside `limits`."""
    first, last = limits
    return [(max(start, first), min(end, last)) for start, end in spans if start < last and end > first]


def duration(spans: Iterable[Span]) -> float:
    """Return the time in the spans; what is in several of them counts once."""
    return sum(end - start for start, end in merged(spans))
