"""task4_traffic beside its lesson: a run of two workers and its comparison, and the counters."""

import argparse
import json
from dataclasses import replace
from itertools import pairwise

import pytest

from common.errors import InputError
from common.flags import link_rate
from common.models.load import model_path
from common.paths import ROOT
from staff.tests import workers
from staff.tests.tasks import by_hand
from staff.tests.tasks.one_process import command
from task4_traffic import compare, counters, expected
from task4_traffic.compare import check_comparable, extrapolations, read_run, volume
from task4_traffic.counters import HEAD, Counted, Counter, Sample, interface_counters, rates, read_counters

# --- a run of two workers with real gloo, on the loopback interface ---

FLAGS = replace(by_hand.Flags(), dropout=0.3)
STEPS, EPOCHS = 6, 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("task4")
    data = by_hand.write_glue(made / "data", "rte", train=22, dev=33)
    flags = ["--data_dir", data, "--model_name_or_path", "tiny", *FLAGS.words("glue", 2), "--link_rate", "8mbit"]
    workers.run(ROOT / "task4_traffic/run_glue.py", 2, made, *flags)
    return made / "run"


@pytest.mark.real
def test_two_workers_train_as_one_with_their_mean_gradient(folder):
    with command("pytest"):
        run = by_hand.train_bert("rte", model_path("tiny", "bert"), folder.parent / "data", FLAGS, workers=2)
    for rank, losses in enumerate(run.losses):
        assert [float(line) for line in (folder / f"loss_{rank}.txt").read_text().split()] == pytest.approx(losses)


@pytest.mark.real
def test_a_run_keeps_its_tensors_and_a_window_for_each_epoch_with_what_the_interface_counted(folder):
    for rank in range(2):
        traffic = json.loads((folder / f"traffic_{rank}.json").read_text())
        (group,) = traffic["sent"]
        assert (group["iterations"], traffic["interface"]) == (STEPS * EPOCHS, "lo")
        assert len(group["tensors"]) == traffic["framing"]["messages"] == 41
        assert [window["iterations"] for window in traffic["windows"]] == [STEPS] * EPOCHS
        at = {sample.event: sample for sample in read_counters(folder / f"counters_{rank}.csv")}
        for number, window in enumerate(traffic["windows"], start=1):
            begin, end = at[f"window {number} begins"], at[f"window {number} ends"]
            assert (window["sent"], window["received"]) == (end.sent - begin.sent, end.received - begin.received)
            assert begin.time < at[f"iteration {number * STEPS}"].time < end.time
    assert not list(folder.glob("*.part"))


