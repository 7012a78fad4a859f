"""The parser of regions: what it finds, what it refuses, and how bodies go in and come back out."""

import pytest

from common.errors import InputError
from course.table import load_course
from course.todo import find_blocks, replace_block
from staff.handout.regions import find_regions, replace_body, strip

SOLVED = '''\
def train(model, loss):
    """Docstring."""
    if model:
        # TODO(cos598d) 1.2: compute the gradients (2 lines)
        # BEGIN SOLUTION 1.2
        loss.backward()
        note = """first
            second"""
        # END SOLUTION 1.2
    return note
'''
BODY = 'loss.backward()\nnote = """first\n            second"""'


def handed_out(text: str, **options) -> str:
    return strip(text, "a.py", load_course(), **options)


def test_a_region_is_found_with_its_place_text_and_body():
    (region,) = find_regions(SOLVED, "a.py")

    assert (region.id, region.part, region.line, region.end_line) == ("1.2", 1, 4, 9)
    assert (region.todo, region.body) == ("compute the gradients (2 lines)", BODY)


TODO, BEGIN, END = "# TODO(cos598d) 1.2: x", "# BEGIN SOLUTION 1.2", "# END SOLUTION 1.2"
MISSPELT = {
    TODO: ["# todo(cos598d) 1.2: x", "# TODO(cos598d): x", "# TODO(cos589d) 1.2: x", "# TODO 1.2: x"],
    BEGIN: ["# begin solution 1.2", "# BEGIN SOLUTION 1.2:", "#BEGIN SOLUTION 1.2", "# BEGN SOLUTION 1.2"],
    END: ["# END SOLUTION", "# END SOLUTON 1.2", "# END TODO 1.2", "x = 1  # END SOLUTION 1.2"],
}


@pytest.mark.parametrize("marker, wrong", [(marker, wrong) for marker in MISSPELT for wrong in MISSPELT[marker]])
def test_a_misspelt_marker_is_refused_with_its_line(marker, wrong):
    with pytest.raises(InputError, match=r"^a\.py:\d: "):
        find_regions(f"{TODO}\n{BEGIN}\nx = 1\n{END}\n".replace(marker, wrong), "a.py")


ORDINARY = ("# TODO: later", "# end of the epoch", "# the solution of 2 equations", "# begin")


@pytest.mark.parametrize("text", [*ORDINARY, 'text = """\n# BEGIN SOLUTION 1.2\n# END SOLUTIN 1.2\n"""'])
def test_an_ordinary_comment_and_a_marker_inside_a_string_are_let_be(text):
    assert find_regions(f"{text}\n") == ()


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["y = 1", "# end solution"], "a.py:2: '# end solution' looks like a region marker"),  # nearly right
        ([TODO, "x = 1"], "a.py:1: expected '# BEGIN SOLUTION 1.2' below"),
        ([TODO, BEGIN, "x = 1"], "a.py:2: expected '# END SOLUTION 1.2' below"),
        ([BEGIN, "x = 1", END], "a.py:1: expected TODO, got BEGIN"),
        ([TODO, "", BEGIN, "x = 1", END], "a.py:3: expected BEGIN right below"),
        ([TODO, BEGIN, TODO, BEGIN, "x = 1", END], "a.py:3: expected END, got TODO 1.2 inside region 1.2 of line 1"),
        ([TODO, BEGIN, "x = 1", "# END SOLUTION 1.3"], "a.py:4: expected END 1.2, got END 1.3"),
        ([TODO, BEGIN, "# only words", END], "a.py:1: expected at least one line of code"),
        (["if 1:", f"  {TODO}", f"  {BEGIN}", "  x = 1", END, "  y = 1"], "a.py:5: expected the marker at the indent"),
        (["if 1:", f"  {TODO}", f"  {BEGIN}", "  x = 1", "y = 1", f"  {END}"], "a.py:2: expected the body at the"),
        (["if 1:", f"\t{TODO}", f"\t{BEGIN}", "\tx = 1", f"\t{END}"], "a.py:2: expected spaces before a marker"),
        ([TODO, BEGIN, "if 1:", "\tx = 1", END], "a.py:1: expected spaces in the region"),
        (["x = (", TODO], "a.py:"),
        ([f"x = 1  {TODO}"], "a.py:1: expected the marker on a line of its own"),
    ],
)
def test_a_malformed_region_is_refused_with_file_and_line(lines, message):
    with pytest.raises(InputError) as error:
        find_regions("\n".join(lines) + "\n", "a.py")

    assert str(error.value).startswith(message)


def test_a_long_or_quoted_todo_still_makes_one_valid_line_of_code():
    text = SOLVED.replace("compute the gradients", 'say "what" and \\ ' + "very long words " * 12)

    line = next(line for line in handed_out(text).split("\n") if "raise" in line)

    assert len(line) <= 120
    compile(line.strip(), "a.py", "exec")


def test_a_students_lines_come_back_as_they_were_written_and_go_to_another_indent_without_a_change_of_strings():
    block, second = find_blocks(handed_out(SOLVED + SOLVED, solved={"1.2"}))
    target = "# TODO(cos598d) 1.2: again\nraise NotImplementedError\n# END TODO 1.2\n"

    carried = replace_block(target, find_blocks(target)[0], block.body)

    assert block.body == BODY and block.attempted and (block.part, second.part) == (1, 2)
    assert carried == f"# TODO(cos598d) 1.2: again\n{BODY}\n# END TODO 1.2\n"


def test_blank_lines_before_a_body_do_not_change_its_strings():
    source = '# TODO(cos598d) 1.2: x\n\ntext = """a\n  b"""\n# END TODO 1.2\n'
    target = "if x:\n    # TODO(cos598d) 1.2: again\n    pass\n    # END TODO 1.2\n"

    carried = replace_block(target, find_blocks(target)[0], find_blocks(source)[0].body)

    assert '\n    text = """a\n  b"""\n' in carried


@pytest.mark.parametrize("body", ["", "# soon", 'raise NotImplementedError("TODO 1.2: compute")'])
def test_the_placeholder_or_nothing_is_not_an_attempt(body):
    assert not find_blocks(f"# TODO(cos598d) 1.2: x\n{body}\n# END TODO 1.2\n")[0].attempted


@pytest.mark.parametrize(
    "text", [f"{TODO}\ny = 1\n", f"{TODO}\n# TODO(cos598d) 1.3: x\n# END TODO 1.3\n", f"{TODO}\n# END TODO 1.3\n",
             "# END TODO 1.2\n", f"{TODO}\ny = (\n# END TODO 1.2\n"],
)  # fmt: skip
def test_a_students_file_without_matching_lines_is_an_error_with_file_and_line(text):
    with pytest.raises(InputError, match=r"^a\.py:\d+: "):
        find_blocks(text, "a.py")


def test_a_body_is_replaced_the_markers_stay_and_a_part_is_named_where_there_are_several():
    part = "# TODO(cos598d) 2a.2: a\n# BEGIN SOLUTION 2a.2\nx = 1\n# END SOLUTION 2a.2\n"

    text = replace_body(SOLVED, "a.py", "1.2", "if model:\n    note = 1\n")
    second = find_regions(replace_body(part + part, "a.py", "2a.2", "x = 2", part=2))

    assert "        if model:\n            note = 1\n        # END SOLUTION 1.2\n" in text
    assert [(region.part, region.body) for region in second] == [(1, "x = 1"), (2, "x = 2")]
    with pytest.raises(InputError, match="got 2"):
        replace_body(part + part, "a.py", "2a.2", "x = 2")
