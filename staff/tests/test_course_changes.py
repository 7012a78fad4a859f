"""A course is changed in course.toml alone: handout, graders and READMEs follow."""

import json
import re
import subprocess
import sys
import tomllib
from collections import Counter

import pytest

from common.errors import InputError
from common.paths import ROOT
from course.choices import scaled
from course.table import load_course, read_course, score_of
from staff.course import table
from staff.grade.submissions import clean_files
from staff.handout.assemble import assemble
from staff.tests.handouts import copied

COURSE = load_course()


@pytest.fixture
def tree(tmp_path):
    """A copy of what git tracks, whose course.toml may be changed."""
    return copied(tmp_path)


def change(tree, change_text):
    path = tree / "course.toml"
    path.write_text(change_text(path.read_text(encoding="utf-8")), encoding="utf-8")


def choose(text, **values):
    """The table with other values in its first lines."""
    for key, value in values.items():
        text, count = re.subn(rf"\n{key} = .*", f"\n{key} = {json.dumps(value)}", text, count=1)
        assert count == 1, key
    return text


def rows(path, heading):
    """The cells of the first table under a heading of a README, without its first two lines."""
    section = (ROOT / path).read_text(encoding="utf-8").split(f"## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_the_tables_of_regions_are_that_of_the_course():
    bonus = str(sum(COURSE.regions[id].points for id in COURSE.bonus_regions))
    *table, total, of_bonus = rows("README.md", "Regions and points")
    *of_beyond, sum_of_beyond = rows("beyond/README.md", "The regions")

    assert [total[-1], of_bonus[-1], sum_of_beyond[-1]] == [str(COURSE.total), bonus, bonus]
    documented = [(id, file, points) for id, _, file, points in [*table, *of_beyond]]
    assert documented == [(region.id, region.file, str(region.points)) for region in COURSE.regions.values()]


def test_make_demo_runs_the_same_command_in_the_handout():
    """The README describes one demo to both, so both Makefiles must run it."""
    texts = [(ROOT / path).read_text(encoding="utf-8") for path in ("Makefile", "staff/handout/files/Makefile")]

    one, other = (re.findall(r"^demo: setup\n\t(.*)$", text, re.MULTILINE) for text in texts)
    assert one and one == other


# --- what the first lines say ---


def edited(tmp_path, **values):
    """What is read of this course with other first lines, and every contradiction in it."""
    text = (ROOT / "course.toml").read_text(encoding="utf-8")
    due = values.pop("due", {})
    lines = "".join(f"due.{task} = {date}\n" for task, date in due.items())
    (tmp_path / "course.toml").write_text(choose(text, **values).replace("\ncarried", f"\n{lines}carried", 1))
    return read_course(tmp_path / "course.toml")


def test_the_first_25_lines_are_the_course_and_the_rest_of_the_table_is_not_needed_to_change_it():
    first = "".join((ROOT / "course.toml").read_text(encoding="utf-8").splitlines(keepends=True)[:25])

    table = tomllib.loads(first.partition("\n# === ")[0])
    assert {"name", "title", "tasks", "graded", "total", "bonus"} <= table.keys() and "due.1 = " in first
    assert "[task." not in first


def test_the_table_has_each_task_with_its_points_and_date_once_and_every_region(tmp_path):
    course, _ = edited(tmp_path, due={"b": "2026-02-13T23:59:00Z"})

    _, _, *lines = table(course)

    heads = [line.split()[:2] for line in lines if re.match(r"\w+ +\+?\d+ ", line)]
    assert [task for task, _ in heads] == [*course.tasks]
    assert sum(int(points) for _, points in heads) == course.total + course.bonus
    assert sum("2026-02-13 23:59 UTC" in line for line in lines) == 1
    assert all(f" {id} ({row.points})" in " ".join(lines) for id, row in course.regions.items())


@pytest.mark.parametrize(
    "weights, total, points",
    [
        ({"a": 3, "b": 3, "c": 4}, 10, [3, 3, 4]),
        ({"a": 3, "b": 3, "c": 4}, 100, [30, 30, 40]),
        ({"a": 1, "b": 1, "c": 1}, 10, [4, 3, 3]),
        ({"a": 2, "b": 3, "c": 6}, 7, [1, 2, 4]),  # 1.27, 1.91, 3.82
        ({}, 7, []),
    ],
)
def test_points_are_scaled_to_the_total_by_largest_remainder(weights, total, points):
    assert list(scaled(weights, total).values()) == points


def test_graded_bonus_lessons_share_the_total_and_the_other_ones_are_still_on_top(tmp_path):
    course, contradictions = edited(tmp_path, graded=["b.1", "b.2", "b.13"], total=109)

    assert contradictions == []
    assert sum(row.points for row in course.regions.values() if not row.bonus) == 109
    assert {id for id in COURSE.bonus_regions if id not in course.bonus_regions} == {"b.1", "b.2", "b.13"}
    bonus = sum(course.regions[id].points for id in course.bonus_regions)
    assert (course.regions["b.1"].points, bonus) == (4, COURSE.bonus - 9)
    tests = [{"region": id, "points": row.points, "max_points": row.points} for id, row in course.regions.items()]
    assert score_of(tests, course.bonus_regions) == {"score": 109, "max_score": 109, "bonus": bonus, "max_bonus": bonus}


def test_what_builds_on_a_region_that_is_left_out_builds_on_what_that_one_builds_on(tmp_path):
    course, _ = edited(tmp_path, graded=["b.8", "b.10"], bonus=0)

    assert set(course.regions["b.10"].needs) == {"b.8"} and "b.9" in course.dropped


@pytest.mark.parametrize(
    "values, words",
    [
        ({"tasks": ["1", "2c"]}, ["tasks: expected one of 1, 2a, 2b, 3, 4, p, b, got '2c'"]),
        ({"tasks": []}, ["tasks: expected at least one task"]),
        ({"tasks": ["1", "b"], "bonus": 0}, ["tasks names 'b', but bonus = 0"]),
        ({"graded": ["b.99"]}, ["graded: expected regions of bonus lessons, got 'b.99'"]),
        ({"graded": ["1.1"]}, ["graded: region 1.1 is no bonus lesson"]),
        (
            {"total": 20},
            [f"total = 20 leaves no point for region {id}" for id in ("2b.2", "2b.4", "2b.6", "2b.8", "3.1", "3.2")],
        ),
        ({"own_run_points": -1}, ["own_run_points: expected at least 0, got -1"]),
        ({"name": "COS 598"}, ["name: expected small letters and digits"]),
        ({"due": {"1": "2026-02-13T23:59:00"}}, ["due.1: expected a time with its zone"]),
        ({"due": {"1": '"next week"'}}, ["due.1: expected a time with its zone"]),
        ({"due": {"7": "2026-02-13T23:59:00Z"}}, ["due: expected one of"]),
        ({"tasks": ["1"], "due": {"3": "2026-02-13T23:59:00Z"}}, ["due.3: the task is not in `tasks`"]),
        (
            {"tasks": ["9"], "graded": ["b.0"], "total": 0},
            ["tasks: expected one", "tasks: expected at", "graded", "total"],
        ),
    ],
)
def test_every_contradiction_is_a_line_and_the_first_stops_whoever_reads_the_course(tmp_path, values, words):
    _, contradictions = edited(tmp_path, **values)

    assert len(contradictions) == len(words)
    assert all(
        word in line and line.startswith("course.toml: ") for word, line in zip(words, contradictions, strict=True)
    )
    with pytest.raises(InputError, match=re.escape(contradictions[0])):
        load_course(tmp_path / "course.toml")


def shown(tree, *flags):
    """The lines that `python -m staff.course` prints in a tree, its figures and its exit code."""
    words = [sys.executable, "-m", "staff.course", *flags]
    done = subprocess.run(words, cwd=tree, capture_output=True, text=True)
    *lines, figures = done.stdout.splitlines()
    return lines, json.loads(figures), done.returncode


@pytest.mark.medium
def test_the_command_shows_on_one_screen_what_follows_and_what_contradicts_itself(tree):
    change(tree, lambda text: choose(text, tasks=["1", "2a", "2b", "3"], bonus=0))
    change(tree, lambda text: text.replace("\ncarried", "\ndue.2a = 2026-02-13T23:59:00-05:00\ncarried"))

    lines, figures, code = shown(tree)

    assert len(lines) <= 25 and code == figures["contradictions"] == 0
    assert next(line for line in lines if line.startswith("2a ")).endswith("2026-02-13 23:59 UTC-05:00")
    assert next(line for line in lines if line.startswith("left out: ")).startswith("left out: 4.1, 4.2, p.1")
    assert next(line for line in lines if "given out solved" in line).endswith(": p.2")

    change(tree, lambda text: choose(text, tasks=["1", "2c"], graded=["b.0"]))
    lines, figures, code = shown(tree)
    assert [line.partition(":")[0] for line in lines] == ["contradiction"] * figures["contradictions"] and code == 1


@pytest.mark.proof
@pytest.mark.parametrize(
    "values",
    [
        {"tasks": ["1", "2a", "2b", "3"], "bonus": 0, "name": "cs999", "total": 61},
        {"tasks": ["1", "2b", "p"], "bonus": 0},
        {"bonus": 0},
        {"tasks": ["1", "2a", "3", "4", "p"], "bonus": 0},
        {"tasks": ["2a", "2b", "3"], "bonus": 0},
        {"tasks": ["1"], "graded": ["b.1", "b.2", "b.3", "b.4", "b.5", "b.6", "b.7", "b.13"], "bonus": 0},
    ],
    ids=[
        "tasks 1 to 3 of a course with another name and total", "1, 2b and the pipeline", "without the bonus",
        "without 2b", "without task 1", "ring, reducer, ZeRO-2 and 1F1B after task 1, graded",
    ],
)  # fmt: skip
def test_a_changed_course_gives_all_points_to_its_solution_and_none_to_its_handout_however_it_is_graded(tree, values):
    change(tree, lambda text: choose(text, **values))

    lines, figures, code = shown(tree, "--try")

    assert (figures["tried"], figures["failed"], code) == (8, [], 0), "\n".join(lines)


# --- own data and models ---

REVIEWS = 'scripts.tasks.reviews = { text_a = "review", label = "stars", labels = ["bad", "good"] }\n'
OWN = REVIEWS + 'scripts.task_name = "Reviews"\nscripts.bert = "tiny"\n'


def with_scripts(text, lines):
    """The table with these lines instead of those that begin with `scripts.`."""
    others, count = re.subn(r"\nscripts\.\w+ = .*", "", text)
    assert count == 3
    return others.replace("\ncarried", f"\n{lines}carried", 1)


def test_a_row_is_enough_for_own_data_and_an_own_model(tree, tmp_path):
    change(tree, lambda text: with_scripts(text, OWN))
    for name, labels in {"train": ["good", "bad"] * 8, "dev": ["good"] * 3}.items():
        lines = ["stars\treview", *(f"{label}\tit was {label}" for label in labels)]
        (tmp_path / f"{name}.tsv").write_text("\n".join(lines) + "\n")
    words = ["task1_single/run_glue.py", "--data_dir", str(tmp_path), "--num_train_epochs", "1", "--no_cuda"]

    subprocess.run([sys.executable, *words, "--output_dir", str(tmp_path / "run")], cwd=tree, check=True)

    record = json.loads((tmp_path / "run/rank0.json").read_text())
    assert (record["examples"], record["config"]["task_name"]) == ({"train": 16, "dev": 3}, "reviews")
    assert list(record["evaluations"][0]["metrics"]) == ["acc"]


@pytest.mark.parametrize(
    "line, words",
    [
        ("scripts.bret = 'tiny'", "unknown key scripts.bret"),
        ("scripts.bert = ''", "scripts.bert: expected a text"),
        ("scripts.task_name = 'reviews'", "scripts.task_name: expected one of cola, .*; got 'reviews'"),
        ("scripts.tasks.reviews = { text_a = 'review' }", "tasks.reviews: expected text_a and label"),
        ("scripts.tasks.reviews = { text_a = 'review', label = 1 }", "expected names of the header, or numbers"),
        ("scripts.tasks.r = { text_a = 1, label = 0, labels = [0, 1] }", "expected labels in quotes"),
        ("scripts.tasks.r = { text_a = 1, label = 0, metrics = ['bleu'] }", "metrics out of acc"),
    ],
)
def test_a_wrong_row_of_own_data_is_said_in_one_line(tree, line, words):
    change(tree, lambda text: with_scripts(text, line + "\n"))

    with pytest.raises(InputError, match=words):
        assemble(tree)


# --- what follows ---


@pytest.mark.medium
def test_points_that_are_exchanged_are_those_of_the_handout_and_of_its_graders(tree):
    def exchange(text):  # 100 points in all, as before
        for region, before, after in (("1.2", 2, 3), ("1.3", 2, 1)):
            head, section, tail = text.partition(f'[regions."{region}"]')
            text = head + section + tail.replace(f"points = {before}", f"points = {after}", 1)
        return text

    change(tree, exchange)

    readme = assemble(tree).files["README.md"].decode()
    collect = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-m", "task1", "--report", "report.json"]
    subprocess.run(collect, cwd=tree, capture_output=True, check=True)

    assert "| 1.2 | backward | task1_single/run_glue.py | 3 |" in readme
    most = Counter[str]()
    for test in json.loads((tree / "report.json").read_text())["tests"]:
        most[test["region"]] += test["max_points"]
    assert most == {"1.1": 2, "1.2": 3, "1.3": 1, "1.4": 2}


@pytest.mark.medium
def test_a_handout_has_the_name_and_the_title_of_its_course_and_no_other_name(tree):
    change(tree, lambda text: choose(text, name="cs999", title="Large models"))

    files = assemble(tree).files

    assert [name for name, content in files.items() if b"cos598d" in content.lower()] == []
    assert b"# TODO(cs999) 1.2: " in files["task1_single/run_glue.py"] and b"CS999_CACHE" in files["common/paths.py"]
    assert files["README.md"].startswith(b"# Large models: an assignment\n")


@pytest.mark.medium
def test_without_task_4_the_pipeline_and_the_bonus_neither_folders_nor_tests_nor_rows_ship(tree):
    dropped = {id for id, row in COURSE.regions.items() if row.task in ("4", "p", "b")}
    change(tree, lambda text: choose(text, tasks=["1", "2a", "2b", "3"], bonus=0))

    handout = assemble(tree)

    assert "\n".join(handout.problems) == ""
    assert set(handout.given_solved) <= dropped and "p.2" in handout.given_solved  # its file belongs to common/
    assert not [name for name in handout.files if re.match(r"(tests/)?(task4\w*|pipeline|beyond)/", name)]
    schedule = handout.files["common/schedule.py"].decode()
    assert "TODO" not in schedule and "NotImplementedError" not in schedule
    assert clean_files(tree)["common/schedule.py"].decode() == schedule  # the graders lay hand-ins over the same
    table = handout.files["README.md"].decode().split("## Regions and points")[1]
    assert "| 4.1 |" not in table and "| p.1 |" not in table and "b.16" not in table.split("\n## ")[0]
    assert "| | total | | 100 |" in table
    assert re.search(r"\| 1\.1 \|.*\| 4 \|", table), "the points of what is left are scaled to the same total"


@pytest.mark.medium
@pytest.mark.parametrize(
    ("values", "rows_of_lessons", "said"),
    [
        ({"bonus": 30}, [("b.1 to b.21, without b.17", "30")], "These lessons are optional: their points"),
        (
            {"graded": ["b.1", "b.2"], "bonus": 0, "total": 60},
            [("b.1, b.2", "3")],
            "b.1, b.2 count in the 60 points. You",
        ),
        (
            {"graded": ["b.1", "b.2"], "bonus": 20},
            [("b.1, b.2", "6"), ("the other lessons", "20")],
            "b.1, b.2 count in the 100 points. The other lessons are optional: their points are a **bonus**",
        ),
    ],
    ids=["all on top", "some count, no others", "some count, the others on top"],
)
def test_pages_say_which_bonus_lessons_count_and_with_how_many_points(tree, values, rows_of_lessons, said):
    change(tree, lambda text: choose(text, **values))

    files = assemble(tree).files

    table = files["README.md"].decode().split("## Regions and points")[1].split("\n## ")[0]
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if "beyond DDP" in line
    ]
    assert [(row[0], row[-1]) for row in cells] == rows_of_lessons
    assert ["bonus" in row[1] for row in cells] == [not row[0].startswith("b.1,") for row in cells]
    assert said in " ".join(files["beyond/README.md"].decode().split())


