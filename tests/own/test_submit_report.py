"""submit.py report: numbers with the runs they came from, what is missing, what cannot be, and the student's words."""

import json
from pathlib import Path

import pytest
from PIL import Image

from common.errors import InputError
from common.paths import ROOT
from course.table import load_course
from handin.gpt2_runs import FIGURES
from handin.report_pictures import Pictures
from handin.sections import Findings
from handin.student import make_student, remembered
from handin.words import read_words, with_fingerprint
from handin.write_report import ASKS, build_report, summary, write_markdown
from tests.own.run_records import change, write_ladder, write_run

pytestmark = pytest.mark.medium

COURSE = load_course()
ADA = make_student("ab1234", "First Last")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A student's folder with all runs that the course asks for."""
    write_ladder(tmp_path / "runs")
    write_gpt2(tmp_path / "submit_figures")
    return tmp_path


def write_gpt2(folder, **changes):
    setting = {"model": "tiny", "seed": 42}
    rows = {
        1: {"training_time": 2.0, "tokens_per_second": 1000.0, "batch_size": 64},
        2: {"training_time": 1.1, "tokens_per_second": 1800.0, "batch_size": 128},
    }
    folder.mkdir(exist_ok=True)
    for workers, row in rows.items():
        deviations = {"training_time_std": 0.01, "tokens_per_second_std": 10.0}
        row = {"workers": workers, "setting": setting, **row, **deviations, **(changes if workers == 2 else {})}
        (folder / f"data_parallel_{workers}.json").write_text(json.dumps(row))
    write_modes(folder, 3.0, 2.0)
    for name in FIGURES:
        Image.effect_noise((60, 40), 50).save(folder / name)


def write_modes(folder, model_parallel, pipeline_parallel, tokens=300.0):
    """Both modes of the pipeline, by the seconds of an epoch; tokens: of an epoch of pipeline_parallel."""
    modes = {
        mode: {
            "setting": ["tiny", 32, 64],
            "training_time": {"mean": seconds, "std": 0.01},
            "tokens_per_second": {"mean": count / seconds, "std": 1.0},
        }
        for mode, seconds, count in (
            ("model_parallel", model_parallel, 300.0),
            ("pipeline_parallel", pipeline_parallel, tokens),
        )
    }
    (folder / "pipeline_metrics.json").write_text(json.dumps(modes))


def build(tree):
    """The report as text, its findings and what the command prints."""
    report = build_report(tree, COURSE, ADA)
    return report.markdown.read_text(), report.findings, "\n".join(summary(report, tree))


def read(tree, words=None):
    """The report's text and findings without drawing anything, which takes a second."""
    findings = Findings()
    text = write_markdown(tree, COURSE, ADA, tree / "runs", words or {}, findings, Pictures(tree))
    return text, findings


def doubts(tree):
    return "\n".join(read(tree)[1].doubts)


def write_words(tree, section, words):
    path = tree / "report" / "report.md"
    begin = f"<!-- your words: {section} -->\n"
    path.write_text(path.read_text().replace(begin, f"{begin}{words}\n"))


def section(text, head):
    return text.partition(f"## {head}\n")[2].partition("\n## ")[0]


def test_it_has_what_the_course_asks_for(tree):
    text, findings, _ = build(tree)

    assert "| 1 one worker | 0.700000 | 0.699000 |" in section(text, "Task 1: losses and metric")
    assert "| 2 | 0.6000 |" in section(text, "Task 1: losses and metric")
    times = section(text, "Time per iteration of tasks 2a, 2b and 3")
    assert "| 2a gather + scatter | 4 | 39 | 0.2001\u00a0±\u00a0" in times
    assert "| 2.00 | 41 gather, 41 scatter | 1.75 | `runs/task2a_gather_scatter` |" in times
    assert "| 3 DDP | 4 | 0.1000\u00a0±" in section(text, "Scalability")
    assert all(f"](figures/{name})" in text and (tree / "report/figures" / name).is_file() for name in FIGURES)
    assert findings.doubts == []


