"""`tiny`: a small BERT, GPT-2 and T5 with a tokenizer each, made once without a download and saved like a hub's model.

They have the real architectures, so from_pretrained, AutoTokenizer and the names of the parameters are the real ones;
only the sizes differ. One attention head of BERT is built, not learned: see _match_equal_words.
"""

import json
import string
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, pre_tokenizers, processors, trainers
from tokenizers.models import BPE

from common.cache import cached
from common.data import sample_data
from common.paths import cache_dir

if TYPE_CHECKING:
    from transformers import BertModel, PreTrainedModel, PreTrainedTokenizerFast


SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]

# ASCII, Latin letters with accents, and what typesetters use. A word with any other character is [UNK].
CHARACTERS = [character for character in string.printable if not character.isspace()]
CHARACTERS += [chr(code) for code in range(0xC0, 0x180)]
CHARACTERS += "‘’“”–—…€£¥§©®°·«»¡¿½"

FREQUENT_WORDS = """
the of and to in is was for that on as with by at from it he his be are has had have not they which an this were been
or but their its who will would said after also more one two three first last new other all some many most about when
where there than then into over out up down under between during before since until while against because if so no only
can could may might must should do does did say says make made take took go went come came get got give gave see saw
know known think thought find use used work works call called show shown hold held win lead led report reported become
year years day days week weeks month months time times today hour hours night morning January February March April May
June July August September October November December Monday Tuesday Wednesday Thursday Friday Saturday Sunday
people man men woman women child children family friend name life death home house water food world country state states
city town place area part number group company government president minister party law court police war army market
money million billion percent price business bank industry school university student research study health hospital
disease drug patient film book music game team player match club election vote member leader head office power energy
oil nuclear trade union public national international political economic social local American British French German
European Chinese Japanese Russian United States Europe America Britain France Germany China Japan Russia Africa Asia
London York Washington North South East West Mr Mrs Dr US UK EU The In He It She They We But And A An On At For This
old young long short high low large small big good bad best great early late next same different own such very well
"""

# Frequent sequences of letters, for words that are not in the vocabulary: at their start and further in.
FREQUENT_PIECES = """
th he in er an re on at en nd ti es or te of ed is it al ar st to nt ng se ha as ou io le ve co me de hi ri ro ic ne ea
ra ce li ch ll be ma si om ur ca el ta la ns di fo ho pe ec pr no ct us ac ot il tr ly nc et ut ss so rs un lo wa ge ie
wh ee wi em ad ol rt po we na ul ni ts mo ow pa im mi ai sh ir su id os iv ia am fi ci vi pl ig tu ev ld ry mp fe bl ab
ing ion ent and tio ter ati for ers ate ver all ith con com per res ment est ive tion sion able ness ance ence ity ous
pro pre dis int inter over under out sub trans ation ally ical ists ism ship ward less ful age ant ist ize ise
"""


def bert_pieces() -> list[str]:
    """Return every piece once; its index is its number. A piece that starts with ## continues a word."""
    sample_words = [*sample_data.NAMES, "Maybe", "maybe", "has", "today", *sample_data.VERBS, *sample_data.OBJECTS]
    words, pieces = FREQUENT_WORDS.split(), FREQUENT_PIECES.split()
    inside = [f"##{piece}" for piece in [*CHARACTERS, *pieces]]
    return list(dict.fromkeys([*SPECIAL, *CHARACTERS, *sample_words, *words, *pieces, *inside]))


KINDS = ("bert", "gpt2", "t5")  # of which there is a tiny model
VERSION = 3  # part of the folder's name: increase it with every change to a model or a tokenizer
GPT2_TOKENS = 2000
END_OF_TEXT = "<|endoftext|>"


def tiny_model_folder(kind: str) -> Path:
    """Return the folder of the tiny model of this kind ("bert", "gpt2", "t5"); create it if it is not in the cache.

    The weights come from a separate seed; the caller's random numbers are not affected.
    """

    def build(folder: Path) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(598)
            save_model(*{"bert": _bert, "gpt2": _gpt2, "t5": _t5}[kind](), folder)

    return cached(cache_dir("models") / f"tiny-{kind}-v{VERSION}-{sample_data.VERSION}", build)


