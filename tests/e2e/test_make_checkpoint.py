"""tools/make_checkpoint.py writes what transformers would, refuses what it cannot write."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open

from tests.helpers.cgroups import run_limited
from zeroinfer.diskformat import open_checkpoint
from zeroinfer.dtypes import DType
from zeroinfer.units import MIB

TOOL = Path(__file__).resolve().parents[2] / "tools/make_checkpoint.py"
TINY = ("llama-tiny", "gpt2-tiny", "bloom-tiny", "opt-tiny", "gpt-neox-tiny", "gpt-j-tiny")
PREFIXES = {"gpt2": "transformer.", "bloom": "transformer."}
"""Outer prefixes that published checkpoints leave out."""


def command(*arguments):
    return [sys.executable, str(TOOL), *map(str, arguments)]


def make(out, *arguments):
    """Run the tool, which must succeed; return the folder."""
    done = subprocess.run(
        command("--out", out, *arguments), check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert str(out) in done.stderr
    assert done.stdout == ""
    return out


def refuse(out, *arguments):
    """Run the tool, which must refuse and leave nothing; return exit code and message."""
    before = sorted(out.parent.iterdir())
    done = subprocess.run(
        command("--out", out, *arguments), check=False, capture_output=True, text=True
    )
    assert sorted(out.parent.iterdir()) == before
    assert "Traceback" not in done.stderr
    return done.returncode, done.stderr


@pytest.fixture
def mount(tmp_path):
    """Mount file systems of this test's own; they go with the test."""
    folders = []

    def mount_at(fs_type, options):
        folder = tmp_path / f"mount-{len(folders)}"
        folder.mkdir()
        subprocess.run(["mount", "-t", fs_type, "-o", options, fs_type, folder], check=True)
        folders.append(folder)
        return folder

    yield mount_at
    for folder in folders:
        subprocess.run(["umount", folder], check=True)


