"""Turns the report's Markdown into a PDF: markdown-it-py makes HTML of it, and fpdf2's write_html makes the pages.

The fonts are matplotlib's: those that every PDF reader has lack letters that names and formulas need. No date is
written, so that the same report gives the same bytes.
"""

import re
import unicodedata
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import matplotlib
from fontTools.ttLib import TTFont, TTLibError
from fpdf import FPDF, FontFace, TextStyle
from fpdf.errors import FPDFException
from markdown_it import MarkdownIt
from markdown_it.common.utils import escapeHtml
from markdown_it.token import Token
from matplotlib import font_manager
from PIL import Image

FONTS = Path(matplotlib.get_data_path(), "fonts", "ttf")
BOX = "\N{WHITE SQUARE}"  # in place of a letter that no font has
NO_FONT = BOX + " stands for {} letters that no font of this machine has ({}). Install one, such as Noto Sans CJK."
NO_DATE = datetime(2020, 1, 1, tzinfo=UTC)  # a PDF has to name one
SIZE, SMALL = 10.0, 8.5  # points: of text, and of tables and code
PADDING = 0.6  # millimetres around the text of a cell
ROOM, ROOM_BELOW = 45, 25  # millimetres; a heading, or anything below it, with less space begins on the next page
PIXELS = 150  # in an inch of our own figures
BEGINS = r"(?<!</h\d>\n)(?=<h\d>)|(?=<table|<p><strong>|<p><img)|(?<=</table>)"  # where a page may break
BLACK = "#000000"
HEADINGS = {"h1": 18.0, "h2": 14.0, "h3": 11.5, "h4": SIZE, "h5": SIZE, "h6": SIZE}
STYLES = {
    **{
        tag: TextStyle(color="#000000", font_style="B", font_size_pt=size, t_margin=5) for tag, size in HEADINGS.items()
    },
    "code": FontFace(family="Mono", size_pt=SMALL),
    "pre": TextStyle(font_family="Mono", font_size_pt=SMALL, t_margin=2),
    "blockquote": TextStyle(color="#404040", l_margin=5, t_margin=2),
}


class Pages(FPDF):
    """A4 with page numbers."""

    def footer(self) -> None:
        self.set_y(-14)
        self.set_font("Sans", size=8)
        self.cell(0, 8, f"{self.page_no()} / {{nb}}", align="C")


def markdown_to_pdf(text: str, folder: Path, title: str, author: str) -> bytes:
    """Return the PDF of a report; pictures are looked for from `folder`."""
    pages = Pages()
    pages.set_margins(20, 18)
    pages.set_auto_page_break(True, margin=18)
    pages.set_creation_date(NO_DATE)
    pages.set_title(title)
    pages.set_author(author)
    for family, file in {"Sans": "DejaVuSans", "Mono": "DejaVuSansMono"}.items():
        for style, name in {"": "", "B": "-Bold", "I": "-Oblique", "BI": "-BoldOblique"}.items():
            pages.add_font(family, style, FONTS / f"{file}{name}.ttf")
    missing = add_fonts_for(text + title + author, pages)
    pages.set_text_shaping(True)  # from right to left where a script runs so
    pages.add_page()
    if missing:
        text = "".join(BOX if letter in missing else letter for letter in text)
        names = ", ".join(unicodedata.name(letter, f"U+{ord(letter):04X}") for letter in sorted(missing)[:5])
        pages.set_font("Sans", size=SMALL)
        pages.write_html(f"<p>{NO_FONT.format(len(missing), names)}</p>")
    for part in filter(str.strip, re.split(BEGINS, to_html(text, folder, pages))):
        picture = re.match(r'<p><img [^>]* height="(\d+)"', part)
        room = ROOM if part.startswith("<h") else ROOM_BELOW
        if pages.will_page_break(int(picture[1]) / pages.k + 15 if picture else room):  # 15: the caption
            pages.add_page()
        pages.ln(3 if picture else 0)
        pages.set_font("Sans", size=SMALL if part.startswith("<table") else SIZE)
        try:
            pages.write_html(part, tag_styles=STYLES, li_prefix_color=BLACK)
        except (FPDFException, ValueError):  # of a table with a row that is higher than a page, or too many columns
            cells = re.sub(r"<[^>]*>", "", re.sub("</t[hd]>", " | ", part))
            pages.write_html(f"<p>{cells}</p>", tag_styles=STYLES)
    return bytes(pages.output())