def save_model(model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerFast", folder: Path) -> None:
    """Write a model's folder as the hub has it, on any rank.

    `save_pretrained` would write neither weights nor configuration on ranks above 0 of a process group.
    """
    weights, places = {}, set()
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() not in places:  # tied weights are saved once, under their first name
            weights[name] = tensor.contiguous()
        places.add(tensor.data_ptr())
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    model.config.architectures = [type(model).__name__]
    model.config.dtype = str(model.dtype).removeprefix("torch.")
    model.config.to_json_file(folder / "config.json")
    if model.can_generate():
        model.generation_config.to_json_file(folder / "generation_config.json")
    tokenizer.save_pretrained(folder)


def _bert() -> "tuple[PreTrainedModel, PreTrainedTokenizerFast]":
    tokenizer = transformers.BertTokenizer(
        vocab={piece: i for i, piece in enumerate(bert_pieces())}, do_lower_case=False
    )
    config = transformers.BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=256,
        max_position_embeddings=512,
        initializer_range=0.05,
    )
    model = transformers.BertModel(config)
    _match_equal_words(model)
    return model, tokenizer


def _match_equal_words(model: "BertModel") -> None:
    """Build one head of the first layer: every token looks at tokens of the same word and notes their positions.

    Pretrained BERTs have learnt heads of this kind (Clark et al. 2019, "What Does BERT Look At?"), and in pretrained
    models queries and keys resemble each other (Trockman and Kolter 2023, "Mimetic Initialization of Self-Attention
    Layers"). From random weights, a model of this size needs thousands of steps until it finds one, and learns nothing
    before. With this head, the embedded sample takes about two hundred steps. The D hidden numbers of a token are:

        0 .. D/2      the word: what the head's queries and keys compare
        D/2 .. 3D/4   the position: what its values carry
        3D/4 .. D     free: where its output goes

    The rest stays random, and training changes all of it.
    """
    weights = model.state_dict()  # the model's own memory
    hidden, heads = model.config.hidden_size, model.config.num_attention_heads
    width = hidden // 4
    word, position, free = slice(2 * width), slice(2 * width, 3 * width), slice(3 * width, hidden)
    head = slice(hidden // heads)  # the first head's numbers
    same_word, same_position = torch.eye(hidden // heads, 2 * width), torch.eye(width)
    faint = 0.1  # keep a little of the random values in the places used here

    weights["embeddings.word_embeddings.weight"][:, 2 * width :] *= faint  # (V, D)
    weights["embeddings.position_embeddings.weight"][:, word] *= faint  # (T, D)
    weights["embeddings.position_embeddings.weight"][:, free] *= faint
    weights["embeddings.token_type_embeddings.weight"] *= faint
    first, last = "encoder.layer.0.attention", f"encoder.layer.{model.config.num_hidden_layers - 1}.attention"
    for side in ("query", "key"):  # (D, D): rows are what comes out, columns what goes in
        weights[f"{first}.self.{side}.weight"][head] *= faint
        weights[f"{first}.self.{side}.weight"][head, word] += same_word
    weights[f"{first}.self.value.weight"][head] *= faint
    weights[f"{first}.self.value.weight"][:width, position] += 2 * same_position
    weights[f"{first}.output.dense.weight"][:, head] *= faint
    weights[f"{first}.output.dense.weight"][free, :width] += 2 * same_position
    # The last layer begins as an average over all tokens: large enough for the classifier to use it.
    weights[f"{last}.self.value.weight"] *= 3
    weights[f"{last}.output.dense.weight"] *= 3


def _gpt2() -> "tuple[PreTrainedModel, PreTrainedTokenizerFast]":
    backend = _byte_pairs([END_OF_TEXT])
    model = json.loads(backend.to_str())["model"]
    tokenizer = transformers.GPT2Tokenizer(vocab=model["vocab"], merges=[tuple(pair) for pair in model["merges"]])  # type: ignore[misc]
    config = transformers.GPT2Config(
        vocab_size=len(tokenizer),
        n_embd=128,
        n_layer=4,
        n_head=4,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return transformers.GPT2LMHeadModel(config), tokenizer


def _t5() -> "tuple[PreTrainedModel, PreTrainedTokenizerFast]":
    backend = _byte_pairs(["<pad>", "</s>", "<unk>"])  # T5's order: pad is 0 and starts the decoder, end is 1
    backend.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)]
    )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=512
    )
    config = transformers.T5Config(
        vocab_size=len(tokenizer),
        d_model=128,
        d_kv=32,
        d_ff=256,
        num_layers=2,
        num_heads=4,
        pad_token_id=0,
        eos_token_id=1,
    )
    config.decoder_start_token_id = 0
    return transformers.T5ForConditionalGeneration(config), tokenizer


def _byte_pairs(special_tokens: list[str]) -> Tokenizer:
    """Return byte pairs learned from the sample text, over bytes as in GPT-2: they can represent any text.

    (Sennrich et al. 2016, "Neural Machine Translation of Rare Words with Subword Units".)
    """
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=GPT2_TOKENS,
        special_tokens=special_tokens,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sample_data.oscar_sample_texts(), trainer)
    return tokenizer