SENTENCES = """
Read on. The cost of `python -m pytest --region b.9` is in [its page](../beyond/ring.md#the-idea); `diff
beyond/ring.py x` shows it. See p.3. Stay. (In task 3, DDP waits.) The bonus shows how.
- An item. Task 4 counts.
- **Task 4** too.
- And one more.

```
task 1   all
task 4   none
         or few
```

```shell
python beyond/run_gpt2.py   # the bonus
python -m pytest --hint b.9
```
"""

LEFT = """ Stay.
- An item.
- And one more.

```
task 1   all
```

```shell
python -m pytest --hint 1.1
```
"""


@pytest.mark.medium
def test_what_a_page_says_of_lessons_that_the_course_does_not_have_is_left_out_of_it(tree):
    change(tree, lambda text: choose(text, tasks=["1", "2b"], bonus=0))
    page = tree / "task1_single/README.md"
    page.write_text(page.read_text(encoding="utf-8") + SENTENCES, encoding="utf-8")

    handout = assemble(tree)

    assert "\n".join(handout.problems) == ""
    left = handout.files["task1_single/README.md"].decode().partition("Read on.")[2]
    assert left == LEFT
    table = handout.files["README.md"].decode().split("## Regions and points")[1]
    assert "| 2a.1 | join the process group | cluster/hello.py | given solved |" in table


