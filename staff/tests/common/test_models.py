"""Models and tokenizers by name: `tiny`, a folder, the hub; and what is said when a name or a file is not right."""

import contextlib
import json
import shutil
import subprocess
import sys
import threading
import zlib
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
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

from common.arguments import parse_glue_arguments
from common.data import sample_data
from common.errors import InputError
from common.models.fit import fit_model
from common.models.load import load_tokenizer, model_path
from common.models.tiny import KINDS
from common.paths import ROOT
from staff.tests.common.model_copies import copy_of_tiny, in_shards

MODEL_CLASSES = {
    "bert": AutoModelForSequenceClassification, "gpt2": AutoModelForCausalLM, "t5": AutoModelForSeq2SeqLM
}  # fmt: skip
ENGLISH = 'The 3 U.S. senators\' e-mail (2004) said: "100% of AIDS cases — café, naïve — fell by $1.5m"; why?'


@pytest.fixture
def copy(tmp_path):
    """A function that gives a folder of this test's own with some files of the tiny model."""
    return lambda kind, *names: copy_of_tiny(kind, tmp_path / f"{kind}-copy", *names)


def write_vocabulary(folder, *pieces):
    folder.mkdir(exist_ok=True)
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *pieces]) + "\n")
    return folder


# --- tiny ---


@pytest.mark.parametrize("kind", KINDS)
def test_the_tiny_model_is_a_folder_that_from_pretrained_reads_without_a_warning(kind, copy, recwarn, capfd):
    folder = str(copy(kind))
    assert model_path(folder, kind) == folder

    model = MODEL_CLASSES[kind].from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)

    assert AutoConfig.from_pretrained(folder).model_type == kind
    assert model.get_input_embeddings().num_embeddings == len(tokenizer)
    assert not recwarn.list
    assert capfd.readouterr() == ("", "")
    assert "classifier.weight" not in load_file(f"{folder}/model.safetensors")  # the head is new in every run
    batch = tokenizer(ENGLISH, return_tensors="pt")
    labels = torch.tensor([1]) if kind == "bert" else batch["input_ids"]
    assert torch.isfinite(model(**batch, labels=labels).loss)
    assert load_tokenizer(folder, kind)(ENGLISH) == load_tokenizer("tiny", kind)(ENGLISH)


def test_the_tiny_tokenizers_read_the_sample_word_by_word_and_any_english():
    bert = load_tokenizer("tiny", "bert")
    rows = (sample_data.glue_sample_dir() / "dev.tsv").read_text().splitlines()[1:]
    lengths = {len(bert(*row.split("\t")[1:3])["input_ids"]) for row in rows}
    assert lengths == {len("[CLS] Anna has sold the lamp and maybe Ben has found the boat today . [SEP]".split()) + 7}
    printable = "".join(chr(code) for code in range(33, 127))
    assert bert.unk_token_id not in bert(ENGLISH + " " + printable)["input_ids"]
    assert bert.decode(bert("US us")["input_ids"], skip_special_tokens=True) == "US us"

    text = ENGLISH + " \u2028 日本語 \u0085\n  two  spaces"
    for kind in ("gpt2", "t5"):
        tokenizer = load_tokenizer("tiny", kind)
        assert len(tokenizer) <= 2000 and tokenizer.eos_token_id is not None
        assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text
    short, long = tokenizer(["one", "one two three four"], padding=True)["input_ids"]
    assert long[-1] == tokenizer.eos_token_id and short[-1] == tokenizer.pad_token_id == 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3, 4, 5])
def test_fine_tuning_the_tiny_bert_on_the_sample_learns_the_task_whatever_the_seed(seed, tmp_path):
    command = [sys.executable, "task1_single/run_glue.py", "--seed", str(seed), "--output_dir", str(tmp_path / "run")]

    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=600)

    record = json.loads((tmp_path / "run" / "rank0.json").read_text())
    assert record["evaluations"][-1]["metrics"]["acc"] >= 0.90


def test_the_input_may_be_as_long_as_the_model_has_positions_and_new_tokens_get_rows():
    sizes = {"n_layer": 1, "n_embd": 4, "n_head": 1, "n_positions": 8, "vocab_size": 10}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", **sizes))

    fit_model(model, SimpleNamespace(dropout=None), range(12), length=8)
    assert model.get_input_embeddings().num_embeddings == 12
    with pytest.raises(InputError, match="9 tokens exceed the model's 8 positions"):
        fit_model(model, SimpleNamespace(dropout=None), range(12), length=9)


