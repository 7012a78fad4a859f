"""Predictions from a made-up calibration: their parts, their order, what is refused, and how fast they are."""

from dataclasses import replace

import pytest
import torch.distributed as dist

from benchmark.calibrate import parse as parse_calibrate
from benchmark.cost import calibration as stored
from benchmark.cost.architecture import describe
from benchmark.cost.calibration import EngineTimes, load, save
from benchmark.cost.cell import Cell
from benchmark.cost.compute_times import ComputeTimes, combined
from benchmark.cost.measuring.compute_parts import mean
from benchmark.cost.predict_step import operations, predict, with_engine
from benchmark.cost.programs.program import Compute, Kind, Start, Wait
from benchmark.predict import parse
from benchmark.strategies import STRATEGIES
from common.errors import InputError

ALONE = ("single", "dp")
PREDICTED = [name for name in STRATEGIES if not name.endswith("_offload")]
TOGETHER = [name for name in PREDICTED if name not in ALONE]
WHOLE = [name for name in TOGETHER if not STRATEGIES[name].cuts]


def cell(strategy, workers=2, batch=4, model="gpt2-tiny", **where):
    return Cell(strategy, model, 1 if strategy in ALONE else workers, batch, **where)


def test_one_worker_takes_what_was_calibrated(calibration):
    prediction = predict(calibration, cell("single"))

    assert prediction.seconds == pytest.approx(4 * 0.030 + 0.008)


def test_gradients_that_are_sent_after_backward_are_exposed(calibration):
    """zero0 sends 4.47 MB in one message over 12 MB/s, and the number 1 in another one."""
    communication = predict(calibration, cell("zero0", rate="100mbit")).parts["communication"]

    latency = 2 * 1e-4  # two hops of a ring of two workers
    first = 4 / 12e6  # the table begins with 4 bytes
    assert communication == pytest.approx(4_470_272 / 12e6 - first + 2 * (latency + first), rel=1e-3)


@pytest.mark.parametrize("strategy", PREDICTED)
def test_parts_add_up_and_a_step_is_longer_with_a_slower_link_more_examples_or_more_workers(strategy, calibration):
    # The calibrated links have no burst, the others have one.
    links = [("1gbit", "100mbit"), ("500mbit", "300mbit", "10mbit")] if strategy in TOGETHER else [()]
    by_links = [[predict(calibration, cell(strategy, rate=rate)) for rate in (None, *rates)] for rates in links]
    by_batch = [predict(calibration, cell(strategy, batch=batch)) for batch in (2, 4, 32)]
    few = 4 if strategy == "own_ring" else 2  # a ring of two sends in one direction at a time: it is slower than four
    workers = (few, 8, 16, 4096) if strategy in WHOLE else (2,)
    by_workers = [predict(calibration, cell(strategy, count, rate="1gbit", cores=2)) for count in workers]

    for predictions in (*by_links, by_batch, by_workers):
        seconds = [step.seconds for step in predictions]
        assert seconds == sorted(seconds)
        assert all(sum(step.parts.values()) == pytest.approx(step.seconds) for step in predictions)
        assert all(step.parts["forward"] > 0 and step.parts["backward"] > 0 for step in predictions)


def test_latency_is_added_to_every_hop(calibration):
    near = predict(calibration, cell("own_ring", 16, rate="1gbit", cores=2))
    far = predict(calibration, cell("own_ring", 16, rate="1gbit", latency=1e-3, cores=2))

    assert far.seconds - near.seconds == pytest.approx(2 * 15 * 1e-3)


def test_workers_that_share_two_cores_are_slower_than_those_on_machines_of_their_own(calibration):
    shared = predict(calibration, cell("ddp", 4, rate="1gbit"))
    own = predict(calibration, cell("ddp", 4, rate="1gbit", cores=2))

    assert shared.parts["forward"] == pytest.approx(2 * own.parts["forward"])