def test_a_number_names_the_run_it_came_from_and_that_run_its_setting(tree):
    text, _ = read(tree)

    assert (
        "| `runs/task3_ddp` | times, losses, speed-up | 4/4 | tiny-bert-v2 | embedded sample | 64 | 42 | 40 |" in text
    )


def test_the_mean_leaves_the_first_iteration_out_and_takes_forty(tree):
    write_run(tree / "runs/task3_ddp", "task3_ddp", 4, steps=200, per_epoch=13)
    record = json.loads((tree / "runs/task3_ddp/rank0.json").read_text())
    for number, step in enumerate(record["iterations"]):
        step["seconds"] = 99.0 if number == 0 else 2.0 if number < 40 else 77.0
    (tree / "runs/task3_ddp/rank0.json").write_text(json.dumps(record))

    assert "| 3 DDP | 4 | 39 | 2.0000" in read(tree)[0]


@pytest.mark.parametrize(
    "steps, said",
    [
        ({"task2a_gather_scatter": 40, "task2b_allreduce": 40, "task3_ddp": 200}, "2 to 40"),
        ({"task2a_gather_scatter": 10, "task2b_allreduce": 10, "task3_ddp": 10}, "2 to 10"),
        ({"task2a_gather_scatter": 10, "task2b_allreduce": 40, "task3_ddp": 40}, "2 to 40 in 2b and 3, 2 to 10 in 2a"),
    ],
)
def test_the_iterations_that_were_counted_are_named(tree, steps, said):
    for task, count in steps.items():
        write_run(tree / "runs" / task, task, 4, steps=count)

    text, _ = read(tree)

    assert f"\nIterations {said} on rank 0:" in text
    both = said.replace(" in 2b and 3", " in 2b")
    assert f"\nMean over iterations {both}, as each rank" in text


def test_one_value_has_no_deviation(tree):
    write_gpt2(tree / "submit_figures", training_time_std=0.0, tokens_per_second_std=0.0)
    write_run(tree / "runs/task3_ddp", "task3_ddp", 4, steps=2)

    text, _ = read(tree)

    assert "| 2 | 1 | 128 | 1.100 | 1800 |" in text
    assert "| 1 | 64 | 2.000\u00a0±\u00a00.010 | 1000\u00a0±\u00a010 |" in text
    assert "| 3 DDP | 4 | 1 | 0.1010 |" in text
    assert "±\u00a00.000 " not in text and "inf" not in section(text, "Scalability")


def test_the_trace_of_the_pipeline_is_of_a_run_that_has_a_record(tree):
    write_pipeline(tree / "runs/pipeline/earlier", "pipeline_parallel", 4, 0.2)
    for folder in ("runs/pipeline/earlier", "runs/pipeline"):
        Image.effect_noise((60, 40), 50).save(tree / folder / "trace.png")
    pictures = Pictures(tree / "report/figures")

    write_markdown(tree, COURSE, ADA, tree / "runs", {}, Findings(), pictures)
    pictures.draw()

    shown = (tree / "report/figures/pipeline_trace.png").read_bytes()
    assert shown == (tree / "runs/pipeline/earlier/trace.png").read_bytes()


def test_without_any_run_everything_is_missing_and_nothing_is_invented(tmp_path):
    text, findings, said = build(tmp_path)

    assert "0." not in section(text, "Task 1: losses and metric")
    commands = "\n".join(command for _, command in findings.missing)
    assert "python task1_single/run_glue.py" in commands
    assert "task2a_gather_scatter/run_glue.py --max_steps 40" in commands
    assert "python task2b_allreduce/run_gpt2.py --n_epochs 4 --world_size 1 --batch_size 64" in commands
    assert "--model_parallel_mode pipeline_parallel" in commands
    assert "submit_figures/pipeline_training_time.png" in said


