"""One strategy, one model, one batch size: train, and report time, bytes and memory.

    python -m benchmark.run --strategies zero2 --model gpt2-tiny --workers 2 --batch_size 4 --max_steps 20

    arguments -> workers -> data -> model -> strategy -> the one loop -> record: table, files, one JSON line

Written to --output_dir: result.json, losses.txt, tensorboard/, and what was asked for: checkpoints/, model/, traces,
wandb/.
"""

import gc
import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # it also starts as a script, under torchrun
import common.workers.environment  # isort: skip  # noqa: F401 (stops with a message if torch is missing)

import torch
from torch import nn
from transformers import PreTrainedModel

from benchmark.arguments import parse
from benchmark.measure.machine import busy, environment
from benchmark.measure.payload import sends_nothing
from benchmark.measure.record import COUNTED, RunRecord, read_record
from benchmark.measure.result import assemble, table
from benchmark.names import is_own
from benchmark.proof.prover import NOT_PROVED
from benchmark.prove import small_settings
from benchmark.settings import Settings
from benchmark.strategies import STRATEGIES
from benchmark.training.log import Log
from benchmark.training.loop import train
from benchmark.training.model_config import model_config
from benchmark.training.own_model import ModelWithLoss
from benchmark.training.trained import bleu_of, whole_model
from benchmark.training.workload import Workload, load_workload, to_device
from benchmark.workers import join, of_everybody, on_workers, prepare
from common.errors import InputError, exit_on_input_error
from common.paths import atomic_write
from common.peak_memory import PeakMemory
from common.workers.process_group import Worker, process_group

ADVICE = "`python -m benchmark.predict --strategies S --workers N` says what another strategy needs"
MOST_EXAMPLES = 16  # of a worker, with the small model


def work(settings: Settings) -> None:
    """One worker of a run; the first one keeps the result."""
    begin = environment()
    with process_group(settings, join) as worker:
        if worker.is_first:
            prepare(settings.output_dir)
        record = train_and_measure(settings, worker, begin)
        gc.collect()  # an engine that outlives its process group can wait for ever for the group's threads when it ends
        everybody = of_everybody(record, worker)
        if worker.is_first:
            with atomic_write(settings.output_dir / "result.json") as file:
                json.dump(replace(record, workers=tuple(everybody)).as_json(), file, indent=1)


def train_and_measure(settings: Settings, worker: Worker, begin: dict) -> RunRecord:
    """Train, save what is asked for, and return this worker's record."""
    workload = load_workload(settings)
    log = Log(settings, worker)
    warm_up(settings, worker)
    memory = PeakMemory(worker.device)  # counts from here: what is there before the model
    with memory.limited(settings.memory_limit_mb, lambda: ADVICE):
        model = workload.build(settings, worker.device)
        shapes = [parameter.shape for parameter in model.parameters()]
        engine = STRATEGIES[settings.strategy].make(settings, worker, model)
        del model
        gc.collect()  # a model of transformers refers to itself: where it was cut, the rest would stay for a while
        measured = train(settings, worker, workload, engine, log, memory)
    if nothing := sends_nothing(settings.strategy, settings.world_size, measured.sent[0]):
        raise InputError(nothing)
    record = assemble(settings, begin, shapes, measured, log)
    if (settings.save or settings.bleu) and (trained := whole_model(settings, engine, workload)):
        if settings.bleu:
            record = replace(record, bleu=bleu_of(trained, workload))
        if settings.save:
            save_model(settings.output_dir / "model", trained, workload)
    log.close()
    return record


def warm_up(settings: Settings, worker: Worker) -> None:
    """Take a step with a small model: what libraries allocate once in a process is not counted as a step's memory.

    How much that is depends on the sizes of a batch.
    """
    small = replace(small_settings(settings), batch_size=min(settings.batch_size, MOST_EXAMPLES), accumulation=1)
    if not is_own(small.model):
        longest = getattr(model_config(small.model)[2], "max_position_embeddings", settings.length)
        small = replace(small, length=min(settings.length, longest))
    workload = load_workload(small)
    engine = STRATEGIES[small.strategy].make(small, worker, workload.build(small, worker.device))
    batch = next(worker.batches(to_device(workload.batches(small), worker.device)))
    engine.backward(engine.forward(batch), last=True)
    engine.step(small.learning_rate)
    del engine
    gc.collect()


def prove_command(settings: Settings) -> str:
    """Return the command that proves what this run has timed."""
    what = f"--strategies {settings.strategy} --model {settings.model} --workers {settings.world_size}"
    return f"python -m benchmark.prove {what} --precision {settings.precision}"


def save_model(folder: Path, model: nn.Module, workload: Workload) -> None:
    """The model and its tokenizer in Hugging Face's format. Of a user's own model, its state_dict in model.pt."""
    try:
        if isinstance(model, ModelWithLoss):
            folder.mkdir(exist_ok=True)
            torch.save(model.model.state_dict(), folder / "model.pt")
            return
        assert isinstance(model, PreTrainedModel)
        model.save_pretrained(folder)
        workload.tokenizer.save_pretrained(folder)
    except OSError as error:
        raise InputError(f"cannot save the model to {folder}: {error.strerror}; free disk space") from None


def main() -> None:
    settings, flags = parse(sys.argv[1:], "run", __doc__)
    if flags.starts_workers:
        load_workload(settings)  # a wrong name or empty data is said once, not by every worker
    if on_workers("benchmark.run", settings, flags.starts_workers, [settings.strategy], partial(work, settings)):
        record = read_record(settings.output_dir / "result.json")
        note = "" if settings.strategy == "single" else f"gradient not proved: {prove_command(settings)}"
        gradient = {"gradient": NOT_PROVED if note else "ok"}
        notes = filter(None, [COUNTED, note, busy(record.environment)])
        print(table(record), *notes, json.dumps(record.summary() | gradient), sep="\n")


if __name__ == "__main__":
    exit_on_input_error(main)
