"""A BERT with random weights, large enough to show a network's bandwidth; it is created once, without a download.

    python -m cluster.demo.random_bert 8M    # prints a folder for --model_name_or_path, with tiny's tokenizer

It learns nothing in a few steps. But its gradients are as large as a real model's, and only this matters here.
"""

import argparse
from pathlib import Path
from typing import Any

from common.cache import cached
from common.errors import exit_on_input_error
from common.paths import cache_dir

SIZES: dict[str, dict[str, Any]] = {
    "1M": {"vocab_size": 3000, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2},  # to try things
    "8M": {"vocab_size": 3000, "hidden_size": 384, "num_hidden_layers": 4, "num_attention_heads": 12},
    "22M": {"vocab_size": 30522, "hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12},
    "25M": {"vocab_size": 30522, "hidden_size": 512, "num_hidden_layers": 3, "num_attention_heads": 8},  # large tensors
    # BERT-base, cased
    "108M": {"vocab_size": 28996, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12},
}


def random_bert(size: str) -> Path:
    """Return the folder of the model; the first process builds it, the others wait."""

    def build(folder: Path) -> None:
        import torch  # here: the ladder checks its flags before it loads torch
        from transformers import BertConfig, BertForSequenceClassification

        from common.models.load import load_tokenizer
        from common.models.tiny import save_model

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            config = BertConfig(**SIZES[size], intermediate_size=4 * SIZES[size]["hidden_size"])
            model = BertForSequenceClassification(config)
        save_model(model, load_tokenizer("tiny", "bert"), folder)

    return cached(cache_dir("models") / f"random-bert-{size}", build)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m cluster.demo.random_bert", description=__doc__.splitlines()[0])
    parser.add_argument("size", choices=SIZES, help="number of parameters")
    print(random_bert(parser.parse_args().size))


if __name__ == "__main__":
    exit_on_input_error(main)