def test_a_damaged_figure_counts_as_missing(tree):
    name = "pipeline_tokens_per_second.png"
    (tree / "submit_figures" / name).write_bytes((tree / "submit_figures" / name).read_bytes()[:500])

    text, findings = read(tree)

    assert any(f"{name} (it is damaged)" in what for what, _ in findings.missing)
    assert f"(figures/{name})" not in text


REPORTED = {  # README -> where the report answers each item of its section "Report": own words, or a heading
    "task1_single": ["Task 1: losses and metric", "Task 1: losses and metric", "task1", "task1"],
    "task2a_gather_scatter": ["Time per iteration of tasks 2a, 2b and 3"] * 2
    + ["Communication of tasks 2a and 2b", "task2a", "timelines"],
    "task2b_allreduce": ["Time per iteration of tasks 2a, 2b and 3", "reasons", "timelines", "gpt2"],
    "task3_ddp": ["Time per iteration of tasks 2a, 2b and 3"] * 2 + ["reasons", "timelines", "scalability"],
    "task4_traffic": ["traffic", "Network traffic", "Network traffic", "Network traffic", "traffic", "traffic"],
    "pipeline": ["pipeline", "Pipeline: numbers of micro-batches", "pipeline", "timelines"],
    "beyond": ["Beyond DDP (bonus)", "beyond", "beyond", "Beyond DDP (bonus)", "beyond"] + ["timelines", "beyond"],
}


@pytest.mark.parametrize("folder", REPORTED)
def test_every_item_that_a_task_asks_to_report_has_its_place(tree, folder):
    asked = (ROOT / folder / "README.md").read_text().partition("\n## Report\n")[2].partition("\n## ")[0]
    text = read(tree)[0]

    items = [line for line in asked.splitlines() if line[:2].rstrip(".").isdigit()]
    assert len(items) == len(REPORTED[folder])
    for place in REPORTED[folder]:
        assert f"<!-- your words: {place} -->" in text or f"\n## {place}\n" in text


def test_communication_is_shown_for_two_ranks_of_2a_and_2b(tree):
    for rank, seconds in ((0, 0.05), (1, 0.1)):
        path = tree / f"runs/task2a_gather_scatter/rank{rank}.json"
        steps = json.loads(path.read_text())["iterations"]
        change(path, iterations=[step | {"phases": {"communication": seconds}} for step in steps])

    text = section(read(tree)[0], "Communication of tasks 2a and 2b")

    assert "| 2a gather + scatter | 0 | 0.0500 | 25 % |" in text
    assert "| 2a gather + scatter | 1 | 0.1000 | 50 % |" in text
    assert "| 2b all_reduce | 1 | – | – |" in text


def write_pipeline(folder, mode, chunks, seconds):
    sizes = {"batch_size": 32, "model_max_length": 64, "n_epochs": 2}
    modes = {"model_parallel_mode": mode, "schedule": "threads", "n_chunk": chunks}
    write_run(folder, "pipeline", seconds=seconds, **sizes, **modes)


def test_numbers_of_micro_batches_are_compared_with_the_schedules_limit(tree):
    write_pipeline(tree / "runs/pipeline_off", "model_parallel", 4, 0.3)
    write_pipeline(tree / "runs/pipeline_m4", "pipeline_parallel", 4, 0.2)

    text, findings = read(tree)

    assert "| 4 | 0.2001\u00a0±" in section(text, "Pipeline: numbers of micro-batches")
    assert "| 1.50 | 1.60 (K = 2) | `runs/pipeline_m4` |" in text
    missing = dict(findings.missing)
    assert "for m in 1 2 8 16; do " in missing["the pipeline with --n_chunk 1, 2, 8, 16"]


def test_what_is_not_hidden_is_shown_for_the_bonus(tree):
    path = tree / "runs/beyond_overlap"
    write_run(path, "beyond", 2, batch_size=32, model_max_length=64, n_epochs=2, strategy="overlap", bucket_mb=0.5)
    change(path / "rank0.json", communication={"exposed_seconds": 0.25, "messages": 4.1, "bytes": 2e6})

    assert "| overlap | 0.5 | 2 | 32 | 0.2500 | 4.1 | 2.000 |" in section(read(tree)[0], "Beyond DDP (bonus)")