# --- folders ---


def test_a_tokenizer_keeps_case_unless_its_files_or_the_user_say_otherwise(tmp_path, copy):
    folder = write_vocabulary(tmp_path / "v", "Hello", "hello")

    assert load_tokenizer(str(folder), "bert").tokenize("Hello") == ["Hello"]
    assert load_tokenizer(str(folder), "bert", lower_case=True).tokenize("Hello") == ["hello"]
    (folder / "tokenizer_config.json").write_text('{"do_lower_case": true, "tokenizer_class": "BertTokenizer"}')
    assert load_tokenizer(str(folder), "bert").tokenize("Hello") == ["hello"]
    assert load_tokenizer(str(copy("bert", "tokenizer.json")), "bert").tokenize("The the") == ["The", "the"]


@pytest.mark.parametrize("name", ["./nowhere", "/no/such/folder", "~/no/such/folder", "a/b/c", "two words"])
def test_what_looks_like_a_path_is_not_looked_up_on_the_hub(name):
    for look_up in (model_path, load_tokenizer):
        with pytest.raises(InputError, match="there is no folder"):
            look_up(name, "bert")


@pytest.mark.parametrize(("file", "content", "kind", "words"), [
    ("notes.txt", "", "bert", r"expected tokenizer\.json, or vocab\.txt"),
    ("vocab.json", "{}", "gpt2", r"expected tokenizer\.json, or vocab\.json and merges\.txt"),
    ("vocab.txt", "", "bert", r"expected a vocabulary with \[UNK\]"),
    ("tokenizer.json", "{", "bert", r"tokenizer\.json is not JSON"),
    ("tokenizer.json", "{}", "gpt2", "cannot read the tokenizer"),
])  # fmt: skip
def test_a_folder_without_a_readable_tokenizer_says_what_was_expected(tmp_path, file, content, kind, words):
    (tmp_path / file).write_text(content)

    with pytest.raises(InputError, match=words) as error:
        load_tokenizer(str(tmp_path), kind)

    assert "\n" not in str(error.value)


LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 4475312\n"


@pytest.mark.parametrize(("name", "content", "words"), [
    ("model.safetensors", LFS_POINTER, r"model\.safetensors is damaged .*; copy it again"),
    ("model.safetensors", "cut", r"model\.safetensors is damaged .*; copy it again"),
    ("model.safetensors", None, "it has no model.safetensors"),
    ("model-00002-of-00002.safetensors", None, r"model-00002-of-00002\.safetensors is damaged .*; copy it again"),
    ("pytorch_model.bin", LFS_POINTER, r"pytorch_model\.bin is damaged .*; copy it again"),
    ("pytorch_model.bin", "cut", r"pytorch_model\.bin is damaged .*; copy it again"),
    ("config.json", None, "is not a model: it has no config.json"),
    *[("config.json", content, "config.json") for content in (b"", b"{", b"[]", b"\xff")],
    ("config.json", b'{"model_type": "gpt2"}', "expected a model of type bert, .* holds gpt2"),
])  # fmt: skip
def test_a_model_that_is_none_is_seen_before_the_run_starts(copy, name, content, words):
    folder = copy("bert")
    if name.startswith("model-"):
        in_shards(folder)
    if name == "pytorch_model.bin":
        torch.save(load_file(folder / "model.safetensors"), folder / name)
        (folder / "model.safetensors").unlink()
    assert model_path(str(folder), "bert") == str(folder)
    old = (folder / name).read_bytes()
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_bytes(old[:-100] if content == "cut" else content)

    with pytest.raises(InputError, match=words):
        model_path(str(folder), "bert")


def test_a_folder_with_a_configuration_alone_is_enough_for_a_configuration(copy):
    folder = str(copy("bert", "config.json"))
    assert model_path(folder, "bert", weights=False) == folder


# --- the hub ---

REVISION = "0123456789" * 4


