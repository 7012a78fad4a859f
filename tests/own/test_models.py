"""Models and tokenizers by name: `tiny`, a folder, the hub; and what is said when a name is not right."""

import contextlib
import hashlib
import json
import os
import random
import re
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertForSequenceClassification,
)

from common.data import sample_data
from common.errors import InputError
from common.models import load
from common.models.fit import fit_model
from common.models.load import KINDS, load_tokenizer, model_path
from common.paths import ROOT
from tests.own.gpu.fake_group import joined
from tests.own.model_copies import copy_of_tiny, in_shards

MODEL_CLASSES = {
    "bert": AutoModelForSequenceClassification,
    "gpt2": AutoModelForCausalLM,
    "t5": AutoModelForSeq2SeqLM,
}
ENGLISH = 'The 3 U.S. senators\' e-mail (2004) said: "100% of AIDS cases — café, naïve — fell by $1.5m"; why?'
SHARED_TOKENIZERS = Path(os.environ.get("COS598D_DATA", "")) / "tokenizers"
needs_shared_tokenizers = pytest.mark.skipif(
    not os.environ.get("COS598D_DATA") or not SHARED_TOKENIZERS.is_dir(),
    reason="COS598D_DATA names no folder with tokenizers/bert-base-cased and tokenizers/gpt2",
)


@pytest.fixture
def copy(tmp_path):
    """A function that gives a folder of this test's own with some files of the tiny model."""

    def copy_files(kind, *names):
        return copy_of_tiny(kind, tmp_path / f"{kind}-copy", *names)

    return copy_files


def write_vocabulary(folder, *pieces):
    folder.mkdir(exist_ok=True)
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *pieces]) + "\n")
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_the_tiny_model_is_a_folder_that_from_pretrained_reads_without_a_warning(kind, copy, recwarn, capfd):
    folder = str(copy(kind))
    assert model_path(folder, kind) == folder

    model = MODEL_CLASSES[kind].from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)

    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {file.name for file in Path(folder).iterdir()}
    assert AutoConfig.from_pretrained(folder).model_type == kind
    assert model.get_input_embeddings().num_embeddings == len(tokenizer)
    assert not recwarn.list
    assert capfd.readouterr() == ("", "")
    assert "classifier.weight" not in load_file(f"{folder}/model.safetensors")  # the head is new in every run
    block = {"bert": "bert.encoder.layer.0.", "gpt2": "transformer.h.0.", "t5": "decoder.block.0."}[kind]
    assert any(name.startswith(block) for name, _ in model.named_parameters())
    batch = tokenizer(ENGLISH, return_tensors="pt")
    labels = torch.tensor([1]) if kind == "bert" else batch["input_ids"]
    assert torch.isfinite(model(**batch, labels=labels).loss)
    assert load_tokenizer(folder, kind)(ENGLISH) == load_tokenizer("tiny", kind)(ENGLISH)


def test_a_rank_above_0_makes_the_tiny_model_too_where_transformers_would_save_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("COS598D_CACHE", str(tmp_path))

    with joined(1, 2):
        folder = Path(model_path("tiny", "bert"))

    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {file.name for file in folder.iterdir()}


def test_every_word_of_the_entailment_sample_is_one_piece():
    tokenizer = load_tokenizer("tiny", "bert")
    pairs = sample_data.entailment_pairs(400, random.Random(1))

    lengths = {len(tokenizer(text, claim)["input_ids"]) for text, claim, _ in pairs}

    assert lengths == {len("[CLS] Anna has sold the lamp and maybe Ben has found the boat today . [SEP]".split()) + 7}


def test_the_tiny_bert_tokenizer_reads_english_keeps_case_and_has_every_printable_ascii_character():
    tokenizer = load_tokenizer("tiny", "bert")
    printable = "".join(chr(code) for code in range(33, 127))

    assert tokenizer.unk_token_id not in tokenizer(ENGLISH + " " + printable)["input_ids"]
    assert tokenizer.decode(tokenizer("US us")["input_ids"], skip_special_tokens=True) == "US us"


@pytest.mark.parametrize("kind", ["gpt2", "t5"])
def test_the_tiny_byte_level_tokenizers_write_any_text_with_at_most_two_thousand_tokens(kind):
    tokenizer = load_tokenizer("tiny", kind)
    text = ENGLISH + " \u2028 日本語 \u0085\n  two  spaces"

    assert len(tokenizer) <= 2000
    assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text
    assert tokenizer.eos_token_id is not None
    if kind == "t5":
        short, long = tokenizer(["one", "one two three four"], padding=True)["input_ids"]
        assert long[-1] == tokenizer.eos_token_id and short[-1] == tokenizer.pad_token_id == 0