def test_what_many_tensors_need_beyond_their_elements_is_not_counted_for_one(calibration):
    """The optimizer's 8 ms are 1.12 ms for 1.12 million elements, and the rest for the tensors.

    They stay 8 ms where one tensor alone took longer than all.
    """
    slow = replace(calibration, small=[replace(entry, flat={1: 1e-9, 10**7: 1.0}) for entry in calibration.small])
    times, slower = (ComputeTimes(known, cell("ddp", 1)) for known in (calibration, slow))
    weights, elements = times.architecture.weights, times.architecture.elements

    whole = [one.update([weight.elements for weight in weights]) for one in (times, slower)]
    assert whole == pytest.approx([0.008, 0.008])
    assert 0 < slower.update([weights[-1].elements]) < 0.001
    for_elements = 1e-3 * elements / 1e6
    assert times.update([elements]) == pytest.approx(for_elements + (0.008 - for_elements) / len(weights), rel=0.01)


def test_parts_of_a_step_are_means_so_that_interruptions_are_counted(monkeypatch):
    """Each part is interrupted once in three steps: medians would add up to a step without interruptions."""
    monkeypatch.setattr(dist, "all_reduce", lambda values, group: None)
    runs = [{"block 0": 4.0, "block 1": 1.0}, {"block 0": 1.0, "block 1": 4.0}, {"block 0": 1.0, "block 1": 1.0}]

    assert mean(runs, 1, None) == {"block 0": 2.0, "block 1": 2.0}
    assert mean(runs, 2, None, factor=0.5) == {"block 0": 0.5, "block 1": 0.5}


def test_what_was_not_calibrated_is_said(calibration):
    prediction = predict(calibration, cell("ddp", 8, batch=16, model="gpt2-24m", rate="10gbit", cores=16))

    notes = "; ".join(prediction.notes)
    assert "gpt2-24m with 64 tokens was not calibrated: scaled from gpt2-tiny" in notes
    assert "a link of 10gbit was not calibrated" in notes
    assert "operations of 8 workers are extrapolated from 4" in notes
    assert "16 cores of a worker are extrapolated from 2" in notes
    assert not prediction.is_calibrated
    assert predict(replace(calibration, engines=[]), cell("ddp", rate="1gbit")).notes == (
        "the engine of ddp was not calibrated: its own cost is missing",
    )


def test_an_engine_that_was_not_calibrated_costs_what_operations_of_the_same_framework_cost(calibration):
    """ddp takes 10 ms longer than its program; zero2 30 ms more for its operations, of which zero0 has two."""
    expected = {name: predict(calibration, cell(name)) for name in ("ddp", "zero2", "zero0")}
    calls = {name: sum(calls for calls, _ in prediction.sent.values()) for name, prediction in expected.items()}
    measured = [
        EngineTimes(name, "gpt2-tiny", 64, 4, 2, expected[name].seconds + longer, 10)
        for name, longer in (("ddp", 0.010), ("zero2", 0.040))
    ]

    of_two = replace(calibration, engines=measured)
    uncalibrated, crowded, calibrated, larger = (
        predict(of_two, one)
        for one in (cell("zero0"), cell("zero0", 4), cell("zero2"), cell("zero2", model="gpt2-24m"))
    )

    assert calls["zero0"] == 2 < calls["zero2"]
    assert uncalibrated.parts["engine"] == pytest.approx(0.010 + 0.030 * 2 / calls["zero2"])
    assert crowded.parts["engine"] == pytest.approx(2 * uncalibrated.parts["engine"])
    assert calibrated.parts["engine"] == pytest.approx(0.040)
    assert calibrated.seconds == pytest.approx(measured[1].seconds)
    more = sum(calls for calls, _ in larger.sent.values()) / calls["zero2"]
    assert larger.parts["engine"] == pytest.approx(0.010 + 0.030 * more) and more > 1
    assert "the engine of zero0 was not calibrated: its own cost is that of zero2" in uncalibrated.notes


