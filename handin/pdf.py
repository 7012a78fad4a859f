"""Turns the report's Markdown into a PDF: headings, paragraphs, lists, tables, code and pictures.

markdown-it-py reads the Markdown and fpdf2 writes the pages; both are pure Python. The fonts are matplotlib's, since
the fonts that every PDF reader has lack letters that names and formulas need. No date is written, so that the same
report gives the same bytes.
"""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

import matplotlib
from fpdf import FPDF
from fpdf.enums import TableBordersLayout
from fpdf.fonts import FontFace
from markdown_it import MarkdownIt
from markdown_it.token import Token
from PIL import Image

from handin.report_pictures import is_whole

_FONTS = Path(matplotlib.get_data_path(), "fonts", "ttf")
_SIZE = 10  # of running text, in points
_HEADINGS = {"h1": 18, "h2": 13, "h3": 11}
_LINES = 32.0  # millimetres of text that stay with a heading
_GAP = 4.0  # millimetres between two pictures
_NO_DATE = datetime(2020, 1, 1, tzinfo=UTC)  # a PDF has to name one


class _Pages(FPDF):
    """A4 with page numbers."""

    def footer(self) -> None:
        self.set_y(-14)
        self.set_font("Sans", size=8)
        self.cell(0, 8, f"{self.page_no()} / {{nb}}", align="C")


def markdown_to_pdf(text: str, folder: Path, title: str, author: str) -> bytes:
    """The PDF of a report; pictures are looked for from `folder`."""
    pages = _new_pages(title, author)
    _Writer(pages, folder).blocks(MarkdownIt("commonmark").enable("table").parse(text))
    return bytes(pages.output())


def _new_pages(title: str, author: str) -> FPDF:
    """The first page, empty."""
    pages = _Pages()
    pages.set_margins(20, 18)
    pages.set_auto_page_break(True, margin=18)
    pages.set_creation_date(_NO_DATE)
    pages.set_title(title)
    pages.set_author(author)
    for style, name in {"": "Sans", "B": "Sans-Bold", "I": "Sans-Oblique", "BI": "Sans-BoldOblique"}.items():
        pages.add_font("Sans", style, _FONTS / f"DejaVu{name}.ttf")
    pages.add_font("Mono", "", _FONTS / "DejaVuSansMono.ttf")
    pages.add_page()
    return pages