def tensors_of(folder):
    """Return all tensors by name, and the file of each."""
    tensors, files = {}, {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                tensors[name] = file.get_tensor(name)
                files[name] = path.name
    return tensors, files


@pytest.mark.parametrize("geometry", TINY)
def test_loads_in_transformers_without_a_name_left_over(geometry, tmp_path):
    folder = make(tmp_path / "m", "--geometry", geometry)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, dtype="auto"
    )
    assert not any(info.values()), info
    assert model.dtype == torch.bfloat16
    tensors, _ = tensors_of(folder)
    prefix = PREFIXES.get(model.config.model_type, "")
    saved = {name.removeprefix(prefix): t for name, t in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        assert torch.equal(saved.pop("lm_head.weight"), next(iter(model.parameters())))
    if model.config.model_type == "gpt_neox":
        saved["embed_out.weight"] = saved.pop("lm_head.weight")
    assert {name: t.shape for name, t in tensors.items()} == {n: t.shape for n, t in saved.items()}
    assert all(torch.equal(tensors[name], saved[name]) for name in saved)


@pytest.mark.parametrize("geometry", TINY[:3])
def test_values_are_plausible_and_differ(geometry, tmp_path):
    tensors, _ = tensors_of(make(tmp_path / "m", "--geometry", geometry, "--dtype", "fp32"))
    matrices = {name: t for name, t in tensors.items() if t.dim() == 2}
    assert all(t.std().item() == pytest.approx(0.02, rel=0.15) for t in matrices.values())
    assert all(abs(t.mean().item()) < 0.005 for t in matrices.values())
    vectors = {name: t for name, t in tensors.items() if t.dim() == 1}
    assert all(torch.all(t == 1) for name, t in vectors.items() if name.endswith("weight"))
    assert all(t.abs().max() < 0.2 for name, t in vectors.items() if name.endswith("bias"))
    starts = [tuple(t.flatten()[:8].tolist()) for t in matrices.values()]
    assert len(set(starts)) == len(starts)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_element_types_agree_and_zeroinfer_reads_the_headers(dtype, tmp_path):
    folder = make(tmp_path / "m", "--geometry", "llama-tiny", "--dtype", dtype)
    checkpoint = open_checkpoint(folder)
    assert {extent.spec.dtype for extent in checkpoint.tensors.values()} == {DType.from_name(dtype)}
    exact = tensors_of(make(tmp_path / "exact", "--geometry", "llama-tiny", "--dtype", "fp32"))[0]
    for name, tensor in tensors_of(folder)[0].items():
        assert torch.equal(tensor, exact[name].to(tensor.dtype))


def test_file_is_what_safetensors_itself_would_write(tmp_path):
    folder = make(tmp_path / "m", "--geometry", "llama-tiny")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    model.save_pretrained(tmp_path / "theirs")
    theirs = (tmp_path / "theirs/model.safetensors").read_bytes()
    assert (folder / "model.safetensors").read_bytes() == theirs


def test_shards_are_filled_in_module_order_and_indexed(tmp_path):
    folder = make(tmp_path / "m", "--geometry", "llama-tiny", "--shard-size", "20KB")
    tensors, files = tensors_of(folder)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == files
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    assert set(files.values()) == {f"model-{i:05d}-of-00003.safetensors" for i in (1, 2, 3)}
    assert files["model.embed_tokens.weight"] == "model-00001-of-00003.safetensors"
    assert files["lm_head.weight"] == "model-00003-of-00003.safetensors"
    whole = make(tmp_path / "whole", "--geometry", "llama-tiny")
    assert [path.name for path in whole.glob("model*")] == ["model.safetensors"]
    assert all(torch.equal(t, tensors[name]) for name, t in tensors_of(whole)[0].items())


def test_config_keeps_the_spelling_of_published_checkpoints(tmp_path):
    folder = make(
        tmp_path / "m", "--family", "llama", "--geometry", "llama-tiny", "--num-layers", "3"
    )
    config = json.loads((folder / "config.json").read_text())
    assert config["torch_dtype"] == "bfloat16"
    assert config["rope_theta"] == 10000.0
    assert config["num_hidden_layers"] == 3
    assert not {"dtype", "rope_parameters"} & set(config)
    generation = json.loads((folder / "generation_config.json").read_text())
    assert (generation["bos_token_id"], generation["eos_token_id"]) == (1, 2)
    assert "model.layers.2.mlp.up_proj.weight" in tensors_of(folder)[0]


CONFIGS = {
    "llama": {
        "vocab_size": 97, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 16, "attention_bias": True,
        "mlp_bias": True, "tie_word_embeddings": True,
    },
    "gpt2": {"vocab_size": 97, "n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 64,
             "n_inner": 48, "bos_token_id": 1, "eos_token_id": 1},
    "bloom": {"vocab_size": 97, "hidden_size": 48, "n_layer": 1, "n_head": 3},
    "opt": {
        "vocab_size": 97, "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 1,
        "num_attention_heads": 4, "word_embed_proj_dim": 16, "do_layer_norm_before": False,
        "enable_bias": False, "tie_word_embeddings": False,
    },
    "gpt_neox": {
        "vocab_size": 97, "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 1,
        "num_attention_heads": 4, "attention_bias": False, "tie_word_embeddings": True,
    },
    "gptj": {
        "vocab_size": 97, "n_embd": 32, "n_layer": 1, "n_head": 4, "n_inner": 48, "rotary_dim": 4,
        "bos_token_id": 1, "eos_token_id": 1,
    },
    "mistral": {
        "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12,
    },
    "qwen2": {
        "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True,
    },
    "qwen3": {
        "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 1, "attention_bias": True,
    },
    "falcon": {
        "vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4,
        "new_decoder_architecture": True, "num_kv_heads": 2, "bias": True,
    },
}  # fmt: skip


@pytest.mark.parametrize("family", CONFIGS)
def test_sizes_can_come_from_a_config_file(family, tmp_path):
    given = tmp_path / "config.json"
    given.write_text(json.dumps({"model_type": family, "dtype": "float16", **CONFIGS[family]}))
    folder = make(tmp_path / "m", "--config", given, "--num-layers", "2", "--dtype", "fp32")
    config = transformers.AutoConfig.from_pretrained(folder)
    assert config.num_hidden_layers == 2
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, dtype="auto"
    )
    assert not any(info.values()), info
    assert model.dtype == torch.float32
    assert json.loads((folder / "config.json").read_text())["vocab_size"] == 97


def test_seed_decides_every_value(tmp_path):
    folders = [
        make(tmp_path / name, "--geometry", "gpt2-tiny", "--seed", seed)
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    ]
    first, again, other = ((f / "model.safetensors").read_bytes() for f in folders)
    assert first == again
    assert first != other


def test_rows_of_a_matrix_larger_than_the_random_block_differ(tmp_path):
    given = tmp_path / "config.json"
    sizes = {**CONFIGS["gpt2"], "vocab_size": 40000, "n_embd": 1024}
    given.write_text(json.dumps({"model_type": "gpt2", **sizes}))
    folder = make(tmp_path / "m", "--config", given)
    with safe_open(folder / "model.safetensors", "pt") as file:
        rows = file.get_tensor("wte.weight").view(torch.int16).numpy()
    assert len({row.tobytes() for row in rows}) == 40000
    _remove(folder)


def test_stays_within_its_memory_and_out_of_the_page_cache(tmp_path):
    folder = tmp_path / "m"
    arguments = ("--geometry", "g-600", "--num-layers", "16", "--out", folder)
    run = run_limited(command(*arguments), limit_bytes=384 * MIB)
    assert run.returncode == 0, run.stderr
    assert run.num_oom_kills == 0
    path = folder / "model.safetensors"
    size_bytes = path.stat().st_size
    assert size_bytes > 360 * MIB
    cached = [_is_cached(path, offset) for offset in range(0, size_bytes - MIB, 8 * MIB)]
    assert sum(cached) <= 0.02 * len(cached)
    _remove(folder)