@pytest.mark.medium
@pytest.mark.parametrize(
    "line, words",
    [
        ("See [there](../nowhere.md).", "the link ../nowhere.md leads nowhere"),
        ("See [there](#no-such-heading).", "the link #no-such-heading leads nowhere"),
        ("```shell\npython -m cluster.lunch\n```", "names cluster.lunch, which does not ship"),
        ("Run `python task1_single/run_glu.py`.", "names task1_single/run_glu.py, which does not ship"),
        ("Run `python -m pytest --hint 1.7` here.", "--hint 1.7 names a region"),
    ],
)
def test_a_link_a_command_and_a_region_that_lead_nowhere_stop_the_handout(tree, line, words):
    page = tree / "task1_single/README.md"
    page.write_text(f"{page.read_text(encoding='utf-8')}\n{line}\n", encoding="utf-8")

    (problem,) = assemble(tree).problems

    assert problem.startswith("task1_single/README.md:") and words in problem


@pytest.mark.medium
@pytest.mark.parametrize("values", [
    {"tasks": ["1", "2a", "2b", "3"]},
    {"tasks": ["1", "2b", "p"], "bonus": 0, "total": 61},
    {"bonus": 0},
])  # fmt: skip
def test_blocks_of_code_are_valid_shell_and_sentences_name_the_total_in_a_changed_course(tree, values):
    change(tree, lambda text: choose(text, **values))
    pages = {name: text.decode() for name, text in assemble(tree).files.items() if name.endswith(".md")}

    blocks = [block for text in pages.values() for block in re.findall(r"^```shell\n(.*?)^```", text, re.M | re.S)]
    wrong = [
        block for block in blocks if subprocess.run(["bash", "-n"], input=block.encode(), capture_output=True).stderr
    ]
    assert wrong == [] and all(map(str.strip, blocks))
    assert f"The {values.get('total', 100)} points are for" in pages["README.md"]
    if values == {"bonus": 0}:
        assert "Li et al." in pages["docs/sources.md"], "task 3 has it, too"


def test_a_lesson_that_nobody_builds_on_is_left_out_where_it_would_give_a_graded_one_away(tree):
    change(tree, lambda text: choose(text, tasks=["1"], graded=["b.6", "b.7"], bonus=0))

    handout = assemble(tree)

    assert "\n".join(handout.problems) == "" and "b.9" not in handout.given_solved
    assert "beyond/sharded_optimizer.md" in handout.files and "beyond/survive.md" not in handout.files
    pages = [handout.files[name].decode() for name in ("README.md", "beyond/README.md")]
    assert "](beyond/README.md)" in pages[0] and not any("bonus" in page for page in pages)
    assert b"b.9 is not part of this course" in handout.files["beyond/sharded_model.py"]


def test_a_region_without_a_test_is_named(tree):
    change(tree, lambda text: text.replace('[regions."1.2"]', '[regions."1.9"]').replace('"1.2"', '"1.9"'))

    problems = assemble(tree).problems

    assert any("region 1.9 has no graded test in tests/" in problem for problem in problems)
