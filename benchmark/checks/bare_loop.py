"""Fine-tuning without the course's code: a bare PyTorch loop that reads, tokenizes and trains by itself.

    python -m benchmark.checks.bare_loop --data_dir glue_data/RTE --model_name_or_path MODEL [--num_train_epochs 3]
    python -m benchmark.checks.bare_loop --quick      # 3 steps of the tiny model on the embedded sample

Its loop shares no code with the tasks, so equal losses are evidence: task 1 must print the same ones. Two-label
tasks with a header only (RTE, SST-2). The last line of stdout is one JSON object.
"""

import common.workers.environment  # isort: skip  # noqa: F401 (stops with a message if torch is missing)

import argparse
import json
from itertools import islice
from pathlib import Path

import torch
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, AutoTokenizer, get_linear_schedule_with_warmup

from common.data.sample_data import glue_sample_dir
from common.errors import InputError, exit_on_input_error
from common.models.load import model_path

LABELS = {"entailment": 0, "not_entailment": 1, "0": 0, "1": 1}


def read(path: Path, tokenizer, length: int) -> dict[str, torch.Tensor]:
    header, *rows = [line.split("\t") for line in path.read_text("utf-8").rstrip("\n").split("\n")]
    columns = [[row[n] for row in rows] for n, name in enumerate(header) if name.startswith("sentence")]
    features = tokenizer(*columns, max_length=length, padding="max_length", truncation=True, return_tensors="pt")
    return {**features, "labels": torch.tensor([LABELS[row[-1]] for row in rows])}


def accuracy(model, dev: dict[str, torch.Tensor]) -> float:
    model.eval()
    right = 0
    with torch.no_grad():
        for rows in DataLoader(range(len(dev["labels"])), batch_size=64):  # type: ignore[arg-type]
            batch = {key: values[rows] for key, values in dev.items()}
            right += (model(**batch).logits.argmax(1) == batch["labels"]).sum().item()
    return right / len(dev["labels"])


def run(data_dir: Path, name: str, length: int, batch: int, rate: float, epochs: int, max_steps: int, seed: int):
    """Losses of all steps and dev accuracy after every epoch."""
    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(name)
    train, dev = (read(data_dir / f"{part}.tsv", tokenizer, length) for part in ("train", "dev"))
    model = AutoModelForSequenceClassification.from_pretrained(name, num_labels=2)
    n = len(train["labels"])
    steps = max_steps or epochs * -(-n // batch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    scheduler = get_linear_schedule_with_warmup(optimizer, 0, steps)
    losses: list[float] = []
    accuracies = []
    for epoch in range(-(-steps // -(-n // batch))):
        model.train()
        order = torch.randperm(n, generator=torch.Generator().manual_seed(seed + epoch)).tolist()
        loader: DataLoader = DataLoader(range(n), sampler=order, batch_size=batch)  # type: ignore[arg-type]
        for rows in islice(loader, steps - len(losses)):
            loss = model(**{key: values[rows] for key, values in train.items()}).loss
            loss.backward()
            clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            model.zero_grad()
            losses.append(loss.item())
        accuracies.append(accuracy(model, dev))
        print(f"epoch {epoch + 1}: accuracy {accuracies[-1]:.4f}", flush=True)
    return losses, accuracies


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data_dir", type=Path)
    parser.add_argument("--model_name_or_path")
    parser.add_argument("--max_seq_length", type=int, default=128)
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--learning_rate", type=float, default=2e-5)
    parser.add_argument("--num_train_epochs", type=int, default=3)
    parser.add_argument("--max_steps", type=int, default=0)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--quick", action="store_true", help="3 steps of the tiny model on the embedded sample")
    arguments = vars(parser.parse_args())
    if arguments.pop("quick"):
        sample = {"data_dir": glue_sample_dir(), "model_name_or_path": model_path("tiny", "bert")}
        arguments |= {**sample, "max_seq_length": 64, "max_steps": 3}
    elif not (arguments["data_dir"] and arguments["model_name_or_path"]):
        raise InputError("expected --data_dir and --model_name_or_path, or --quick")
    losses, accuracies = run(*arguments.values())
    print("first losses:", " ".join(f"{loss:.6f}" for loss in losses[:5]))
    print(json.dumps({"losses": losses, "accuracies": accuracies}))


if __name__ == "__main__":
    exit_on_input_error(main)
