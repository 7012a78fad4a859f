"""Train GPT-2 on OSCAR text: on one device, on several devices that work one after another, or as a pipeline.

    python pipeline/run_gpt2.py --model_parallel_mode model_parallel
    python pipeline/run_gpt2.py --model_parallel_mode pipeline_parallel --n_chunk 4
    python -m cluster.launch --workers 2 -- pipeline/run_gpt2.py --schedule gpipe

    arguments -> data -> model -> partitions, schedule, Pipe -> train -> record, trace, figures

Shapes: B examples in a batch, T tokens in an example. README.md in this folder explains the regions.
"""

import math
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # finds common/ from any folder
import common.workers.environment  # isort: skip  # noqa: F401 (stops with a message if torch is missing)

import torch
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader

from common.arguments import parse_gpt2_arguments
from common.data.oscar import load_blocks
from common.data.samplers import ShuffledEachEpoch
from common.errors import exit_on_input_error
from common.models.fit import fit_model
from common.models.load import load_tokenizer
from common.optim import build_optimizer, set_seed
from common.record import Record
from common.workers.process_group import process_group
from pipeline.mode_comparison import compare_modes, epoch_metrics
from pipeline.timeline import Trace, traced_blocks
from pipeline.who_waits import explain


def use_cpu_with_one_gpu(config):
    """Return the configuration, with no_cuda if there are partitions and one GPU: they need two devices."""
    partitioned = config.schedule == "threads" and config.model_parallel_mode != "none"
    if config.no_cuda or not partitioned or torch.cuda.device_count() != 1:
        return config
    print(f"{config.model_parallel_mode}: 1 GPU on this machine, two are needed; using the CPU", flush=True)
    return replace(config, no_cuda=True)


def choose_devices(config):
    """Return all GPUs if there are several, otherwise two labels on the CPU."""
    count = 0 if config.no_cuda else torch.cuda.device_count()
    return [f"cuda:{j}" for j in range(count)] if count > 1 else ["cpu:0", "cpu:1"]


def spread(config, worker, model):
    """Distribute the model as --model_parallel_mode says."""
    if config.model_parallel_mode == "none":
        model.to(worker.device)
        return
    devices = choose_devices(config)
    model.parallelize(devices[: len(model.transformer.h)])
    if config.model_parallel_mode == "pipeline_parallel":
        model._prepare_pipeline_parallel(split_size=math.ceil(config.batch_size / config.n_chunk))
    if devices[0].startswith("cpu"):  # each label is a device with its share of the cores, in both modes
        torch.set_num_threads(max(1, torch.get_num_threads() // len(devices)))


def train(config, worker, model, data, record, processes=None):
    """Train as usual: neither the step nor its backward depends on the pipeline."""
    sampler = ShuffledEachEpoch(data.train, config.seed)
    loader = DataLoader(data.train, sampler=sampler, batch_size=config.batch_size, drop_last=True)
    optimizer, scheduler = build_optimizer(config, model, len(loader))
    model.train()
    for _ in record.epochs(loader):
        for tokens in record.iterations(loader):  # (B, T)
            if processes is None:
                with record.phase("forward"):
                    loss = model(tokens, labels=tokens).loss
                with record.phase("backward"):
                    # TODO(cos598d) 1.2: compute the gradient of the loss with respect to every parameter (1 line)
                    # BEGIN SOLUTION 1.2
                    loss.backward()
                    # END SOLUTION 1.2
            else:
                loss = processes.forward_backward(tokens)
            with record.phase("optimizer"):
                clip = clip_grad_norm_ if processes is None else processes.clip_gradients
                clip(model.parameters(), config.max_grad_norm or float("inf"))
                # TODO(cos598d) 1.3: take one optimizer step (1 line)
                # BEGIN SOLUTION 1.3
                optimizer.step()
                # END SOLUTION 1.3
                scheduler.step()
                model.zero_grad()
            record.loss(loss.item())


def show_a_step(config, worker, model, data):
    """Run one more forward and backward, and trace what each partition does, and when."""
    tokens = next(iter(DataLoader(data.train, batch_size=config.batch_size))).to(worker.device)
    trace, blocks = Trace(), model.transformer
    if blocks.pipeline_parallel:
        blocks.h_pp.trace = trace
        model(tokens, labels=tokens).loss.backward()
    else:
        with traced_blocks(trace, blocks.h, blocks.block_devices):
            model(tokens, labels=tokens).loss.backward()
    trace.save(config.output_dir / "trace.json")
    trace.draw(config.output_dir / "trace.png", config.model_parallel_mode)
    print(f"one step: {trace.in_words()}; see trace.png and trace.json")


def join(config):
    from pipeline.distributed import join_pipeline

    join_pipeline(config.master_ip, config.master_port, config.world_size, config.rank, config.backend)


def main():
    config = use_cpu_with_one_gpu(parse_gpt2_arguments("pipeline"))
    # Imported here because it takes 3 s, and a wrong flag should be reported first.
    from pipeline.model_parallel import GPT2LMHeadModelParallel

    over_processes = config.schedule != "threads"
    with process_group(config, join if over_processes else None) as worker:
        set_seed(config.seed)
        tokenizer = load_tokenizer(config.tokenizer_name, "gpt2")
        data = load_blocks(config, tokenizer)
        model = GPT2LMHeadModelParallel.from_pretrained(config.model_name_or_path)
        fit_model(model, config, tokenizer, config.model_max_length)
        set_seed(config.seed + worker.rank)  # from here on, each stage draws its own dropout masks
        record = Record(config, worker)
        record.describe(model, len(data.train), len(data.validation))
        if over_processes:
            from pipeline.distributed import PipelinedProcesses

            processes = PipelinedProcesses(model, config.schedule, config.n_chunk, worker.device)
            train(config, worker, model, data, record, processes)
        else:
            worker.pulse.explain = explain  # where each partition's thread is, if the run hangs (--hang_seconds)
            spread(config, worker, model)
            record.devices = list(dict.fromkeys(parameter.device for parameter in model.parameters()))
            train(config, worker, model, data, record)
            show_a_step(config, worker, model, data)
        record.write()
        if worker.is_first:
            compare_modes(config, epoch_metrics(config, record))


if __name__ == "__main__":
    exit_on_input_error(main)