def test_large_layers_that_multiply_faster_shorten_the_part_of_every_example(calibration):
    """A model of twice the width and 1.5 times the blocks: 6 times the multiplications in the blocks."""
    as_fast, faster = (
        predict(
            replace(calibration, small=[replace(one, flop=flop) for one in calibration.small]),
            cell("single", model="gpt2-6x256"),
        ).parts["forward"]
        for flop in ({128: 2e-11}, {128: 2e-11, 256: 1e-11})
    )

    tiny, large = (describe(model, 64).flops for model in ("gpt2-tiny", "gpt2-6x256"))
    block, head = (large[unit] / tiny[unit] for unit in ("block 0", "after"))  # PyTorch 2.15 counts attention, too
    assert block == pytest.approx(4, rel=0.05) and head == pytest.approx(67.1 / 24.7, rel=0.01)
    assert as_fast == pytest.approx(4 * 0.010 * (6 * block + head + 2) / 6, rel=0.01)
    assert faster == pytest.approx(as_fast / 2)


def test_the_further_gradients_of_a_larger_model_are_written_to_memory(calibration):
    parts = [
        ComputeTimes(replace(calibration, small=[replace(one, copy_byte=copied)]), cell("ddp", model="gpt2-6x256"))
        .step(4).backward.values()
        for one in calibration.small[:1] for copied in (0.0, 1e-9)
    ]  # fmt: skip
    small, large = (describe(model, 64) for model in ("gpt2-tiny", "gpt2-6x256"))

    def written(model):  # the matrix that embedding and head share gets a gradient from each
        inner = sum(weight.bytes for weight in model.weights if weight.block is not None)
        outer = [weight.bytes for weight in model.weights if weight.block is None]
        return inner, sum(outer) + max(outer)

    (inner, outer), (few, of_tiny) = written(large), written(small)
    further = inner - 6 * few / small.n_blocks + outer - of_tiny
    assert sum(parts[1]) - sum(parts[0]) == pytest.approx(3e-9 * further)


def test_a_smaller_model_than_the_calibrated_one_writes_no_gradients_less(calibration):
    small = [replace(one, copy_byte=1e-9) for one in calibration.small]
    times = ComputeTimes(replace(calibration, small=small), cell("ddp", model="gpt2-2x64"))

    assert min(times.step(1).backward.values()) > 0