def test_words_are_kept_when_the_report_is_built_again(tree):
    path = tree / "report" / "report.md"
    path.parent.mkdir()
    path.write_text(with_fingerprint(read(tree)[0]))
    for section in ASKS:
        write_words(tree, section, f"My **words** on {section}.\n\n- a | b\n")
    write_run(tree / "runs/task3_ddp", "task3_ddp", 4, seconds=0.05)

    text, findings, said = build(tree)

    assert all(f"My **words** on {section}.\n\n- a | b" in text for section in ASKS)
    assert "| 0.0500\u00a0±\u00a0" in text
    assert not any("your own words" in what for what, _ in findings.missing)
    assert "it is kept as" not in said


@pytest.mark.medium
def test_built_again_from_the_same_both_files_are_the_same(tree):
    build(tree)
    write_words(tree, "reasons", "Latency.")
    build(tree)
    first = {path.name: path.read_bytes() for path in (tree / "report").iterdir() if path.is_file()}

    build(tree)

    assert {path.name: path.read_bytes() for path in (tree / "report").iterdir() if path.is_file()} == first
    assert set(first) == {"report.md", "ab1234_First_Last.pdf"}


def test_a_report_that_was_changed_outside_of_the_sections_is_kept(tree):
    path = tree / "report" / "report.md"
    path.parent.mkdir()
    text = with_fingerprint(read(tree)[0]).replace("## Scalability\n", "## Scalability\n\nMine, in the wrong place.\n")
    path.write_text(text)

    _, _, said = build(tree)

    assert "kept as report/report.old1.md" in said
    assert (tree / "report/report.old1.md").read_text() == text


@pytest.mark.parametrize(
    "old, new, said",
    [
        ("<!-- end of your words: reasons -->", "", "end of your words: reasons -->' above this line"),
        ("<!-- your words: reasons -->", "", "'reasons' has an end marker but no start marker"),
        ("<!-- your words: reasons -->", "<!-- your words: task1 -->", "'task1' appears twice"),
        ("<!-- end of your words: beyond -->", "", "below, got the file's end"),
    ],
)
def test_a_damaged_section_stops_the_build_and_nothing_is_overwritten(tree, old, new, said):
    path = tree / "report" / "report.md"
    path.parent.mkdir()
    damaged = with_fingerprint(read(tree)[0]).replace(old, new)
    path.write_text(damaged)

    with pytest.raises(InputError, match=r"report/report.md:\d+: ") as error:
        build(tree)

    assert said in str(error.value)
    assert path.read_text() == damaged


def test_words_of_a_section_that_no_longer_exists_are_kept_at_the_end(tree):
    text, _ = read(tree, {"thanks": "To all."})

    assert "To all." in section(text, "Further notes")
    assert read_words(text, "report.md")["thanks"] == "To all."


def test_the_student_is_remembered(tree):
    assert remembered(read(tree)[0]) == ADA


def test_a_speed_up_above_the_number_of_workers_is_flagged(tree):
    write_run(tree / "runs/task1_single", "task1_single", seconds=0.9)

    assert "speed-up 9.00 of runs/task3_ddp over runs/task1_single: exceeds the number of workers, 4" in doubts(tree)


def test_a_speed_up_inside_the_noise_is_flagged(tree):
    write_run(tree / "runs/task3_ddp", "task3_ddp", 4, seconds=0.3001)

    text, findings = read(tree)

    assert "of runs/task3_ddp over runs/task1_single: within the noise" in "\n".join(findings.doubts)
    assert "| 1.00 | within the noise | 1 |" in section(text, "Scalability")


