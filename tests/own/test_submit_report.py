"""submit.py report: numbers with the runs they came from, what is missing, what cannot be, and the student's words."""

import json
from pathlib import Path

import pytest
from PIL import Image

from common.errors import InputError
from handin import write_report
from handin.gpt2_runs import FIGURES
from handin.report_pictures import Pictures
from handin.sections import Findings
from handin.student import make_student, remembered
from handin.words import with_fingerprint
from handin.write_report import ASKS, build_report, summary, write_markdown
from tests.own.run_records import ADA, COURSE, change, read_report, section, write_ladder, write_run

pytestmark = pytest.mark.medium


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A student's folder with all runs that the course asks for."""
    write_ladder(tmp_path / "runs")
    write_gpt2(tmp_path / "submit_figures")
    return tmp_path


def write_gpt2(folder, **changes):
    """Everything in submit_figures/; changes: of the row of two workers."""
    setting = {"model": "tiny", "seed": 42}
    rows = {
        1: {"training_time": 2.0, "tokens_per_second": 1000.0, "batch_size": 64},
        2: {"training_time": 1.1, "tokens_per_second": 1800.0, "batch_size": 128},
    }
    folder.mkdir(exist_ok=True)
    for workers, row in rows.items():
        row |= {"training_time_std": 0.01, "tokens_per_second_std": 10.0, **(changes if workers == 2 else {})}
        epochs = [[row["training_time"], row["tokens_per_second"]]]
        row = {"workers": workers, "threads": 1, "setting": setting, "other_programs": 0.0, "epochs": epochs, **row}
        (folder / f"data_parallel_{workers}.json").write_text(json.dumps(row))
    write_modes(folder, 3.0, 2.0)
    for name in FIGURES:
        Image.effect_noise((60, 40), 50).save(folder / name)


