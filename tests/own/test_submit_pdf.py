"""The report as a PDF: whatever a student writes becomes pages, and the same text gives the same bytes."""

import re
import zlib

import pytest
from markdown_it import MarkdownIt
from PIL import Image

from handin.pdf import _new_pages, _Writer, markdown_to_pdf

pytestmark = pytest.mark.medium

EVERYTHING = """# Title

Some *emphasis*, **strong**, ***both***, `code`, a [link](https://example.org) and <b>HTML</b>.
A second line; a hard break\\
here. Ω ± ≈ → ł and 汉字 and \U0001f600.

- one
- two
  1. deeper
  2. still

     a second paragraph
- three

> a quotation
> - with a list

| a | b |
|---|---|
| 1 |
| x `y` | **z** | too many |

```python
def f(x):
    return x  # a line that is much longer than the page is wide, and goes on LONG
```

    indented code

---

<!-- not to be seen -->

""".replace("LONG", "and goes on " * 20)
UNUSUAL = [
    "x" * 5000,
    "`" + "y" * 3000 + "`",
    "| " + " | ".join(["column"] * 40) + " |\n" + "|---" * 40 + "|\n" + "| " + " | ".join(["cell"] * 40) + " |\n",
    "| a |\n|---|\n" + "| " + "word " * 2000 + "|\n",
    "| a |\n|---|\n" + "| row |\n" * 300,
    "|  |\n|---|\n|  |\n",
    "# " + "long heading " * 60,
    "1. \n2. \n",
    "\x00\x07 control \u202e characters",
    "```\n" + "\t" * 50 + "x\n```\n",
    "".join("  " * i + "- item\n" for i in range(40)),  # the last one: Markdown is read to this depth and no further
]


def pages(pdf):
    return len(re.findall(rb"/Type /Page\b", pdf))


def pictures(pdf):
    return len(re.findall(rb"/Subtype /Image", pdf))


def streams(pdf):
    """Everything that is compressed in a PDF, unpacked."""
    unpacked = b""
    for part in re.findall(rb"stream\r?\n(.*?)\r?\nendstream", pdf, re.DOTALL):
        try:
            unpacked += zlib.decompress(part)
        except zlib.error:
            unpacked += part
    return unpacked


def test_whatever_markdown_has_becomes_pages_and_the_same_text_the_same_bytes(tmp_path):
    pdf = markdown_to_pdf("\n\n".join(UNUSUAL), tmp_path, "T", "José")

    assert pdf.startswith(b"%PDF-") and pages(pdf) > 12
    assert pages(markdown_to_pdf("", tmp_path, "T", "")) == 1
    assert len({markdown_to_pdf(EVERYTHING, tmp_path, "T", "José") for _ in range(2)}) == 1


def test_headings_are_in_the_outline(tmp_path):
    pdf = markdown_to_pdf("# One\n\n## Scalability\n\n### Deep\n\n###### Deeper\n", tmp_path, "T", "")

    text = pdf + streams(pdf)
    for heading in ("One", "Scalability", "Deep", "Deeper"):
        assert heading.encode() in text or heading.encode("utf-16-be") in text


def test_pictures_are_embedded_and_those_that_cannot_be_shown_are_left_out(tmp_path):
    folder = tmp_path / "report"
    (folder / "folder").mkdir(parents=True)
    (folder / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\nbroken")
    Image.new("RGB", (9, 9)).save(tmp_path / "outside.png")
    Image.new("RGB", (300, 200), "red").save(folder / "wide.png")
    Image.new("RGB", (20, 900), "blue").save(folder / "tall.png")
    left_out = ("none.png", "../outside.png", "broken.png", "folder", "https://example.org/x.png")

    text = "".join(f"![a]({source})\n\n" for source in left_out)
    pdf = markdown_to_pdf(f"{text}![a](wide.png)\n![b](tall.png)\n\n![c](wide.png)\n", folder, "T", "")

    assert pictures(pdf) == 2  # the second use of a picture refers to the first


@pytest.mark.parametrize("follows", ["![a](tall.png)\n", "| a | b |\n|---|---|\n" + "| 1 | 2 |\n" * 12])
@pytest.mark.parametrize("lines", range(20, 36, 5))
def test_no_heading_is_left_alone_at_the_foot_of_a_page(tmp_path, follows, lines):
    Image.new("RGB", (300, 260), "red").save(tmp_path / "tall.png")
    writer = _Writer(_new_pages("", ""), tmp_path)
    writer.blocks(
        MarkdownIt("commonmark").enable("table").parse("text\n\n" * lines + f"## Head\n\n### Below\n\n{follows}")
    )

    writer.pages.output()  # closes the fonts
    assert [section.page_number for section in writer.pages._outline] == [writer.pages.page_no()] * 2