class _Writer:
    """Walks over the tokens of a Markdown text and writes them on pages."""

    def __init__(self, pages: FPDF, folder: Path) -> None:
        self.pages, self.folder = pages, folder

    def blocks(self, tokens: Sequence[Token]) -> None:
        rest = iter(tokens)
        depth, bullet = 0, ""
        places = {id(token): number for number, token in enumerate(tokens)}
        for token in rest:
            if token.type == "heading_open":
                self._keep_together(self._height_with_next(tokens[places[id(token)] :]))
                self._heading(token.tag, next(rest))
            elif token.type in ("bullet_list_open", "ordered_list_open"):
                depth += 1
            elif token.type in ("bullet_list_close", "ordered_list_close"):
                depth -= 1
                self.pages.ln(1.5)
            elif token.type == "list_item_open":
                bullet = f"{token.info}." if token.info else "•"
            elif token.type in ("fence", "code_block"):
                self._code(token.content)
            elif token.type == "table_open":
                self._table(rest)
            elif token.type == "inline":
                if token.content.endswith(":") and not depth:  # it speaks of what is next
                    self._keep_together(7 + self._height_with_next(tokens[places[id(token)] + 1 :]))
                self._paragraph(token.children or [], depth, bullet)
                bullet = ""

    def _heading(self, tag: str, token: Token) -> None:
        size = _HEADINGS.get(tag, _SIZE)
        self.pages.ln(2 if self.pages.get_y() > 30 else 0)
        level = int(tag[1]) - 1
        self.pages.start_section(_plain(token), level=min(level, 2), strict=False)
        self.pages.set_font("Sans", "B", size)
        self.pages.multi_cell(0, size * 0.5, _plain(token), new_x="LMARGIN", new_y="NEXT", align="L")
        self.pages.ln(1.5)

    def _height_with_next(self, tokens: Sequence[Token]) -> float:
        """Millimetres of a heading and of what must not be on the next page without it."""
        for number, token in enumerate(tokens):
            match token.type:
                case "heading_open":
                    below = self._height_with_next(tokens[number + 3 :])
                    return 0.5 * _HEADINGS.get(token.tag, _SIZE) + 4 + max(below, _LINES)
                case "fence" | "code_block":
                    return _code_height(token.content)
                case "table_open":
                    end = next(n for n, other in enumerate(tokens) if other.type == "table_close")
                    return _table_height(sum(other.type == "tr_open" for other in tokens[:end]))
                case "inline":
                    pictures = [child for child in token.children or [] if child.type == "image"][:2]
                    return self._picture_heights(pictures)[1] if pictures else _LINES
        return 0.0

    def _keep_together(self, millimetres: float) -> None:
        """Begin a new page if fewer than so many millimetres are left."""
        if self.pages.will_page_break(millimetres):
            self.pages.add_page()

    def _paragraph(self, children: Sequence[Token], depth: int, bullet: str) -> None:
        pictures = [token for token in children if token.type == "image"]
        for i in range(0, len(pictures), 2):
            self._pictures(pictures[i : i + 2])
        if pictures:
            return
        pages, indent = self.pages, 5.0 * depth
        left = pages.l_margin
        pages.set_left_margin(left + indent)
        pages.set_x(left + indent)
        if bullet:
            pages.set_font("Sans", size=_SIZE)
            pages.set_x(left + indent - 4)
            pages.write(5, bullet)
            pages.set_x(left + indent)
        self._runs(children)
        pages.ln(5 if depth else 7)
        pages.set_left_margin(left)
        pages.set_x(left)

    def _runs(self, children: Sequence[Token]) -> None:
        """Text in its styles, one after the other, broken into lines by fpdf2."""
        styles: list[str] = []
        for token in children:
            if token.type in ("strong_open", "em_open"):
                styles.append("B" if token.type == "strong_open" else "I")
            elif token.type in ("strong_close", "em_close"):
                styles.pop()
            elif token.type == "code_inline":
                self.pages.set_font("Mono", size=_SIZE - 1)
                self.pages.write(5, token.content)
            elif token.type in ("text", "softbreak", "hardbreak"):
                self.pages.set_font("Sans", "".join(sorted(set(styles))), _SIZE)
                self.pages.write(5, token.content or ("\n" if token.type == "hardbreak" else " "))

    def _code(self, content: str) -> None:
        pages = self.pages
        pages.set_font("Mono", size=8)
        pages.set_fill_color(244)
        lines = content.rstrip("\n").split("\n")
        self._keep_together(_code_height(content))
        for line in lines:
            pages.multi_cell(0, 4.2, line or " ", fill=True, new_x="LMARGIN", new_y="NEXT", align="L")
        pages.ln(2.5)

    def _pictures(self, pictures: Sequence[Token]) -> None:
        """Write one or two pictures next to each other, each with its caption below."""
        paths = self._paths(pictures)
        if not paths:
            self._runs([Token("text", "", 0, content=f"[no picture {pictures[0].attrs['src']}]")])
            self.pages.ln(7)
            return
        pages, gap = self.pages, _GAP
        width = self._picture_width(len(paths))
        heights, together = self._picture_heights(pictures)
        self._keep_together(together)
        x, y = pages.l_margin + (pages.epw - width * len(paths) - gap * (len(paths) - 1)) / 2, pages.get_y()
        bottom = y
        for picture, path, height in zip(pictures, paths, heights, strict=True):
            pages.image(path, x=x, y=y, w=width, h=height, keep_aspect_ratio=True, alt_text=picture.content)
            pages.set_font("Sans", "I", 8)
            pages.set_xy(x, y + max(heights) + 1)
            pages.multi_cell(width, 4.2, picture.content, align="C", new_x="LMARGIN", new_y="NEXT")
            bottom, x = max(bottom, pages.get_y()), x + width + gap
        pages.set_y(bottom + 3)

    def _paths(self, pictures: Sequence[Token]) -> list[Path]:
        """Return the paths of pictures; nothing if one of them cannot be shown."""
        paths = [(self.folder / str(picture.attrs["src"])).resolve() for picture in pictures]
        inside = self.folder.resolve()
        return paths if all(path.is_relative_to(inside) and is_whole(path) for path in paths) else []

    def _picture_width(self, count: int) -> float:
        return min(115.0, (self.pages.epw - _GAP * (count - 1)) / count)

    def _picture_heights(self, pictures: Sequence[Token]) -> tuple[list[float], float]:
        """Of each picture, and of all with their captions."""
        heights = [min(self._picture_width(len(pictures)) * _height_of(path), 100.0) for path in self._paths(pictures)]
        return heights, max(heights, default=0.0) + 12

    def _table(self, rest: Iterator[Token]) -> None:
        rows: list[list[str]] = []
        for token in rest:
            if token.type == "tr_open":
                rows.append([])
            elif token.type == "inline":
                rows[-1].append(_plain(token))
            elif token.type == "table_close":
                break
        pages = self.pages
        size = next((size for size in (8, 7.5, 7, 6.5) if _fits(rows, pages, size)), 6)
        widths = _column_widths(rows, pages, size)
        pages.set_font("Sans", size=size)
        if any(
            pages.get_string_width(cell) > 30 * width for row in rows for cell, width in zip(row, widths, strict=True)
        ):
            for row in rows:  # fpdf2 refuses a row that is higher than a page
                self._runs([Token("text", "", 0, content=" | ".join(row))])
                pages.ln(5)
            return
        self._keep_together(_table_height(len(rows)))
        with pages.table(
            col_widths=widths,
            width=min(sum(widths), pages.epw),
            align="LEFT",
            text_align="LEFT",
            line_height=4.4,
            padding=0.8,
            borders_layout=TableBordersLayout.SINGLE_TOP_LINE,
            headings_style=FontFace(emphasis="BOLD"),
            cell_fill_color=246,
            cell_fill_mode="ROWS",
        ) as drawn:
            for cells in rows:
                drawn_row = drawn.row()
                for cell in cells:
                    drawn_row.cell(cell)
        pages.ln(3)