def test_a_metric_that_never_changes_is_flagged(tree):
    write_run(tree / "runs/task1_single", "task1_single", seconds=0.3, accuracies=(0.53, 0.53, 0.53))

    assert "runs/task1_single: on the dev set acc 0.53 after each of 3 epochs" in doubts(tree)


def test_a_validation_loss_of_gpt2_that_never_changes_is_flagged(tree):
    folder = write_run(
        tree / "runs/task2b_allreduce_gpt2", "task2b_allreduce", 2, n_epochs=3, batch_size=128, model_max_length=64
    )
    change(folder / "rank0.json", evaluations=[{"epoch": e, "metrics": {"loss": 6.5}} for e in (1, 2, 3)])

    assert "on the dev set loss 6.5 after each of 3 epochs" in doubts(tree)


@pytest.mark.parametrize(
    "options, said",
    [
        ({"seed": 7}, "seed 42 vs. 7"),
        ({"per_gpu_train_batch_size": 8}, "total batch 64 vs. 32"),
        ({"max_seq_length": 128}, "tokens per example 32 vs. 128"),
    ],
)
def test_runs_that_were_made_otherwise_are_not_compared(tree, options, said):
    write_run(tree / "runs/task3_ddp", "task3_ddp", 4, **options)

    text, findings = read(tree)
    said_all = "\n".join(findings.doubts)

    assert f"the speed-up of runs/task3_ddp over runs/task1_single is not computed: {said}" in said_all
    assert f"times of runs/task2a_gather_scatter and runs/task3_ddp are not comparable: {said}" in said_all
    assert f"losses of runs/task1_single and runs/task3_ddp are not comparable: {said}" in said_all
    assert "| – | not comparable | 1 | `runs/task3_ddp` |" in section(text, "Scalability")


def test_runs_of_another_version_of_torch_are_not_compared(tree):
    for rank in range(4):
        change(tree / f"runs/task3_ddp/rank{rank}.json", versions={"torch": "2.9.0"})

    assert (
        "the speed-up of runs/task3_ddp over runs/task1_single is not computed: torch 2.13.0+cpu vs. 2.9.0"
        in doubts(tree)
    )


def test_losses_that_should_be_equal_and_are_not_are_flagged(tree):
    write_run(tree / "runs/task2b_allreduce", "task2b_allreduce", 4, seconds=0.15, losses=[0.69] * 39 + [0.68])

    assert "the first five losses of runs/task1_single and runs/task2b_allreduce differ by up to 0.01" in doubts(tree)


def test_fewer_iterations_than_forty_are_flagged(tree):
    write_run(tree / "runs/task3_ddp", "task3_ddp", 4, steps=12)

    assert "runs/task3_ddp: only 12 iterations; the course asks for 40" in doubts(tree)


def test_a_machine_that_did_something_else_meanwhile_is_flagged(tree):
    record = json.loads((tree / "runs/task3_ddp/rank0.json").read_text())
    for step in record["iterations"][20:]:
        step["seconds"] *= 2
    (tree / "runs/task3_ddp/rank0.json").write_text(json.dumps(record))

    assert "runs/task3_ddp: its iterations took 0.1010 s in the first half and 0.2000 s in the second" in doubts(tree)


def test_a_missing_rank_is_named_and_the_loss_says_how_many_ranks_it_is_of(tree):
    (tree / "runs/task2a_gather_scatter/rank3.json").unlink()

    text, findings = read(tree)

    assert any("rank3.json is missing (the run had 4 workers)" in doubt for doubt in findings.doubts)
    assert "| 2a gather + scatter (3 of 4 ranks) |" in text


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"tokens_per_second": 2500.0, "training_time": 0.8}, "a speed-up of 2.50 exceeds the number of workers, 2"),
        ({"tokens_per_second": 1010.0, "training_time": 2.0}, "1.01 is within the noise"),
        ({"batch_size": 64}, "not comparable, the batch of one worker is 32 vs. 64"),
        ({"setting": {"model": "tiny", "seed": 7}}, "not comparable, seed 42 vs. 7"),
        ({"training_time": 0.3}, "540 tokens per epoch in one run, 2000"),
        ({"tokens_per_second": "many"}, "data_parallel_2.json was written by another version"),
        ({"batch_size": 0}, "data_parallel_2.json was written by another version"),
        ({"setting": None}, "not comparable, one of them was written by another version"),
    ],
)
def test_gpt2_metrics_that_cannot_be_are_flagged(tree, changes, said):
    write_gpt2(tree / "submit_figures", **changes)

    assert said in doubts(tree)