@pytest.mark.real
def test_a_comparison_prints_bytes_of_all_workers_on_loopback_ratios_and_times_and_draws_both_plots(
    folder, tmp_path, capsys
):
    record, traffic = (json.loads((folder / name).read_text()) for name in ("rank0.json", "traffic_0.json"))
    size = 4 * record["parameters"]  # fp32
    with command("compare.py", folder, "--output", tmp_path):
        compare.main()

    output = capsys.readouterr().out
    row = [cell.replace(",", "") for cell in output.splitlines()[3].split()]
    observed = sum(w["sent"] for w in traffic["windows"]) / (STEPS * EPOCHS)  # in an iteration
    expected_bytes = 2 * size  # 2 (N-1)/N of S for each of two workers
    framing = traffic["framing"]["sent"]
    assert row[:5] == ["4", "fp32", "41", f"{size}", f"{STEPS}"]
    assert [int(cell) for cell in row[5:8]] == [STEPS * expected_bytes, round(STEPS * framing), round(STEPS * observed)]
    ratios = [observed / expected_bytes, observed / (expected_bytes + framing)]
    assert [float(cell) for cell in row[8:]] == pytest.approx(ratios, abs=1e-4)
    measured = [step["phases"]["communication"] for step in record["iterations"][1:]]
    assert f"at least {size / 1e6:.4f} s predicted" in output  # one worker's S at a megabyte per second
    assert f"{sum(measured) / len(measured):.4f} s measured" in output
    for name in ("over_time", "per_epoch"):
        assert (tmp_path / f"traffic_{name}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.real
def test_a_run_that_cannot_be_compared_is_refused_and_a_short_one_extrapolated(folder, tmp_path):
    run = read_run(folder)
    assert extrapolations([run]) == ""
    assert extrapolations([replace(run, steps_per_epoch=20)]).endswith("an epoch of 20 iterations, 12 were observed")
    for change, words in (
        ({"world_size": 4}, "run has 2, b has 4"),
        ({"interface": "eth0"}, r"b counts rank 0 \(eth0"),
    ):
        with pytest.raises(InputError, match=words):
            check_comparable([run, replace(run, name="b", **change)])
    with pytest.raises(InputError, match=r"expected rank0.json of a run of task4_traffic"):
        read_run(tmp_path)


# --- what is expected ---


def test_the_table_of_expected_traffic_multiplies_an_iteration_by_those_of_an_epoch(capsys):
    words = ["--world_size", 4, "--examples", 100, "--grad_dtype", "bf16", "--rate", "8mbit"]
    with command("expected.py", *words):
        expected.main()

    lines = capsys.readouterr().out.splitlines()
    rows = [line.replace(",", "").split() for line in lines]
    size = 2 * 218_754
    # 100 examples, padded, are 25 on each of 4 workers: 7 batches of 4. The ring sends 2 (N-1)/N S.
    for batch, steps in (("16", 7), ("64", 2)):
        assert [batch, f"{steps}", "all_reduce", "any", f"{1.5 * size:.0f}", f"{1.5 * size * steps:.0f}"] in rows
        assert [batch, f"{steps}", "gather", "+", "scatter", "0", f"{3 * size}", f"{3 * size * steps}"] in rows
        assert [batch, f"{steps}", "gather", "+", "scatter", "others", f"{size}", f"{size * steps}"] in rows
    assert f"  {'all_reduce':<17} {1.5 * size / 1e6:.4f} s" in "\n".join(lines)
    assert f"  {'gather + scatter':<17} {2 * 3 * size / 1e6:.4f} s" in "\n".join(lines)


@pytest.mark.parametrize(("text", "bits"), [
    ("1gbit", 1e9), ("100Mbit", 1e8), ("2.5gbit", 2.5e9), ("56kbit", 5.6e4), ("800bit", 800),
    *[(wrong, None) for wrong in ("fast", "1", "gbit", "-1gbit", "0mbit", "nangbit")],
])  # fmt: skip
def test_a_rate_is_read_in_the_words_of_tc_and_nothing_else_is_one(text, bits):
    if bits is None:
        with pytest.raises(argparse.ArgumentTypeError, match="expected a rate such as 1gbit"):
            link_rate(text)
    else:
        assert link_rate(text) == bits


# --- the kernel's counters ---


def counted(received: int, sent: int) -> dict[str, Counted]:
    return {"lo": (100, 100, 2, 2), "eth0": (received, sent, 7, 8)}


def test_the_interfaces_of_this_machine_are_read_and_another_one_is_refused(tmp_path):
    assert all(min(row) >= 0 for row in interface_counters().values())
    with pytest.raises(InputError, match="expected one of eth0, lo; got 'eth7'"):
        Counter("eth7", tmp_path / "c.csv", read=lambda: counted(1, 1))


def test_a_mark_is_in_the_file_at_once_and_a_file_cut_off_in_a_line_is_read(tmp_path):
    readings = iter([counted(9, 20), counted(10, 20), counted(40, 70)])
    last = [counted(0, 0)]

    def read() -> dict[str, Counted]:
        last[0] = next(readings, last[0])
        return last[0]

    counter = Counter("eth0", tmp_path / "c.csv", read=read, per_second=0.001)
    counter.mark("window 1 begins")

    whole = read_counters(tmp_path / "c.csv")
    counter.stop()
    assert [(row.received, row.sent, row.event) for row in whole] == [(10, 20, "start"), (40, 70, "window 1 begins")]
    text = (tmp_path / "c.csv").read_text()
    assert tuple(text.splitlines()[0].split(",")) == HEAD
    (tmp_path / "cut.csv").write_text(text[: text.rindex(",") - 4])
    assert len(read_counters(tmp_path / "cut.csv")) == 2


def test_the_command_counts_some_readings_in_a_tenth_of_a_second_each(tmp_path, capsys):
    with command("counters.py", "--interface", "lo", "--seconds", 0.35, "--output", tmp_path / "c.csv"):
        counters.main()

    samples = read_counters(tmp_path / "c.csv")
    assert [samples[0].event, samples[-1].event] == ["start", "stop"]
    assert all(later.time - sample.time >= 0.09 for sample, later in pairwise(samples[:-1]))
    assert f"lo: {samples[-1].received - samples[0].received:,} bytes received" in capsys.readouterr().out


def test_a_volume_is_interpolated_and_a_mark_beside_a_reading_makes_no_peak():
    samples = [Sample(10.0, 0, 0), Sample(11.0, 100, 200), Sample(12.0, 100, 600)]
    assert volume(samples, 10.5, 11.5) == (50.0, 300.0)

    samples = [Sample(0.0, 0, 0), Sample(0.1, 10, 100), Sample(0.1001, 10, 200), Sample(0.2, 30, 300)]
    assert [tuple(map(round, point[1:])) for point in rates(samples)] == [(100, 1000), (200, 2000)]
