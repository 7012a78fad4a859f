"""What a run of a task script must compute, in plain torch and transformers: none of the course's code takes part.

Data in the formats of RTE, STS-B and OSCAR, small and with what goes wrong: texts that are cut, padded and of other
alphabets, labels in both orders, another dev set than training set, a last batch that is not full. Several ranks are
computed one after another, each with its own random numbers, so dropout is compared, too.
"""

import functools
import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_

Batch = dict[str, torch.Tensor]
WORDS = "the of café Anna has sold lamp and maybe Ben found boat today not war people Zoë year million 日本".split()


@dataclass(frozen=True)
class Flags:
    """The flags of a run, none of which has its default; `words` are those of the command line."""

    epochs: int = 2
    batch: int = 4  # of all workers together
    eval_batch: int = 5
    length: int = 12
    learning_rate: float = 2e-3
    warmup_steps: int = 2
    weight_decay: float = 0.5
    adam_epsilon: float = 1e-4
    max_grad_norm: float = 0.6
    dropout: float = 0.25
    seed: int = 7

    def words(self, task: str, workers: int = 1) -> list[object]:
        names = ("learning_rate", "warmup_steps", "weight_decay", "adam_epsilon", "max_grad_norm", "dropout", "seed")
        words = [word for name in names for word in (f"--{name}", getattr(self, name))]
        if task == "glue":
            words += ["--num_train_epochs", self.epochs, "--max_seq_length", self.length]
            words += ["--per_gpu_train_batch_size", self.batch // workers]
            return [*words, "--per_gpu_eval_batch_size", self.eval_batch]
        return [*words, "--n_epochs", self.epochs, "--model_max_length", self.length, "--batch_size", self.batch]


@dataclass
class RunByHand:
    """The losses of each rank, the metrics after each epoch, and the mean gradients of the first step."""

    losses: list[list[float]]
    metrics: list[dict[str, float]]
    gradients: list[torch.Tensor]


def train(
    model: torch.nn.Module,
    batches: Callable[[int], Sequence[Sequence[Batch]]],
    evaluate: Callable[[], dict[str, float]],
    flags: Flags,
    seeds: Sequence[int | None],
    max_steps: int = 0,
) -> RunByHand:
    """Train on one or several ranks. batches(epoch): for each rank its batches. seeds: of each rank; None: go on."""
    plain, decayed = ([p for p in model.parameters() if (p.dim() >= 2) == is_matrix] for is_matrix in (False, True))
    groups: list[dict] = [{"params": decayed, "weight_decay": flags.weight_decay}, {"params": plain, "weight_decay": 0}]
    optimizer = torch.optim.AdamW(groups, eps=flags.adam_epsilon)
    states = []
    for seed in seeds:
        if seed is not None:
            torch.manual_seed(seed)
        states.append(torch.get_rng_state())
    run, done = RunByHand([[] for _ in seeds], [], []), 0
    steps = flags.epochs * len(batches(0)[0])
    last, total = max_steps or steps, max(max_steps, steps)
    while done < last:
        model.train()
        _draw(states)
        for parts in islice(zip(*batches(len(run.metrics)), strict=True), last - done):
            for rank, part in enumerate(parts):
                torch.set_rng_state(states[rank])
                loss = model(**part).loss
                (loss / len(parts)).backward()
                states[rank] = torch.get_rng_state()
                run.losses[rank].append(loss.item())
            run.gradients = run.gradients or [parameter.grad.clone() for parameter in model.parameters()]
            clip_grad_norm_(model.parameters(), flags.max_grad_norm)
            rising, falling = done / flags.warmup_steps, (total - done) / (total - flags.warmup_steps)
            for group in optimizer.param_groups:
                group["lr"] = flags.learning_rate * min(rising, falling)
            optimizer.step()
            optimizer.zero_grad()
            done += 1
        model.eval()
        _draw(states)
        with torch.no_grad():
            run.metrics.append(evaluate())
    return run


def _draw(states: list[torch.Tensor]) -> None:
    """Draw the number that every DataLoader draws when one begins to iterate over it."""
    for rank, state in enumerate(states):
        torch.set_rng_state(state)
        torch.empty((), dtype=torch.int64).random_()
        states[rank] = torch.get_rng_state()


# --- BERT on GLUE ---

Row = tuple[str, str, str]  # two texts and a label, as in the file
LABELS = {"entailment": 0, "not_entailment": 1}  # of RTE
HEADERS = {
    "rte": "index sentence1 sentence2 label",
    "sts-b": "index genre filename year old_index source1 source2 sentence1 sentence2 score",
}


def write_glue(folder: Path, task: str, **sizes: int) -> Path:
    """Write a task's files, of so many rows: train=22, dev=33. Columns that nobody reads have other texts."""
    folder.mkdir(parents=True)
    draw, header = random.Random(task), HEADERS[task].split()
    for name, count in sizes.items():
        lines = [header]
        for number in range(count):
            first, second = (" ".join(draw.choices(WORDS, k=draw.randint(1, 9))) for _ in range(2))
            label = f"{number % 5 + number / 100:.3f}" if task == "sts-b" else draw.choice(list(LABELS))
            lines.append([*(f"x{i}" for i in range(len(header) - 3)), f'"{first}', second, label])
        (folder / f"{name}.tsv").write_text("".join("\t".join(line) + "\n" for line in lines), encoding="utf-8")
    return folder


def read_rows(file: Path) -> list[Row]:
    lines = file.read_text(encoding="utf-8").splitlines()[1:]
    return [tuple(line.split("\t")[-3:]) for line in lines]  # type: ignore[misc]


@functools.cache
def train_bert(
    task: str, model_folder: str, data: Path, flags: Flags, workers: int = 1, reseeded: bool = True, max_steps: int = 0
) -> RunByHand:
    """Return what so many workers compute on train.tsv. Task 1 does not seed again when the model is made."""
    from transformers import AutoTokenizer, BertForSequenceClassification

    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    train_rows, dev_rows = (read_rows(data / f"{name}.tsv") for name in ("train", "dev"))

    def batch(rows: Sequence[Row]) -> Batch:
        first, second, labels = zip(*rows, strict=True)
        inputs = tokenizer(
            list(first), list(second), padding="max_length", truncation=True, max_length=flags.length,
            return_tensors="pt",
        )  # fmt: skip
        numbers = [float(text) if task == "sts-b" else LABELS[text] for text in labels]
        return {**inputs, "labels": torch.tensor(numbers)}

    def batches(epoch: int) -> list[list[Batch]]:
        order = torch.randperm(len(train_rows), generator=torch.Generator().manual_seed(flags.seed + epoch)).tolist()
        share = flags.batch // workers
        order += order[: -len(order) % workers]
        parts = [[train_rows[i] for i in order[rank::workers]] for rank in range(workers)]
        return [[batch(part[i : i + share]) for i in range(0, len(part), share)] for part in parts]

    def evaluate() -> dict[str, float]:
        logits, labels = model(**batch(dev_rows)).logits, batch(dev_rows)["labels"]
        if task == "rte":
            return {"acc": (logits.argmax(1) == labels).double().mean().item()}
        columns = torch.stack([logits[:, 0].double(), labels.double()])
        pearson = torch.corrcoef(columns)[0, 1].item()
        spearman = torch.corrcoef(columns.argsort(dim=1).argsort(dim=1).double())[0, 1].item()
        return {"pearson": pearson, "spearmanr": spearman, "corr": (pearson + spearman) / 2}

    torch.manual_seed(flags.seed)
    sizes = {"hidden_dropout_prob": flags.dropout, "attention_probs_dropout_prob": flags.dropout}
    outputs = 1 if task == "sts-b" else 2
    model = BertForSequenceClassification.from_pretrained(model_folder, num_labels=outputs, **sizes)
    seeds = [flags.seed + rank if reseeded else None for rank in range(workers)]
    return train(model, batches, evaluate, flags, seeds, max_steps)


# --- GPT-2 on OSCAR ---


def documents(count: int = 44) -> tuple[str, ...]:
    draw = random.Random(3)
    return tuple(" ".join(draw.choices(WORDS, k=draw.randint(3, 12))) + "\n\u2028." for _ in range(count))


def write_oscar(folder: Path, texts: Sequence[str]) -> Path:
    """Write records into two files, which are in a folder of their own; the second is part_10."""
    files = [folder / "en" / f"part_{number}.jsonl" for number in (2, 10)]
    files[0].parent.mkdir(parents=True)
    for file, part in zip(files, (texts[:30], texts[30:]), strict=True):
        records = (json.dumps({"content": text, "id": 1}, ensure_ascii=False) for text in part)
        file.write_text("".join(f"{record}\n" for record in records), encoding="utf-8")
    return folder


@functools.cache
def train_gpt2(
    model_folder: str,
    texts: tuple[str, ...],
    flags: Flags,
    *,
    workers: int = 1,
    shuffled: bool = False,
    whole: bool = False,
    max_steps: int = 0,
) -> RunByHand:
    """Return what so many workers compute, each on its partition.

    shuffled: another order each epoch (pipeline/). whole: no batch that is not full (stages in beyond/).
    """
    from transformers import AutoTokenizer, GPT2LMHeadModel

    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    streams: list[list[int]] = [[], []]  # training; every 20th document is for validation
    for number, text in enumerate(texts, start=1):
        streams[number % 20 == 0] += [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
    blocks, dev = ([torch.tensor(s[i : i + flags.length]) for i in range(0, len(s), flags.length)] for s in streams)
    blocks, dev = ([block for block in many if len(block) == flags.length] for many in (blocks, dev))

    def batches(epoch: int) -> list[list[Batch]]:
        share = flags.batch // workers
        if shuffled:
            generator = torch.Generator().manual_seed(flags.seed + epoch)
            parts = [torch.randperm(len(blocks), generator=generator).tolist()]
            steps = len(blocks) // share
        else:
            order = list(range(len(blocks) - len(blocks) % flags.batch if whole else len(blocks)))
            random.Random(1234).shuffle(order)
            ends = [math.ceil(len(order) * rank / workers) for rank in range(workers + 1)]
            parts = [order[first:end] for first, end in pairwise(ends)]
            steps = math.ceil(len(order) // workers / share)
        chosen = [[part[step * share : (step + 1) * share] for step in range(steps)] for part in parts]
        stacked = [[torch.stack([blocks[i] for i in numbers]) for numbers in part] for part in chosen]
        return [[{"input_ids": tokens, "labels": tokens} for tokens in part] for part in stacked]

    def evaluate() -> dict[str, float]:
        tokens = torch.stack(dev)
        logits = model(input_ids=tokens).logits[:, :-1]
        loss = cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).item()
        hits = (logits.argmax(-1) == tokens[:, 1:]).double().mean().item()
        return {"loss": loss, "perplexity": math.exp(loss), "accuracy": hits}

    torch.manual_seed(flags.seed)
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), flags.dropout)
    model = GPT2LMHeadModel.from_pretrained(model_folder, **dropout)
    return train(model, batches, evaluate, flags, [flags.seed + rank for rank in range(workers)], max_steps)
