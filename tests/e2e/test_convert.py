"""The real default model: converted weights and tokenizer against transformers and a reference."""

import functools
import re

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from tests.helpers.embedded import embedded_model_folder, embedded_nvme_dir
from zeroinfer.checkpoint import gguf_reader, prepare_embedded_model, verify_store
from zeroinfer.checkpoint.embedded import find_embedded_file
from zeroinfer.diskformat import open_checkpoint

SAMPLES = [
    "",
    " ",
    "Hello world",
    "In 2024, 1234567 people paid $3.50 (or 12,000) each; 007.",
    "def fib(n):\n    return n if n < 2 else fib(n - 1) + fib(n - 2)  # 1\n",
    "for (int i=0;i<10;++i){\n\ta[i]*=0x1F;\n}",
    "don't we'll I'M  double  spaces\t\ttabs\n\n\nlines\r\n",
    "Gr\u00fc\u00dfe, \u4f60\u597d, \u0645\u0631\u062d\u0628\u0627, \U0001f600\U0001f1e9\U0001f1ea "
    "\u0663\u0664 \u00b2\u00bd e\u0301",
    "<|im_start|>user\nWhat is 17*23?<|im_end|>\n<|im_start|>assistant\n",
    "x" * 300 + " " * 40 + "9" * 40,
]


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    yield from embedded_model_folder(tmp_path_factory)


@pytest.fixture(scope="module")
def gguf_file(folder):
    return gguf_reader.open_gguf(find_embedded_file())


class _ReaderWithoutTokenizer(gguf_reader._BoundedReader):
    """Drops the vocabulary, over which the oracle's loader would loop for many seconds.

    The base differs from the package's own reader in speed alone, as a unit test shows.
    """

    def __init__(self, path, mode="r"):
        super().__init__(path, mode)
        for key in [key for key in self.fields if key.startswith("tokenizer.")]:
            del self.fields[key]


def test_weights_equal_transformers_own_loading_of_the_file(folder, monkeypatch):
    # The loader behind from_pretrained(gguf_file=...), which itself asks for another package.
    monkeypatch.setattr(gguf, "GGUFReader", _ReaderWithoutTokenizer)
    # It builds the table of names anew for each of 397 modules, 30 ms each.
    monkeypatch.setattr(gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map))
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    loaded = load_gguf_checkpoint(
        str(find_embedded_file()), return_tensors=True, model_to_load=skeleton
    )
    oracle = loaded["tensors"]
    checkpoint = open_checkpoint(folder)
    assert checkpoint.config["tie_word_embeddings"]
    assert set(checkpoint.tensors) == set(oracle) - {"lm_head.weight"}
    assert checkpoint.total_bytes == 134515008 * 4
    for name, extent in checkpoint.tensors.items():
        count = extent.spec.num_elements
        values = np.memmap(extent.path, np.float32, "r", extent.offset, count)
        equal = torch.equal(torch.from_numpy(np.array(values)), oracle[name].reshape(-1))
        assert equal, name


def test_config_is_the_published_one(folder):
    config = open_checkpoint(folder).config
    published = {
        "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152,
        "max_position_embeddings": 8192, "rope_theta": 100000.0, "rms_norm_eps": 1e-05,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2, "torch_dtype": "float32",
    }  # fmt: skip
    assert config | published == config


def reference_ids(gguf_file, text):
    """Ids by bare byte-level merges on pieces cut here: special tokens, digits, GPT-2's pattern."""
    tokens = gguf_file.metadata["tokenizer.ggml.tokens"]
    merges = [tuple(m.split(" ")) for m in gguf_file.metadata["tokenizer.ggml.merges"]]
    bare = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    bare.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    kinds = gguf_file.metadata["tokenizer.ggml.token_type"]
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == 3]
    ids = []
    for piece in re.split(f"({'|'.join(map(re.escape, control))})", text):
        if piece in control:
            ids.append(tokens.index(piece))
            continue
        # Each numeric character is a piece of its own, as \\p{N} in llama.cpp's smollm split.
        run = ""
        for char in piece:
            if char.isnumeric():
                ids += bare.encode(run).ids + bare.encode(char).ids
                run = ""
            else:
                run += char
        ids += bare.encode(run).ids
    return ids


def test_token_ids_equal_a_reference(folder, gguf_file):
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in SAMPLES:
        ids = tokenizer.encode(text).ids
        assert ids == reference_ids(gguf_file, text), text
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_known_ids(folder):
    # As published with SmolLM2-135M-Instruct: no begin token, digits one by one.
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("Hello world").ids == [19556, 905]
    assert tokenizer.encode("2024").tokens == ["2", "0", "2", "4"]
    assert tokenizer.encode("<|endoftext|><|im_start|><|im_end|>").ids == [0, 1, 2]


def test_chat_template_renders_and_is_tokenised(folder):
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi 12"}], tokenize=False, add_generation_prompt=True
    )
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_start|>user\nHi 12<|im_end|>\n<|im_start|>assistant\n")
    own = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert own.encode(text).ids == tokenizer(text)["input_ids"]
    assert own.encode(text).ids.count(1) == 3


def test_second_run_converts_nothing(folder, tmp_path_factory):
    before = {p: p.stat().st_mtime_ns for p in folder.iterdir()}
    calls = []
    again = prepare_embedded_model(
        embedded_nvme_dir(tmp_path_factory), progress=lambda *a: calls.append(a)
    )
    assert (again, calls) == (folder, [])
    assert {p: p.stat().st_mtime_ns for p in folder.iterdir()} == before


def test_store_is_intact(folder):
    verify_store(folder)
