"""The banks fit the solved tree, and at least one known mistake fails each graded test by name."""

from collections import Counter

import pytest

from common.paths import ROOT
from grader.tampering import look_at
from staff.grade.submissions import write_files
from staff.proofs.bank import changed_files, load_bank
from staff.proofs.grading_pool import collect
from staff.proofs.verdict import graders_of, judge

BANK = load_bank()
MISTAKES = [entry for entry in BANK if entry.is_mistake]


@pytest.mark.medium
@pytest.mark.parametrize("bank", sorted({(entry.kind, entry.bank) for entry in BANK}), ids="/".join)
def test_every_entry_fits_the_solved_tree_and_differs_from_it_and_no_variant_is_flagged(bank, tmp_path):
    for entry in (entry for entry in BANK if (entry.kind, entry.bank) == bank):
        write_files({entry.file: changed_files(entry)[entry.file]}, tmp_path)

        assert entry.is_mistake or look_at(tmp_path, [entry.file], ROOT) == [], entry


def test_every_mistake_names_words_and_no_two_entries_make_the_same_change():
    silent = [str(entry) for entry in MISTAKES if not all(all(words) and words for words in entry.fails.values())]
    changes = Counter(
        (entry.file, entry.patch.strip(), *sorted((place, body.strip()) for place, body in entry.bodies.items()))
        for entry in BANK
    )

    assert silent == []
    assert [change for change, count in changes.items() if count > 1] == []


@pytest.mark.medium
def test_every_graded_test_catches_a_wrong_program_by_name():
    """Those that fail many tests come first, races last; make bank grades them all."""
    tests, copies = collect()
    failed: set[str] = set()
    for entry in sorted(MISTAKES, key=lambda entry: (entry.race, -len(entry.fails))):
        if set(entry.fails) <= failed:
            continue

        verdict = judge(entry, graders_of(entry, tests, copies), [1])

        assert verdict.complaint == "", entry
        failed |= set(verdict.failed)
    assert set(tests) - failed == set()