def test_a_pipeline_adds_the_gradients_of_all_micro_batches_but_the_first(calibration):
    def backward(copied):
        small = [replace(one, copy_byte=copied) for one in calibration.small]
        program = predict(replace(calibration, small=small, engines=[]), cell("own_1f1b")).kinds[1].program
        return sum(step.seconds for step in program if isinstance(step, Compute) and step.phase == "backward")

    model = describe("gpt2-tiny", 64)  # the last of two stages has half of the blocks, the norm, and the shared matrix
    names = [f".h.{block}." for block in range(model.n_blocks // 2, model.n_blocks)] + ["ln_f", "wte"]
    size = sum(weight.bytes for weight in model.weights if any(name in weight.name for name in names))
    assert backward(1e-9) - backward(0.0) == pytest.approx(1.5e-9 * size * (8 - 1))


def test_an_engine_works_before_each_operation_and_at_the_end():
    program = (Start("a", "all_reduce", 4.0, 2, (0,)), Start("b", "exchange", 4.0, 2, (0,), repeats=3), Wait("a"))

    (kind,) = with_engine([Kind(range(2), program)], once=0.5, each=0.1)

    work = [step.seconds if isinstance(step, Compute) else type(step).__name__ for step in kind.program]
    assert work == pytest.approx([0.1, "Start", 0.1 * 3, "Start", "Wait", 0.5])


@pytest.mark.parametrize(("strategy", "is_early"), [("own_1f1b", True), ("pipeline", False)])
def test_our_stages_ask_for_the_next_message_before_they_compute_and_torchs_do_not(strategy, is_early, calibration):
    program = predict(replace(calibration, engines=[]), cell(strategy)).kinds[1].program  # the last of two stages

    asks = next(i for i, step in enumerate(program) if getattr(step, "key", "") == "forward 1 from 0")
    backward = next(i for i, step in enumerate(program) if isinstance(step, Compute) and step.phase == "backward")
    assert (asks < backward) == is_early


def test_a_pipeline_that_was_not_calibrated_costs_what_the_messages_of_another_one_cost(calibration):
    measured = {name: EngineTimes(name, "gpt2-tiny", 64, 4, 2, 1.0, 9) for name in ("pipeline", "own_tensor", "ddp")}

    both, alone = (
        predict(replace(calibration, engines=[measured[name] for name in names]), cell("own_1f1b"))
        for names in (("pipeline", "own_tensor", "ddp"), ("pipeline", "ddp"))
    )

    assert "the engine of own_1f1b was not calibrated: its own cost is that of pipeline" in both.notes
    assert both.parts["engine"] == alone.parts["engine"] > 0


def test_a_message_is_an_operation_of_its_sender_that_an_engine_costs_more_for(calibration):
    """own_1f1b gathers tokens, and adds the loss and the norm; each stage sends the shared matrix and 8 activations."""
    assert operations(predict(calibration, cell("own_1f1b")).kinds) == 3 + 1 + 8


def test_of_three_workers_a_step_is_between_those_of_two_and_four(calibration):
    """On two cores, four of them take three times as long as two here, and one alone as long as two."""
    slow = [combined([one], lambda values: 1.5 * values[0]) for one in calibration.profiles if one.workers == 4]
    of_two = [one for one in calibration.profiles if one.workers == 2]
    small = [replace(one, copy_byte=1e-9) for one in calibration.small]
    with_slow = replace(calibration, profiles=[*of_two, *slow], small=small)

    times = [ComputeTimes(with_slow, cell("ddp", count)) for count in (1, 2, 3, 4)]

    assert [one.step(4).seconds / times[1].step(4).seconds for one in times] == pytest.approx([1, 1, 2, 3])
    assert [one.copies(1e6) for one in times] == pytest.approx([1e-3, 1e-3, 1.5e-3, 2e-3])


@pytest.mark.parametrize(("strategy", "most"), [("own_zero1", 2), ("own_zero2", 2), ("own_zero3", 1)])
def test_the_lessons_receive_gradients_before_too_many_are_in_transit(strategy, most, calibration):
    (kind,) = predict(calibration, cell(strategy)).kinds
    in_transit, counts = set(), []

    for step in kind.program:
        if isinstance(step, Start) and step.operation == "all_to_all":
            in_transit.add(step.key)
        elif isinstance(step, Wait):
            in_transit.discard(step.key)
        counts.append(len(in_transit))

    assert max(counts) == most


@pytest.mark.parametrize("strategy", ["ddp", "own_zero2", "fsdp"])
def test_far_beyond_the_calibrated_workers_only_a_range_is_known(strategy, calibration):
    """4 workers were calibrated; their waiting for the slowest one grows with their number."""
    spread = [replace(one, spread=0.02 * one.seconds) for one in calibration.profiles]
    calibration = replace(calibration, profiles=spread)

    near, far = (predict(calibration, cell(strategy, n, rate="1gbit", cores=2)) for n in (16, 17))

    assert not near.is_range and near.least == near.seconds
    assert far.is_range and 0 < far.least < near.seconds < far.seconds
    assert any("a range" in note for note in far.notes)


def test_the_slowest_of_more_workers_is_later(calibration):
    """Of 2 normally distributed times the larger is 0.56 deviations above the mean, of 64 2.3.

    In a longer step, it grows as a random walk does.
    """
    spread = replace(calibration, profiles=[replace(one, spread=0.001) for one in calibration.profiles])
    times = ComputeTimes(spread, cell("ddp"))

    assert times.late(4, 1) == 0.0
    assert times.late(4, 2) == pytest.approx(0.001)
    assert times.late(4, 64) == pytest.approx(0.001 * 2.36 / 0.59, rel=0.05)
    larger = ComputeTimes(spread, cell("ddp", model="gpt2-6x256"))
    longer = larger.step(4).seconds / times.step(4).seconds
    assert larger.late(4, 2) == pytest.approx(0.001 * longer**0.5)


def test_a_model_that_deepspeed_cannot_keep_whole_is_gathered_twice(calibration):
    small, large = (
        predict(calibration, Cell("zero3", model, 2, 1, rate="1gbit", memory=1e13)).sent["all_gather"][1]
        / describe(model, 64).bytes
        for model in ("gpt2-tiny", "gpt2-24x2048")
    )

    assert small == pytest.approx(0.5, rel=0.01) and large == pytest.approx(1.0, rel=0.01)


# ------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--strategy", "zero9"], "--strategy: expected one of single, dp, ddp, .*; got 'zero9'"),
        (["--model", "bert"], "--model: expected gpt2, .*; got 'bert'"),
        (["--workers", "0"], "--workers: expected 1 or more, got 0"),
        (["--batch_size", "-1"], "--batch_size: expected 1 or more, got -1"),
        (["--rate=-1gbit"], "--rate: expected a rate such as 1gbit .*got '-1gbit'"),
        (["--latency=-5us"], "--latency: expected a number with us, ms or s such as 50us; got '-5us'"),
        (["--cores", "0"], "--cores: expected 1 or more, got 0"),
        (["--memory_gb", "-8"], "--memory_gb: expected more than 0; got -8"),
        (["--bucket_mb", "0"], "--bucket_mb: expected a size in MiB above 0; got 0"),
        (["--calibration", "nowhere.json"], "--calibration: no file nowhere.json; make it with: python -m benchmark.c"),
    ],
)
def test_a_question_that_has_no_answer_is_one_clear_line(words, message, calibration_file):
    with pytest.raises(InputError, match=message):
        parse(["--calibration", str(calibration_file), *words])


