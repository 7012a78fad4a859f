"""The cheapest mistakes of the banks that fail every graded test at least once: what `make test` runs of the banks."""

from collections.abc import Iterable

from staff.proofs.bank import Entry

WAITING = ("deadlock", "timed out", "waits", "wait for", "did not end", "never", "still runs", "seconds")
PRICE_OF_WAITING = 10  # in test runs: such an entry is seen at a deadline


def cover(bank: Iterable[Entry]) -> list[Entry]:
    """Mistakes, in the order of the bank, so that each test that any of them must fail is failed by one of these.

    Greedy: always the entry with the lowest price for each test that is not failed yet. An entry that is a race is the
    last choice.
    """
    mistakes = [entry for entry in bank if entry.is_mistake]
    missing = {(entry.task, test) for entry in mistakes for test in entry.fails}
    chosen: set[int] = set()
    while missing:
        prices = []
        for number, entry in enumerate(mistakes):
            new = len(missing & {(entry.task, test) for test in entry.fails})
            if new:
                prices.append((entry.race, price(entry) / new, -new, number))
        number = min(prices)[-1]
        chosen.add(number)
        missing -= {(mistakes[number].task, test) for test in mistakes[number].fails}
    return [mistakes[number] for number in sorted(chosen)]


def price(entry: Entry) -> int:
    """What running an entry costs, in runs of a test."""
    words = " ".join(word.lower() for words in entry.fails.values() for word in words)
    return len(entry.fails) + (PRICE_OF_WAITING if any(word in words for word in WAITING) else 0)