def add_fonts_for(text: str, pages: FPDF) -> set[str]:
    """Add fonts of this system for letters that ours lack, as in Chinese names. Return letters that none has."""
    missing = {letter for letter in text if letter.isprintable()} - _letters_of(FONTS / "DejaVuSans.ttf")
    found: list[str] = []
    for path in sorted(font_manager.findSystemFonts(), key=_is_special) if missing else ():
        try:
            letters = _letters_of(Path(path)) & missing
            if letters:
                pages.add_font(f"Other{len(found)}", "", path)
                found.append(f"Other{len(found)}")
                missing -= letters
        except (OSError, TTLibError, FPDFException, NotImplementedError):  # a font of a kind that fpdf2 cannot embed
            continue
        if not missing:
            break
    pages.set_fallback_fonts(found, exact_match=False)
    return missing


def _letters_of(font: Path) -> set[str]:
    with TTFont(font, fontNumber=0, lazy=True) as opened:
        return set(map(chr, opened.getBestCmap() or ()))


def _is_special(path: str) -> tuple[bool, str]:
    """Fonts for every script come first, bold and slanted ones last."""
    name = Path(path).stem
    return re.search("bold|black|light|thin|italic|oblique|serif", name, re.IGNORECASE) is not None, name


def to_html(text: str, folder: Path, pages: FPDF) -> str:
    """Return the HTML of a Markdown text, in the subset that write_html knows. Tags and comments are no part of it."""
    parser = MarkdownIt("commonmark", {"html": False}).enable("table")
    tokens = parser.parse(re.sub(r"^<!--.*?-->$", "", text, flags=re.DOTALL | re.MULTILINE))
    depth, begin = 0, 0
    for number, token in enumerate(tokens):
        depth += token.nesting if token.type.startswith("list_item_") else 0
        if token.type.startswith("paragraph_") and depth:
            token.hidden = True  # write_html would put the text of an item below its bullet
        if token.type == "inline":
            children = [
                _picture(child, folder, pages) if child.type == "image" else child for child in token.children or []
            ]
            if tokens[number - 1].type in ("th_open", "td_open"):  # a cell may hold no tags
                children = [Token("text", "", 0, content="".join(child.content or " " for child in children))]
                tokens[number - 1].attrs = {"align": "left"}
            elif depth and tokens[number - 2].type == "paragraph_close":  # a further paragraph of an item
                children = [Token("hardbreak", "br", 0), *children]
            token.children = children
        if token.type == "table_open":
            begin = number
        if token.type == "table_close":
            _fit_table(tokens[begin:number], pages)
    return parser.renderer.render(tokens, parser.options, {})


def _picture(token: Token, folder: Path, pages: FPDF) -> Token:
    """Return a picture in its size, with its caption below, or as text if it cannot be shown; other tokens stay."""
    if token.type != "image":
        return token
    path = (folder / str(token.attrs["src"])).resolve()
    content = f"[no picture {escapeHtml(str(token.attrs['src']))}]"
    try:
        if path.is_relative_to(folder.resolve()):
            with Image.open(path) as picture:
                picture.load()
            width, height = picture.size
            scale = min(pages.epw * pages.k / width, 72 / PIXELS, 500 / height)  # neither wider nor higher than a page
            size = f'width="{scale * width:.0f}" height="{scale * height:.0f}"'
            content = f'<img src="{escapeHtml(str(path))}" {size}><em>{escapeHtml(token.content)}</em>'
    except (OSError, SyntaxError, ValueError):  # PIL says "broken PNG" by a SyntaxError
        pass  # said in the text
    return Token("html_inline", "", 0, content=content)


def _fit_table(tokens: Sequence[Token], pages: FPDF) -> None:
    """Give each column of a table its width: what its longest word needs, and then what its longest cell wants."""
    heads = [token for token in tokens if token.type == "th_open"]
    texts = [token.children[0].content for token in tokens if token.type == "inline" and token.children]
    columns = [texts[i :: len(heads)] for i in range(len(heads))]
    pages.set_font("Sans", "B", SMALL)  # as the head
    space, width = 2 * (pages.c_margin + PADDING), pages.get_string_width
    needs = [space + max(width(word) for cell in column for word in cell.split(" ")) for column in columns]
    wants = [space + max(map(width, column)) for column in columns]
    share = min(1.0, max(0.0, pages.epw - sum(needs)) / max(1.0, sum(wants) - sum(needs)))
    widths = [need + share * (want - need) for need, want in zip(needs, wants, strict=True)]
    for head, wide in zip(heads, widths, strict=True):
        head.attrs = {"align": "left", "width": f"{100 * wide / sum(widths):.2f}%"}
    share = min(100.0, 100 * sum(widths) / pages.epw)
    tokens[0].attrs = {"align": "left", "cellpadding": f"{PADDING}", "width": f"{share:.2f}%"}