@pytest.mark.parametrize(
    "modes, said",
    [
        ((3.0, 1.4), "a speed-up of 2.14 exceeds the number of partitions, 2"),
        ((3.0, 3.001), "1.00 is within the noise"),
        ((3.0, 2.0, 150.0), "tokens per second x seconds gives 150 tokens per epoch in one run, 300"),
    ],
)
def test_a_speed_up_of_the_pipeline_that_cannot_be_is_flagged(tree, modes, said):
    write_modes(tree / "submit_figures", *modes)

    assert f"pipeline_parallel vs. model_parallel: {said}" in doubts(tree)


def test_the_speed_up_is_over_one_worker_with_one_thread_and_all_cores_stand_beside_it(tree):
    figures = tree / "submit_figures"
    one = json.loads((figures / "data_parallel_1.json").read_text())
    row = one | {"threads": 2, "tokens_per_second": 1700.0, "training_time": 2000 / 1700}
    (figures / "data_parallel_1_threads_2.json").write_text(json.dumps(row))

    text, findings = read(tree)

    assert "| 1 | 2 | 64 | 1.176\u00a0± 0.010 | 1700\u00a0± 10 | 1.70 |".replace("± ", "±\u00a0") in text
    assert "| 2 | 1 | 128 |" in text and "| 1.80 |" in text
    assert not any("all cores" in what for what, _ in findings.missing)


def test_the_run_behind_the_figures_of_gpt2_is_named(tree):
    folder = write_run(
        tree / "runs/task2b_allreduce_gpt2", "task2b_allreduce", 2, n_epochs=2, batch_size=128, model_max_length=64
    )
    record = json.loads((folder / "rank0.json").read_text())
    last = sum(step["seconds"] for step in record["iterations"][39:])
    before, _ = read(tree)
    write_gpt2(tree / "submit_figures", epochs=[[last, 1800.0]])

    assert "| `runs/task2b_allreduce_gpt2` | – | 2/2 |" in before
    assert "| `runs/task2b_allreduce_gpt2` | GPT-2 figures | 2/2 |" in read(tree)[0]


def test_epochs_of_unequal_speed_are_not_called_unequally_long(tree):
    write_gpt2(tree / "submit_figures", training_time=1.6, tokens_per_second=1600.0)
    assert "2560 tokens per epoch in one run, 2000" in doubts(tree)

    epochs = [[0.8, 2500.0], [1.6, 1250.0], [2.4, 2000 / 2.4]]  # 2,000 tokens each
    write_gpt2(tree / "submit_figures", training_time=1.6, tokens_per_second=1600.0, epochs=epochs)
    assert "tokens per epoch" not in doubts(tree)

    epochs[2][1] = 400.0
    write_gpt2(tree / "submit_figures", training_time=1.6, tokens_per_second=1600.0, epochs=epochs)
    write_one = tree / "submit_figures/data_parallel_1.json"
    write_one.write_text(json.dumps(json.loads(write_one.read_text()) | {"epochs": [[2.0, 1000.0]] * 3}))
    assert "960 tokens per epoch in one run, 2000" in doubts(tree)