def _fits(rows: Sequence[Sequence[str]], pages: FPDF, size: float) -> bool:
    """Return whether the page is wide enough without breaking a word."""
    return sum(_widths(rows, pages, size, whole_cells=False)) <= pages.epw


def _column_widths(rows: Sequence[Sequence[str]], pages: FPDF, size: float) -> list[float]:
    """As wide as the longest cell, and narrower where all columns together are wider than the page."""
    natural, words = (_widths(rows, pages, size, whole_cells=whole) for whole in (True, False))
    excess, slack = sum(natural) - pages.epw, [whole - word for whole, word in zip(natural, words, strict=True)]
    if excess <= 0:
        return natural
    if sum(slack) >= excess:  # break lines between words
        return [whole - free * excess / sum(slack) for whole, free in zip(natural, slack, strict=True)]
    return [longest * pages.epw / sum(words) for longest in words]


def _widths(rows: Sequence[Sequence[str]], pages: FPDF, size: float, whole_cells: bool) -> list[float]:
    """Of each column's longest cell, or longest word, with the space around it."""
    pages.set_font("Sans", "B", size)  # headings are bold
    columns = zip(*rows, strict=True)
    return [
        4.5
        + max(pages.get_string_width(text) for cell in column for text in ([cell] if whole_cells else cell.split(" ")))
        for column in columns
    ]


def _code_height(content: str) -> float:
    """Millimetres of code that are kept together."""
    return min(4.2 * (content.rstrip("\n").count("\n") + 1), 60)


def _table_height(rows: int) -> float:
    return min(9.0 * rows, 120)


def _height_of(path: Path) -> float:
    """As a part of the width."""
    with Image.open(path) as picture:
        return picture.height / picture.width


def _plain(token: Token) -> str:
    return "".join(child.content for child in token.children or [])
