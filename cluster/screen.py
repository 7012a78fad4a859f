"""Several ranks on one screen: cuts their output into lines, recognises progress bars, keeps one bar at the bottom."""

import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TextIO

MAX_LINE = 1 << 16  # bytes: a longer one is cut, so that a rank that never ends its line does not fill our memory

# How tqdm writes a bar: `Epoch: 10%|# | 1/10 [00:01<00:09, 1.1it/s]`, without a total `7it [00:01, 5.2it/s]`.
BAR = re.compile(r"[^|]*?(\d+%\|.*?\[|\d\w* \[\d\d:)[^\]]*\]?")
CURSOR_MOVES = re.compile(r"\x1b\[\d*[A-K]")


@dataclass(frozen=True)
class Line:
    """A line of output without its end, or one state of a progress bar."""

    text: str
    is_bar: bool = False


class Lines:
    """Cuts a stream of bytes into lines. What a carriage return overwrites is a progress bar."""

    def __init__(self) -> None:
        self.rest = b""
        self.after_return = False

    def feed(self, chunk: bytes) -> Iterator[Line]:
        """The lines that `chunk` completes; an empty chunk is the end of the stream and completes the last one."""
        *pieces, self.rest = re.split(rb"(\r\n|\r|\n)", self.rest + chunk)
        for text, end in zip(pieces[::2], pieces[1::2], strict=True):
            yield from self._cut(text, end == b"\r")
        if self.rest and (not chunk or len(self.rest) > MAX_LINE):
            yield from self._cut(self.rest, False)
            self.rest = b""
        elif self.rest and self.after_return:  # tqdm ends a bar when it draws the next: show it before that
            yield from (line for line in self._split_bar(self.rest) if line.is_bar)

    def _cut(self, raw: bytes, before_return: bool) -> Iterator[Line]:
        if self.after_return:
            yield from self._split_bar(raw)
        elif not before_return:
            yield from [Line(text) for text in [decode(raw)] if text or not raw]
        elif raw:
            yield Line(decode(raw), is_bar=True)
        self.after_return = before_return

    def _split_bar(self, raw: bytes) -> Iterator[Line]:
        """A line that began by overwriting: a bar, and perhaps a message that was printed right behind it."""
        text = decode(raw)
        bar = BAR.match(text)
        if bar:
            yield Line(bar[0].strip(), is_bar=True)
            text = text[bar.end() :]
        if text.strip():
            yield Line(text)


def decode(raw: bytes) -> str:
    return CURSOR_MOVES.sub("", raw.decode(errors="replace"))


class Screen:
    """Writes lines to `out` and `error`. On a terminal the bar stays below them; elsewhere it is not shown."""

    def __init__(self, out: TextIO, error: TextIO) -> None:
        self.out, self.error = out, error
        self.on_terminal = error.isatty()
        self.bar = ""

    def show(self, text: str, error: bool = False) -> None:
        """One line, above the bar."""
        self._erase_bar()
        stream = self.error if error else self.out
        print(text, file=stream, flush=True)
        self._draw_bar()

    def say(self, text: str) -> None:
        """The launcher's own words; they end the bar."""
        self._erase_bar()
        self.bar = ""
        print(text, file=self.error, flush=True)

    def show_bar(self, text: str) -> None:
        """A new state of the one bar."""
        if self.on_terminal and text != self.bar:
            self._erase_bar()
            self.bar = text
            self._draw_bar()

    def close(self) -> None:
        """Leave the last state of the bar on the screen, and the cursor below it."""
        if self.bar:
            print(file=self.error, flush=True)
            self.bar = ""

    def _erase_bar(self) -> None:
        if self.bar:
            print("\r\x1b[K", end="", file=self.error, flush=True)

    def _draw_bar(self) -> None:
        if self.bar:
            width = shutil.get_terminal_size().columns - 1
            print(self.bar[:width], end="", file=self.error, flush=True)