def test_figures_of_gpt2_that_were_measured_on_a_busy_machine_are_named(tree):
    write_gpt2(tree / "submit_figures", other_programs=1.6)
    path = tree / "submit_figures/pipeline_metrics.json"
    modes = json.loads(path.read_text())
    modes["model_parallel"]["other_programs"] = 0.9
    modes["pipeline_parallel"]["other_programs"] = 0.1
    path.write_text(json.dumps(modes))

    said = doubts(tree)

    assert "GPT-2, workers: 2, threads: 1: disturbed: other programs used 1.6 of" in said
    assert "model_parallel: disturbed: other programs used 0.9 of" in said
    assert said.count("disturbed") == 2


def test_half_written_gpt2_metrics_are_named(tree):
    (tree / "submit_figures/data_parallel_1.json").write_text('{"workers": 1')
    (tree / "submit_figures/pipeline_metrics.json").write_text("[]")

    said = doubts(tree)

    assert "submit_figures/data_parallel_1.json is incomplete or damaged" in said
    assert "submit_figures/pipeline_metrics.json is incomplete or damaged" in said


def test_the_students_lines_for_a_region_are_in_it(tree):
    lines = ['"""A script."""', "# TODO(cos598d) 1.2: go on", "mine = 1", "# END TODO 1.2"]
    (tree / "task1_single").mkdir()
    (tree / "task1_single/run_glue.py").write_text("\n".join([*lines, ""]))

    text, findings = read(tree)

    assert "#### 1.2 backward (`task1_single/run_glue.py`)\n\n```python\nmine = 1\n```" in text
    assert ("regions 1.1, 1.3, 1.4 are not solved", "pytest --hint 1.1") in findings.missing


@pytest.mark.parametrize(
    "netid, name", [("ab-1", "First Last"), ("../x", "A B"), ("ab1", "Ada"), ("ab1", "1 2"), ("", "")]
)
def test_a_name_that_makes_no_file_name_is_an_error(netid, name):
    with pytest.raises(InputError, match=r"--netid|--name"):
        make_student(netid, name)


def test_names_with_accents_and_more_words_make_file_names():
    assert make_student("ab1", "José  María O'Neill-Łuk").stem == "ab1_José_María_ONeill-Łuk"


def places(value, path=()):
    """The path of everything in a record, containers included."""
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*path, key))


@pytest.mark.parametrize("odd", [None, "x", -1, 0, [], {}, float("inf"), [{}], True])
def test_whatever_stands_in_a_record_the_report_is_written(tmp_path, odd):
    folder = write_run(tmp_path / "runs/task1_single", "task1_single", steps=3, per_epoch=1)
    write_run(tmp_path / "runs/task3_ddp", "task3_ddp", 2, steps=3, per_epoch=1)
    good = (folder / "rank0.json").read_text()
    for place in places(json.loads(good)):
        record = json.loads(good)
        inner = record
        for key in place[:-1]:
            inner = inner[key]
        inner[place[-1]] = odd
        (folder / "rank0.json").write_text(json.dumps(record))

        text, _ = read(tmp_path)

        assert "## Scalability" in text, place


def test_a_newest_run_that_was_stopped_is_shown_with_a_row_per_rank(tree):
    row = {"rank": "1", "state": "waits", "where": "all_reduce #42 (5), run_glue.py:72", "calls": "42 all_reduce"}
    kept = {"conclusion": "rank 0 died (process 7 on here)", "rows": [row]}
    (tree / "runs" / "task3_ddp" / "stopped.json").write_text(json.dumps(kept))

    report = build_report(tree, COURSE, ADA)

    text = report.markdown.read_text()
    assert "| 1 | waits | all_reduce #42 (5), run_glue.py:72 | 42 all_reduce |" in text
    assert "runs/task3_ddp: the newest run was stopped: rank 0 died (process 7 on here)" in report.findings.doubts


@pytest.mark.parametrize("content", ["", "[1]", '{"conclusion": 1, "rows": [{}]}'])
def test_a_damaged_file_of_a_stopped_run_is_left_out(tree, content):
    (tree / "runs" / "task3_ddp" / "stopped.json").write_text(content)

    report = build_report(tree, COURSE, ADA)

    assert not any("stopped" in doubt for doubt in report.findings.doubts)