class Hub(SimpleHTTPRequestHandler):
    """Serves OWNER/NAME/resolve/REVISION/FILE and api/models/OWNER/NAME/..., with the headers of Hugging Face."""

    def end_headers(self):
        known = Path(self.directory, *self.path.split("/")[1:3]).exists()
        own = {"X-Repo-Commit": REVISION, "ETag": f'"{zlib.crc32(Path(self.path).name.encode())}"'}
        for name, value in (own | {"X-Error-Code": "EntryNotFound" if known else "RepoNotFound"}).items():
            self.send_header(name, value)
        super().end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """hub(name=folder, ...) is a hub of these models on loopback, to the end of the block; its cache is empty."""
    constants, root = huggingface_hub.constants, tmp_path / "served"
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.setattr(constants, name, str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(
        huggingface_hub.utils._http, "time", SimpleNamespace(sleep=lambda _: None)
    )  # no 23 s of retries

    def use(address):
        monkeypatch.setattr(constants, "ENDPOINT", address)
        template = address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)

    @contextlib.contextmanager
    def serve(**models):
        for name, folder in models.items():
            shutil.copytree(folder, root / "someone" / name / "resolve" / REVISION)
            (root / "someone" / name / "resolve" / "main").symlink_to(REVISION)
            files = [path for path in folder.rglob("*") if path.is_file()]
            tree = [
                {"type": "file", "path": str(path.relative_to(folder)), "size": path.stat().st_size, "oid": "0"}
                for path in files
            ]
            about = {"id": f"someone/{name}", "sha": REVISION, "siblings": [], "tags": []}
            for place, content in ((f"tree/{REVISION}", tree), ("revision/main", about)):
                path = root / "api/models/someone" / name / place
                path.parent.mkdir(parents=True)
                path.write_text(json.dumps(content))
        with ThreadingHTTPServer(("127.0.0.1", 0), partial(Hub, directory=root)) as server:
            thread = threading.Thread(target=server.serve_forever, daemon=True)
            thread.start()
            use(f"http://127.0.0.1:{server.server_address[1]}")
            yield
            server.shutdown()
            thread.join()

    serve.use = use  # type: ignore[attr-defined]
    return serve


def head_of(name):
    torch.manual_seed(0)
    model = BertForSequenceClassification.from_pretrained(model_path(name, "bert"))
    return model(**load_tokenizer(name, "bert")(ENGLISH, return_tensors="pt")).logits[0].tolist()


@pytest.mark.parametrize("made", ["one file", "several files", "the format before"])
def test_a_hub_model_is_fetched_before_the_run_starts_and_then_needs_no_hub(copy, hub, made):
    expected = pytest.approx(head_of("tiny"), abs=1e-6)  # where weights lie decides on the last digit
    folder = copy("bert")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    if made == "several files":
        in_shards(folder)
    if made == "the format before":
        (folder / "model.safetensors").unlink()
    (folder / "onnx").mkdir()
    (folder / "onnx" / "config.json").write_text("{}")
    with hub(bert=folder):
        fetched = Path(model_path("someone/bert", "bert"))
        load_tokenizer("someone/bert", "bert")

    assert head_of("someone/bert") == expected
    assert (fetched / "pytorch_model.bin").exists() == (made == "the format before")  # nothing is fetched twice
    assert not (fetched / "onnx").exists()


def test_what_is_wrong_with_a_hub_model_says_what_to_copy_or_to_delete(tmp_path, copy, hub):
    vocabulary = write_vocabulary(tmp_path / "v", "Hello", "hello")
    (vocabulary / "config.json").write_text('{"model_type": "bert"}')
    with hub(small=copy("bert"), old=vocabulary):
        folder = Path(model_path("someone/small", "bert"))
        assert load_tokenizer("someone/old", "bert").tokenize("Hello") == ["Hello"]
        with pytest.raises(InputError, match="no hub model is called someone/no-such-bert; check the name"):
            model_path("someone/no-such-bert", "bert")
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    weights.unlink()
    weights.write_bytes(content[:-100])
    with pytest.raises(InputError, match=r"model\.safetensors is damaged .*; copy it again, or delete .*small to"):
        model_path("someone/small", "bert")
    weights.unlink()
    with pytest.raises(InputError, match=r"the hub cannot be reached .*; copy the model's folder here"):
        model_path("someone/small", "bert")


@pytest.mark.parametrize(("look_up", "name"), [
    (lambda: model_path("gpt2", "gpt2"), "gpt2"),
    (lambda: parse_glue_arguments("task1_single", ["--data_dir", "docs"]), "bert-base-cased"),
])  # fmt: skip
def test_offline_a_hub_name_says_how_to_go_on_without_the_hub(hub, monkeypatch, look_up, name):
    monkeypatch.chdir(ROOT)
    hub.use("http://127.0.0.1:9")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)

    with pytest.raises(InputError, match=f"no folder {name}, and the hub cannot be reached .* --model_name_or_path"):
        look_up()