def write_modes(folder, model_parallel, pipeline_parallel, tokens=300.0, busy=0.0):
    """Both modes of the pipeline, by the seconds of an epoch; tokens: of an epoch of pipeline_parallel."""
    modes = {
        mode: {
            "setting": ["tiny", 32, 64],
            "other_programs": busy,
            "epochs": [[seconds, count / seconds]],
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


@pytest.fixture
def undrawn(monkeypatch):
    monkeypatch.setattr(Pictures, "draw", lambda self: None)
    monkeypatch.setattr(write_report, "_write_pdf", lambda *_: None)


def doubts(tree):
    return "\n".join(read_report(tree)[1].doubts)


def test_it_has_what_the_course_asks_for_and_built_again_it_is_the_same_with_the_students_words(tree):
    text = with_fingerprint(read_report(tree)[0])
    for name in ASKS:
        begin = f"<!-- your words: {name} -->\n"
        text = text.replace(begin, f"{begin}My **words** on {name}.\n\n- a | b\n\n")
    (tree / "report").mkdir()
    (tree / "report" / "report.md").write_text(text)
    text, findings, output = build(tree)
    first = {path.name: path.read_bytes() for path in (tree / "report").iterdir() if path.is_file()}
    build(tree)

    assert {path.name: path.read_bytes() for path in (tree / "report").iterdir() if path.is_file()} == first
    assert set(first) == {"report.md", "ab1234_First_Last.pdf"} and "it is kept as" not in output
    assert all(f"My **words** on {name}.\n\n- a | b" in text for name in ASKS)
    assert not any("your own words" in what for what, _ in findings.missing)
    assert "| 1 one worker | 0.700000 | 0.699000 |" in section(text, "Task 1: losses and metric")
    assert "| 2 | 0.6000 |" in section(text, "Task 1: losses and metric")
    times = section(text, "Time per iteration of tasks 2a, 2b and 3")
    assert "| 2a gather + scatter | 4 | 39 | 0.2001\u00a0±\u00a0" in times
    assert "| 2.00 | 41 gather, 41 scatter | 1.75 | `runs/task2a_gather_scatter` |" in times
    assert "| 3 DDP | 4 | 0.1000\u00a0±" in section(text, "Scalability")
    assert "| `runs/task3_ddp` | times, losses, speed-up | 4/4 | tiny-bert-v2 | embedded sample | 64 | 42 |" in text
    assert all(f"](figures/{name})" in text and (tree / "report/figures" / name).is_file() for name in FIGURES)
    assert findings.doubts == [] and remembered(text) == ADA


def test_the_mean_leaves_the_first_iteration_out_and_takes_forty(tree):
    write_run(tree / "runs/task2a_gather_scatter", "task2a_gather_scatter", 4, steps=10)
    write_run(tree / "runs/task3_ddp", "task3_ddp", 4, steps=200, seconds=[99.0] + [2.0] * 39 + [77.0] * 160)

    text, _ = read_report(tree)

    assert "| 3 DDP | 4 | 39 | 2.0000" in text
    assert "\nIterations 2 to 40 in 2b and 3, 2 to 10 in 2a on rank 0:" in text


def test_one_value_has_no_deviation(tree):
    write_gpt2(tree / "submit_figures", training_time_std=0.0, tokens_per_second_std=0.0)
    write_run(tree / "runs/task3_ddp", "task3_ddp", 4, steps=2)

    text, _ = read_report(tree)

    assert "| 2 | 1 | 128 | 1.100 | 1800 |" in text and "| 3 DDP | 4 | 1 | 0.1010 |" in text
    assert "| 1 | 64 | 2.000\u00a0±\u00a00.010 | 1000\u00a0±\u00a010 |" in text


def test_the_trace_of_the_pipeline_is_of_a_run_that_has_a_record(tree):
    write_pipeline(tree / "runs/pipeline.kept", "pipeline_parallel", 4, 0.2)
    (tree / "runs/pipeline").mkdir()  # of a run that was killed
    for folder in ("runs/pipeline.kept", "runs/pipeline"):
        Image.effect_noise((60, 40), 50).save(tree / folder / "trace.png")
    pictures = Pictures(tree / "report/figures")

    write_markdown(tree, COURSE, ADA, tree / "runs", {}, Findings(), pictures)
    pictures.draw()

    shown, expected = tree / "report/figures/pipeline_trace.png", tree / "runs/pipeline.kept/trace.png"
    assert shown.read_bytes() == expected.read_bytes()


def test_without_any_run_everything_is_missing_and_nothing_is_invented(tmp_path, undrawn):
    text, findings, output = build(tmp_path)

    assert "0." not in section(text, "Task 1: losses and metric")
    commands = "\n".join(command for _, command in findings.missing)
    assert "python task1_single/run_glue.py" in commands
    assert "task2a_gather_scatter/run_glue.py --max_steps 40" in commands
    assert "python task2b_allreduce/run_gpt2.py --n_epochs 4 --world_size 1 --batch_size 64" in commands
    assert "--model_parallel_mode pipeline_parallel" in commands
    assert "submit_figures/pipeline_training_time.png" in output
    assert [what for what, _ in findings.missing if what.startswith("task 4")] == [
        "task 4 with total batch 64, 32, 16",
        "task 4 with --grad_dtype bf16",
        "task 4 with a prediction for a larger model",
    ]


def test_communication_is_shown_for_two_ranks_of_2a_and_2b(tree):
    for rank, seconds in ((0, 0.05), (1, 0.1)):
        path = tree / f"runs/task2a_gather_scatter/rank{rank}.json"
        steps = json.loads(path.read_text())["iterations"]
        change(path, iterations=[step | {"phases": {"communication": seconds}} for step in steps])

    text = section(read_report(tree)[0], "Communication of tasks 2a and 2b")

    assert "| 2a gather + scatter | 0 | 0.0500 | 25 % |" in text and "| 2b all_reduce | 1 | – | – |" in text
    assert "| 2a gather + scatter | 1 | 0.1000 | 50 % |" in text


def write_pipeline(folder, mode, chunks, seconds):
    sizes = {"batch_size": 32, "model_max_length": 64, "n_epochs": 2}
    modes = {"model_parallel_mode": mode, "schedule": "threads", "n_chunk": chunks}
    write_run(folder, "pipeline", seconds=seconds, **sizes, **modes)


def test_micro_batches_are_compared_with_the_schedules_limit_and_the_bonus_shows_what_is_not_hidden(tree):
    write_pipeline(tree / "runs/pipeline_off", "model_parallel", 4, 0.3)
    write_pipeline(tree / "runs/pipeline_m4", "pipeline_parallel", 4, 0.2)
    write_pipeline(tree / "runs/pipeline_m8", "pipeline_parallel", 8, 0.1)
    path = tree / "runs/beyond_overlap"
    write_run(path, "beyond", 2, batch_size=32, model_max_length=64, n_epochs=2, strategy="overlap", bucket_mb=0.5)
    change(path / "rank0.json", communication={"exposed_seconds": 0.25, "messages": 4.1, "bytes": 2e6})

    text, findings = read_report(tree)

    assert "| 4 | 0.2001\u00a0±" in section(text, "Pipeline: numbers of micro-batches")
    assert "| 1.50 | 1.60 (K = 2) | `runs/pipeline_m4` |" in text
    assert "for m in 1 2 16; do " in dict(findings.missing)["the pipeline with --n_chunk 1, 2, 16"]
    assert any("over runs/pipeline_off: exceeds the number of partitions, 2" in doubt for doubt in findings.doubts)
    assert "| overlap | 0.5 | 2 | 32 | 0.2500 | 4.1 | 2.000 |" in section(text, "Beyond DDP (bonus)")


def test_a_report_that_was_changed_outside_of_the_sections_is_kept(tree, undrawn):
    path = tree / "report" / "report.md"
    path.parent.mkdir()
    text = with_fingerprint(read_report(tree)[0]).replace(
        "## Scalability\n", "## Scalability\n\nMine, in the wrong place.\n"
    )
    path.write_text(text)

    _, _, output = build(tree)

    assert "kept as report/report.old1.md" in output
    assert (tree / "report/report.old1.md").read_text() == text


def test_a_damaged_section_stops_the_build_and_nothing_is_overwritten(tree):
    path = tree / "report" / "report.md"
    path.parent.mkdir()
    whole = with_fingerprint(read_report(tree)[0])
    for old, new, message in (
        ("<!-- end of your words: reasons -->", "", "end of your words: reasons -->' above this line"),
        ("<!-- your words: reasons -->", "", "'reasons' has an end marker but no start marker"),
        ("<!-- your words: reasons -->", "<!-- your words: task1 -->", "'task1' appears twice"),
        ("<!-- end of your words: beyond -->", "", "below, got the file's end"),
    ):
        path.write_text(whole.replace(old, new))

        with pytest.raises(InputError, match=rf"report/report.md:\d+: .*{message}"):
            build_report(tree, COURSE, ADA)

        assert path.read_text() == whole.replace(old, new)


def test_every_section_but_the_bonus_must_be_written(tree):
    _, findings = read_report(tree, {name: "Words." for name in ASKS if name not in ("traffic", "beyond")})

    assert ("your own words: traffic", "edit report/report.md") in findings.missing


@pytest.mark.parametrize(
    "task, workers, options, doubt",
    [
        ("task1_single", 1, {"seconds": 0.9}, "9.00 of runs/task3_ddp over runs/task1_single: exceeds the number of"),
        ("task3_ddp", 4, {"seconds": 0.3001}, "of runs/task3_ddp over runs/task1_single: within the noise"),
        ("task1_single", 1, {"accuracies": (0.53, 0.53, 0.53)}, "on the dev set acc 0.53 after each of 3 epochs"),
        ("task3_ddp", 4, {"seconds": [0.1] * 20 + [0.2] * 20}, "took 0.1000 s in the first half and 0.2000 s in the"),
        ("task3_ddp", 4, {"steps": 12}, "runs/task3_ddp: only 12 iterations; the course asks for 40"),
        ("task3_ddp", 4, {"per_gpu_train_batch_size": 8}, "is not computed: total batch 64 vs. 32"),
        ("task2b_allreduce", 4, {"losses": [0.69] * 39 + [0.68]}, "the first five losses of runs/task1_single"),
        ("task2b_allreduce", 4, {"losses": [0.69] * 40}, "training loss is 0.690000 in every iteration"),
    ],
)
def test_a_run_that_cannot_be_is_flagged(tree, task, workers, options, doubt):
    write_run(tree / "runs" / task, task, workers, **{"seconds": 0.3, **options})

    assert doubt in doubts(tree)


def test_runs_that_were_made_otherwise_are_not_compared(tree):
    write_run(tree / "runs/task3_ddp", "task3_ddp", 4, seed=7)

    text, findings = read_report(tree)

    all_doubts = "\n".join(findings.doubts)
    assert "the speed-up of runs/task3_ddp over runs/task1_single is not computed: seed 42 vs. 7" in all_doubts
    assert "times of runs/task2a_gather_scatter and runs/task3_ddp are not comparable: seed 42 vs. 7" in all_doubts
    assert "losses of runs/task1_single and runs/task3_ddp are not comparable: seed 42 vs. 7" in all_doubts
    assert "| – | not comparable | 1 | `runs/task3_ddp` |" in section(text, "Scalability")


def test_a_missing_rank_is_named_and_the_loss_says_how_many_ranks_it_is_of(tree):
    (tree / "runs/task2a_gather_scatter/rank3.json").unlink()

    text, findings = read_report(tree)

    assert "rank3.json is missing (the run had 4 workers)" in "\n".join(findings.doubts)
    assert "| 2a gather + scatter (3 of 4 ranks) |" in text


@pytest.mark.parametrize(
    "changes, doubt",
    [
        ({"tokens_per_second": 2500.0, "training_time": 0.8}, "a speed-up of 2.50 exceeds the number of workers, 2"),
        ({"tokens_per_second": 1010.0, "training_time": 2.0}, "1.01 is within the noise"),
        ({"batch_size": 64}, "not comparable, the batch of one worker is 32 vs. 64"),
        ({"setting": {"model": "tiny", "seed": 7}}, "not comparable, seed 42 vs. 7"),
        ({"training_time": 0.3}, "540 tokens per epoch in one run, 2000"),
        ({"tokens_per_second": "many"}, "data_parallel_2.json was written by another version"),
        ({"other_programs": 1.6}, "GPT-2, workers: 2, threads: 1: disturbed: other programs used 1.6 of"),
        ((3.0, 1.4), "pipeline_parallel vs. model_parallel: a speed-up of 2.14 exceeds the number of partitions, 2"),
        ((3.0, 3.001), "pipeline_parallel vs. model_parallel: 1.00 is within the noise"),
        ((3.0, 2.0, 150.0), "tokens per second x seconds gives 150 tokens per epoch in one run, 300"),
        ((3.0, 2.0, 300.0, 0.9), "pipeline_parallel: disturbed: other programs used 0.9 of"),
    ],
)
def test_gpt2_metrics_that_cannot_be_are_flagged(tree, changes, doubt):
    if isinstance(changes, tuple):
        write_modes(tree / "submit_figures", *changes)
    else:
        write_gpt2(tree / "submit_figures", **changes)

    assert doubt in doubts(tree)


def test_the_speed_up_is_over_one_worker_with_one_thread_and_all_cores_stand_beside_it(tree):
    figures = tree / "submit_figures"
    one = json.loads((figures / "data_parallel_1.json").read_text())
    row = one | {"threads": 2, "tokens_per_second": 1700.0, "training_time": 2000 / 1700}
    (figures / "data_parallel_1_threads_2.json").write_text(json.dumps(row))

    text, findings = read_report(tree)

    assert "| 1 | 2 | 64 | 1.176\u00a0± 0.010 | 1700\u00a0± 10 | 1.70 |".replace("± ", "±\u00a0") in text
    assert "| 2 | 1 | 128 |" in text and "| 1.80 |" in text and "all cores" not in str(findings.missing)


def test_the_run_behind_the_figures_of_gpt2_is_named(tree):
    sizes = {"n_epochs": 2, "batch_size": 128, "model_max_length": 64}
    folder = write_run(tree / "runs/task2b_allreduce_gpt2", "task2b_allreduce", 2, **sizes)
    record = json.loads((folder / "rank0.json").read_text())
    last = sum(step["seconds"] for step in record["iterations"][39:])
    before, _ = read_report(tree)
    write_gpt2(tree / "submit_figures", epochs=[[last, 1800.0]])

    assert "| `runs/task2b_allreduce_gpt2` | – | 2/2 |" in before
    assert "| `runs/task2b_allreduce_gpt2` | GPT-2 figures | 2/2 |" in read_report(tree)[0]


def test_epochs_of_unequal_speed_are_not_called_unequally_long(tree):
    slow = {"training_time": 1.6, "tokens_per_second": 1600.0}  # the product of the means is 2,560
    epochs = [[0.8, 2500.0], [1.6, 1250.0], [2.4, 2000 / 2.4]]  # 2,000 tokens each
    write_gpt2(tree / "submit_figures", **slow, epochs=epochs)
    assert "tokens per epoch" not in doubts(tree)

    epochs[2][1] = 400.0
    write_gpt2(tree / "submit_figures", **slow, epochs=epochs)
    change(tree / "submit_figures/data_parallel_1.json", epochs=[[2.0, 1000.0]] * 3)
    assert "960 tokens per epoch in one run, 2000" in doubts(tree)


def test_half_written_gpt2_metrics_and_figures_are_named(tree):
    (tree / "submit_figures/data_parallel_1.json").write_text('{"workers": 1')
    (tree / "submit_figures/pipeline_metrics.json").write_text("[]")
    figure = tree / "submit_figures/pipeline_tokens_per_second.png"
    figure.write_bytes(figure.read_bytes()[:500])

    text, findings = read_report(tree)

    assert any(f"{figure.name} (it is damaged)" in what for what, _ in findings.missing)
    assert f"(figures/{figure.name})" not in text
    for name in ("data_parallel_1", "pipeline_metrics"):
        assert f"submit_figures/{name}.json is incomplete or damaged; run it again" in findings.doubts


def test_the_students_lines_for_a_region_are_in_it(tree):
    lines = ['"""A script."""', "# TODO(cos598d) 1.2: go on", "mine = 1", "# END TODO 1.2"]
    (tree / "task1_single").mkdir()
    (tree / "task1_single/run_glue.py").write_text("\n".join([*lines, ""]))

    text, findings = read_report(tree)

    assert "#### 1.2 backward (`task1_single/run_glue.py`)\n\n```python\nmine = 1\n```" in text
    assert ("regions 1.1, 1.3, 1.4 are not solved", "pytest --hint 1.1") in findings.missing


def test_a_students_name_makes_a_file_name_or_is_an_error():
    assert make_student(" ab1234 ", " First  Last") == ADA  # however blanks and accents are typed
    assert make_student("ab1234", "Zoe\u0308 Last") == make_student("ab1234", "Zo\u00eb Last")
    assert make_student("ab1", "José  María O'Neill-Łuk").stem == "ab1_José_María_ONeill-Łuk"
    for netid, name in (("ab-1", "First Last"), ("../x", "A B"), ("ab1", "Ada"), ("ab1", "1 2"), ("", "")):
        with pytest.raises(InputError, match=r"--netid|--name"):
            make_student(netid, name)


def test_a_newest_run_that_was_stopped_is_shown_with_a_row_per_rank_unless_its_file_is_damaged(tree):
    row = {"rank": "1", "state": "waits", "where": "all_reduce #42 (5), run_glue.py:72", "calls": "42 all_reduce"}
    kept = tree / "runs" / "task3_ddp" / "stopped.json"
    kept.write_text(json.dumps({"conclusion": "rank 0 died (process 7 on here)", "rows": [row]}))

    text, findings = read_report(tree)

    assert "| 1 | waits | all_reduce #42 (5), run_glue.py:72 | 42 all_reduce |" in text
    assert "runs/task3_ddp: the newest run was stopped: rank 0 died (process 7 on here)" in findings.doubts
    for content in ("", "[1]", '{"conclusion": 1, "rows": [{}]}'):
        kept.write_text(content)
        assert "stopped" not in doubts(tree)