def test_a_tokenizer_keeps_case_unless_its_files_or_the_user_say_otherwise(tmp_path, copy):
    folder = write_vocabulary(tmp_path / "v", "Hello", "hello")

    assert load_tokenizer(str(folder), "bert").tokenize("Hello") == ["Hello"]
    assert load_tokenizer(str(folder), "bert", lower_case=True).tokenize("Hello") == ["hello"]
    (folder / "tokenizer_config.json").write_text('{"do_lower_case": true, "tokenizer_class": "BertTokenizer"}')
    assert load_tokenizer(str(folder), "bert").tokenize("Hello") == ["hello"]
    assert load_tokenizer(str(copy("bert", "tokenizer.json")), "bert").tokenize("The the") == ["The", "the"]


def test_a_lone_vocabulary_with_merges_is_a_gpt2_tokenizer(copy, tmp_path):
    model = json.loads((copy("gpt2") / "tokenizer.json").read_text())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "".join(" ".join(pair) + "\n" for pair in model["merges"]))

    tokenizer = load_tokenizer(str(tmp_path), "gpt2")

    assert tokenizer(ENGLISH) == load_tokenizer("tiny", "gpt2")(ENGLISH)
    assert tokenizer.eos_token == "<|endoftext|>"


@needs_shared_tokenizers
def test_the_published_vocabularies_give_the_published_numbers():
    bert = load_tokenizer(str(SHARED_TOKENIZERS / "bert-base-cased"), "bert")
    gpt2 = load_tokenizer(str(SHARED_TOKENIZERS / "gpt2"), "gpt2")

    assert bert("Hello")["input_ids"] == [101, 8667, 102]
    assert len(bert) == 28_996
    assert gpt2("Hello world")["input_ids"] == [15496, 995]
    assert len(gpt2) == 50_257


@pytest.mark.parametrize("name", ["./nowhere", "/no/such/folder", "~/no/such/folder", "a/b/c", "two words"])
def test_what_looks_like_a_path_is_not_looked_up_on_the_hub(name):
    for look_up in (model_path, load_tokenizer):
        with pytest.raises(InputError, match="there is no folder"):
            look_up(name, "bert")


@pytest.mark.parametrize(
    "file, content, kind, words",
    [
        ("notes.txt", "", "bert", r"expected tokenizer\.json, or vocab\.txt"),
        ("vocab.json", "{}", "gpt2", r"expected tokenizer\.json, or vocab\.json and merges\.txt"),
        ("vocab.txt", "", "bert", r"expected a vocabulary with \[UNK\]"),
        ("tokenizer.json", "{", "bert", r"tokenizer\.json is not JSON"),
        ("tokenizer.json", "{}", "gpt2", "cannot read the tokenizer"),
    ],
)
def test_a_folder_without_a_readable_tokenizer_says_what_was_expected(tmp_path, file, content, kind, words):
    (tmp_path / file).write_text(content)

    with pytest.raises(InputError, match=words) as error:
        load_tokenizer(str(tmp_path), kind)

    assert "\n" not in str(error.value)


REVISION = "0123456789" * 4


