"""What students read has short sentences and no phrase of staff/tests/old_phrases.txt; the checks find a wrong text."""

import re

import pytest

from common.paths import ROOT
from staff.tests.student_texts import Sentence, sentences_of, student_sentences

MOST_WORDS = 35
PHRASES = dict(
    line.split(" -> ")
    for line in (ROOT / "staff" / "tests" / "old_phrases.txt").read_text(encoding="utf-8").splitlines()
    if line and not line.startswith("#")
)


@pytest.fixture(scope="module")
def texts() -> list[Sentence]:
    return student_sentences()


def long_sentences(sentences: list[Sentence]) -> list[str]:
    return [f"{s.file}:{s.line}: {s.words} words: {s.text}" for s in sentences if s.words > MOST_WORDS]


def old_phrases(sentences: list[Sentence]) -> list[str]:
    return [
        f"{s.file}:{s.line}: {phrase!r}, write: {better}: {s.text}"
        for s in sentences
        for phrase, better in PHRASES.items()
        if re.search(rf"(?<![\w-]){re.escape(phrase)}(?![\w-])", re.sub(r"`[^`]*`", "code", s.text), re.IGNORECASE)
    ]


def test_no_sentence_that_a_student_reads_is_longer_than_35_words(texts):
    assert long_sentences(texts) == []


def test_no_old_phrase_is_in_what_a_student_reads(texts):
    assert old_phrases(texts) == []


def test_readmes_docstrings_help_and_hints_are_read(texts):
    files = {sentence.file for sentence in texts}

    assert {"README.md", "docs/glossary.md", "common/arguments.py", "course.toml, hints of 1.1"} <= files
    assert any(s.text == "abort if no step completes within this many seconds" for s in texts)
    assert not any("grader/" in file for file in files)


LONG = "word " * 36
WRONG = [
    ("a.md", f"# Title\n\nShort. {LONG}\n"),
    ("a.md", f"| cell | {LONG} |\n"),
    ("a.py", f'def f():\n    """Short.\n\n    {LONG}\n    """\n'),
    ("a.py", f"x = 1\n# {LONG}\n"),
    ("a.py", f'parser.add_argument("--x", help="{LONG}")\n'),
    ("a.py", f'raise InputError(f"{{x}} {LONG}")\n'),
]


@pytest.mark.parametrize(("name", "text"), WRONG)
def test_a_long_sentence_is_found(name, text):
    assert len(long_sentences(sentences_of(text, name))) == 1
    assert long_sentences(sentences_of(text.replace(LONG, "word. " * 3), name)) == []


@pytest.mark.parametrize(("name", "text"), WRONG)
def test_an_old_phrase_is_found(name, text):
    assert len(old_phrases(sentences_of(text.replace(LONG, "The line Goes  on."), name))) == 1


def test_code_drawings_and_solutions_are_not_sentences():
    drawing = f'"""Short.\n\n    {LONG}\n"""\n'
    solution = f"# BEGIN SOLUTION 1.1\n# {LONG}\n# END SOLUTION 1.1\n"

    assert long_sentences(sentences_of(f"```\n{LONG}\n```\n`{LONG}`\n", "a.md")) == []
    assert long_sentences(sentences_of(drawing + solution, "a.py")) == []