def test_full_disk_is_refused_before_anything_is_written(mount):
    folder = mount("tmpfs", "size=2m")
    code, message = refuse(folder / "m", "--geometry", "llama-tiny", "--num-layers", "9")
    assert code == 3
    assert "has 2.0 MiB free, the checkpoint needs 16.2 MiB; lower --num-layers" in message


def test_write_error_leaves_nothing_behind(tmp_path):
    # The size limit of a file stands for a disk that fills up during the write.
    limited = ["sh", "-c", 'ulimit -f 100; trap "" XFSZ; exec "$@"', "sh"]
    out = tmp_path / "m"
    done = subprocess.run(
        [*limited, *command("--geometry", "g-600", "--num-layers", "1", "--out", out)],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 4
    assert "File too large" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_file_system_without_direct_writes_gets_the_same_bytes(mount, tmp_path):
    folder = mount("ramfs", "rw")
    with pytest.raises(OSError, match="Invalid argument"):
        os.open(folder / "probe", os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
    buffered = make(folder / "m", "--geometry", "llama-tiny") / "model.safetensors"
    direct = make(tmp_path / "m", "--geometry", "llama-tiny") / "model.safetensors"
    assert buffered.read_bytes() == direct.read_bytes()


def test_interrupt_leaves_nothing_behind(tmp_path):
    out = tmp_path / "m"
    with subprocess.Popen(
        command("--geometry", "g-600", "--out", out), stderr=subprocess.PIPE, text=True
    ) as child:
        while not list(tmp_path.glob(".m.partial-*/*")):
            assert child.poll() is None
            os.sched_yield()
        child.send_signal(signal.SIGINT)
        assert "interrupted; nothing is left behind" in child.stderr.read()
    assert child.returncode == 130
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--geometry", "llama-tiny", "--num-layers", "0"), "--num-layers: got 0, need 1 to"),
        (("--geometry", "llama-tiny", "--num-layers", "1000000000"), "need 1 to 10000"),
        (("--geometry", "llama-tiny", "--seed", "-1"), "--seed: got -1, need 0 or more"),
        (
            ("--geometry", "llama-tiny", "--family", "gpt2"),
            "geometry llama-tiny is llama, not gpt2",
        ),
        (("--geometry", "llama-tiny", "--dtype", "fp64"), "need --dtype bf16, fp16 or fp32"),
        (("--geometry", "llama-tiny", "--dtype", "int9"), "dtype 'int9' is unknown"),
        (("--geometry", "llama-tiny", "--shard-size", "0"), "--shard-size above 0"),
        (("--config", "missing.json"), "missing.json cannot be read"),
        (("--geometry", "llama-9b"), "invalid choice: 'llama-9b'"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message, tmp_path):
    code, text = refuse(tmp_path / "m", *arguments)
    assert code == 2
    assert message in text


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba' is none of llama, gpt2, bloom, "),
        ({"model_type": "llama", "hidden_size": 32}, "config has none of intermediate_size"),
        ({**CONFIGS["bloom"], "model_type": "bloom", "vocab_size": 0}, "every size must be 1"),
    ],
)
def test_wrong_configs_are_refused(config, message, tmp_path):
    given = tmp_path / "config.json"
    given.write_text(json.dumps(config))
    code, text = refuse(tmp_path / "m", "--config", given)
    assert code == 2
    assert message in text


def test_a_folder_that_cannot_be_looked_at_is_refused(tmp_path):
    code, text = refuse(tmp_path / ("x" * 300), "--geometry", "llama-tiny")
    assert (code, "cannot be looked at: File name too long" in text) == (4, True)


def test_existing_folder_is_not_touched(tmp_path):
    (tmp_path / "m").mkdir()
    code, text = refuse(tmp_path / "m", "--geometry", "llama-tiny")
    assert (code, f"--out {tmp_path / 'm'} exists" in text) == (2, True)


def _is_cached(path, offset):
    """Tell whether a page of a file is in the page cache, without bringing it there."""
    fd = os.open(path, os.O_RDONLY)
    try:
        return os.preadv(fd, [bytearray(4096)], offset, os.RWF_NOWAIT) > 0
    except BlockingIOError:
        return False
    finally:
        os.close(fd)


def _remove(folder):
    """Free the space of a large folder now; tmp_path keeps the last runs."""
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "holds a list, need an object"),
        ('{"model_type": ["llama"]}', "model_type ['llama'] is none of llama"),
        (
            '{"model_type": "llama", "hidden_size": "x"}',
            "config holds a size that is none: invalid literal",
        ),
    ],
    ids=range(3),
)
def test_configs_of_another_kind_are_refused(text, message, tmp_path):
    (tmp_path / "config.json").write_text(text)
    code, said = refuse(tmp_path / "m", "--config", tmp_path / "config.json")
    assert (code, message in said) == (2, True), said