@contextlib.contextmanager
def hub_server(models: dict[str, Path]):
    """A hub on loopback: serves {"owner/name": folder} as Hugging Face's does; yields the value for HF_ENDPOINT."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self._answer(with_body=True)

        def do_HEAD(self):
            self._answer(with_body=False)

        def log_message(self, *_):
            pass

        def _answer(self, with_body):
            about = re.fullmatch(r"/api/models/([^/]+/[^/]+)(/revision/.*)?", self.path)
            of_file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)", self.path)
            name = (about or of_file or ["", ""])[1]
            if name not in models:
                return self._send(404, b"", with_body, {"X-Error-Code": "RepoNotFound"})
            if about:
                description = {"id": name, "modelId": name, "sha": REVISION, "siblings": [], "tags": []}
                return self._send(200, json.dumps(description).encode(), with_body, {})
            file = models[name] / of_file[2]
            if not file.is_file():
                return self._send(404, b"", with_body, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": REVISION})
            content = file.read_bytes()
            return self._send(200, content, with_body, {"ETag": f'"{hashlib.sha1(content).hexdigest()}"'})

        def _send(self, status, body, with_body, headers):
            self.send_response(status)
            for key, value in {"X-Repo-Commit": REVISION, "Content-Length": str(len(body)), **headers}.items():
                self.send_header(key, value)
            self.end_headers()
            if with_body:
                self.wfile.write(body)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A function that sets the hub's address, for this test only and with an empty hub cache."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.setattr(huggingface_hub.constants, name, str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)

    def use(address):
        template = address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", address)
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)

    return use


def _head_of_a_hub_model(name):
    torch.manual_seed(0)
    model = BertForSequenceClassification.from_pretrained(model_path(name, "bert"))
    return model(**load_tokenizer(name, "bert")(ENGLISH, return_tensors="pt")).logits[0].tolist()


@pytest.mark.parametrize("made", [lambda folder: folder, in_shards], ids=["in one file", "in several files"])
def test_a_hub_model_is_fetched_before_the_run_starts_and_then_needs_no_hub(copy, hub, made):
    expected = pytest.approx(_head_of_a_hub_model("tiny"), abs=1e-6)  # where weights lie decides on the last digit
    with hub_server({"someone/small-bert": made(copy("bert"))}) as address:
        hub(address)
        model_path("someone/small-bert", "bert")
        load_tokenizer("someone/small-bert", "bert")

    assert _head_of_a_hub_model("someone/small-bert") == expected


def test_what_is_wrong_with_a_hub_model_says_what_to_copy_or_to_delete(tmp_path, copy, hub, monkeypatch):
    monkeypatch.setattr(huggingface_hub.utils._http, "time", SimpleNamespace(sleep=lambda _: None))  # 23 s of retries
    vocabulary = write_vocabulary(tmp_path / "v", "Hello", "hello")
    (vocabulary / "config.json").write_text('{"model_type": "bert"}')
    with hub_server({"someone/small-bert": copy("bert"), "someone/old-bert": vocabulary}) as address:
        hub(address)
        folder = Path(model_path("someone/small-bert", "bert"))
        assert load_tokenizer("someone/old-bert", "bert").tokenize("Hello") == ["Hello"]
        with pytest.raises(InputError, match="no hub model is called someone/no-such-bert; check the name"):
            model_path("someone/no-such-bert", "bert")
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    weights.unlink()
    weights.write_bytes(content[:-100])

    with pytest.raises(InputError, match=r"model\.safetensors is damaged .*; copy it again, or delete .*small-bert to"):
        model_path("someone/small-bert", "bert")
    weights.unlink()
    with pytest.raises(InputError, match=r"model\.safetensors of someone/small-bert cannot be fetched .*copy"):
        model_path("someone/small-bert", "bert")


def test_offline_a_hub_name_says_how_to_go_on_without_the_hub(hub, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)

    with pytest.raises(
        InputError, match=r"the hub cannot be reached .* pass its path with --model_name_or_path, or use tiny"
    ):
        model_path("bert-base-cased", "bert")


@pytest.mark.medium
def test_a_hub_that_takes_the_connection_and_never_answers_is_asked_once(hub, monkeypatch):
    ask = load.get_hf_file_metadata
    monkeypatch.setattr(load, "get_hf_file_metadata", lambda url, timeout: ask(url, timeout=timeout / 25))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        hub(f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(InputError, match="the hub cannot be reached"):
            model_path("bert-base-cased", "bert")

        silent.setblocking(False)
        questions = []
        with contextlib.suppress(BlockingIOError):
            while True:
                with silent.accept()[0] as connection:
                    questions.append(connection.recv(4096))

    # The library may ask one of its own, once per machine; of the model there is one question only.
    assert sum(question.startswith(b"HEAD /bert-base-cased/") for question in questions) == 1


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3, 4, 5])
def test_fine_tuning_the_tiny_bert_on_the_sample_learns_the_task_whatever_the_seed(seed, tmp_path):
    command = [sys.executable, "task1_single/run_glue.py", "--seed", str(seed), "--output_dir", str(tmp_path / "run")]

    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=600)

    record = json.loads((tmp_path / "run" / "rank0.json").read_text())
    assert record["evaluations"][-1]["metrics"]["acc"] >= 0.90


def test_the_input_may_be_as_long_as_the_model_has_positions_and_not_longer():
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("gpt2", n_layer=1, n_embd=4, n_head=1, n_positions=8, vocab_size=10)
    )
    config = SimpleNamespace(dropout=None)

    fit_model(model, config, range(10), length=8)
    with pytest.raises(InputError, match="9 tokens exceed the model's 8 positions"):
        fit_model(model, config, range(10), length=9)