@pytest.mark.parametrize(
    ("cell_words", "message"),
    [
        (("single", 2), "--strategy single runs on one worker, got 2; use ddp"),
        (("zero2_offload", 2), "--strategy zero2_offload is not predicted; use zero2"),
        (("pipeline", 5), "--workers: gpt2-tiny has 4 blocks, expected at most as many stages, got 5"),
    ],
)
def test_a_strategy_that_cannot_run_so_is_one_clear_line(cell_words, message, calibration):
    with pytest.raises(InputError, match=message):
        predict(calibration, Cell(cell_words[0], "gpt2-tiny", cell_words[1], 4))


def test_a_batch_that_does_not_fit_is_one_clear_line(calibration):
    """Activations of gpt2-tiny: 4.2 MB for an example of 64 tokens; the made-up machine has 8 GB."""
    message = (
        r"--batch_size 1000 does not fit: 2 workers of a machine need 5\.4 GB each .* and it has 8\.0 GB; use a smal"
    )

    with pytest.raises(InputError, match=message):
        predict(calibration, cell("ddp", batch=1000))

    assert predict(calibration, cell("ddp", batch=1000, memory=16e9)).seconds > 0


def test_a_calibration_is_read_as_it_was_written_and_refused_elsewhere_or_damaged(calibration_file, calibration):
    file, here = calibration_file, replace(calibration, machine=stored.this_machine())

    assert load(file) == here
    save(replace(here, machine=here.machine | {"cores": 96}), file)
    with pytest.raises(InputError, match=r"another machine: expected cores \d+, got 96; run python -m benchmark.cal"):
        load(file)
    save(replace(here, versions=here.versions | {"torch": "9.9"}), file)
    with pytest.raises(InputError, match=r"of another version: expected torch 2.*, got 9\.9"):
        load(file)
    file.write_text(file.read_text()[:-100])
    with pytest.raises(InputError, match=r"calibration.json is damaged .*; run python -m benchmark.calibrate again"):
        load(file)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--links", "-1gbit"], "--rate: expected a rate such as 1gbit"),
        (["--workers", "0,2"], "--workers: expected positive whole numbers"),
        (["--models", "bert"], "--models: expected gpt2"),
        (["--strategies", "ddp,zero9"], "--strategies: expected names among single, .*; got zero9"),
        (["--seconds", "0"], "--seconds: expected more than 0, got 0"),
    ],
)
def test_a_calibration_that_cannot_be_made_is_one_clear_line(words, message):
    with pytest.raises(InputError, match=message):
        parse_calibrate([f"{words[0]}={words[1]}"])
