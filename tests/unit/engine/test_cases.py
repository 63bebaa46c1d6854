"""Faults reported elsewhere, each made here with the whole engine; `Source:` names the report."""

import json
import logging
from functools import partial

import pytest
import torch
from safetensors.torch import load_file

from tests.helpers.checkpoints import (
    load_oracle,
    oracle_greedy_ids,
    oracle_logits,
    rewrite_tensors,
    sharded_llama,
    spell_config_old,
    strip_prefix,
    tiny_bloom,
    tiny_falcon,
    tiny_gpt2,
    tiny_gpt_neox,
    tiny_gptj,
    tiny_llama,
    tiny_mistral,
    tiny_opt,
    tiny_opt350,
    tiny_qwen2,
)
from tests.helpers.engines import greedy_requests, plan_of, run_requests, run_rows
from tests.helpers.io_shim import ramfs_mount
from tests.helpers.scripted_model import SCRIPT, SCRIPT_PROMPT, script_ids, write_scripted_model
from tests.helpers.tokenizers import EOT_ID, byte_ids
from zeroinfer.engine import FinishReason, Request, SamplingParams
from zeroinfer.errors import UnsupportedModelError

ROWS = [[5, 9, 17, 33, 80], [7], list(range(40, 61))]
FAMILIES = pytest.mark.parametrize(
    "make", [tiny_llama, tiny_gpt2, tiny_bloom], ids=["llama", "gpt2", "bloom"]
)
STREAMED = {"offload.weights": "nvme"}
RESIDENT = {"offload.weights": "dram"}


def _assert_oracle_ids(folder, settings=STREAMED, *, rows=ROWS, max_tokens=8, **oracle_options):
    torch.set_num_threads(1)
    model = load_oracle(folder, **oracle_options)
    run = run_rows(folder, rows, settings, max_tokens=max_tokens)
    assert run.ids == [oracle_greedy_ids(model, row, max_tokens) for row in rows]
    return run


def _edit_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def _scale(folder, name, factor):
    def change(tensors):
        tensors[name] = (tensors[name].float() * factor).to(tensors[name].dtype)
        return tensors

    rewrite_tensors(folder, change)


def test_fp16_sums_do_not_overflow(tmp_path):
    """Source: vllm-project/vllm#3998. fp16 is widened, so the answer is that of fp32."""
    tiny_llama(tmp_path, dtype="float16")
    _scale(tmp_path, "model.layers.0.mlp.up_proj.weight", 100)
    _scale(tmp_path, "model.layers.0.mlp.down_proj.weight", 1e4)
    torch.set_num_threads(1)
    half = oracle_logits(load_oracle(tmp_path, dtype="float16"), ROWS[0])
    assert not torch.isfinite(half).all(), "the checkpoint must overflow in fp16"
    run = _assert_oracle_ids(tmp_path)
    assert torch.isfinite(torch.cat(run.logits)).all()
    assert any("fp16 weights are widened to fp32" in note for note in run.plan.notes)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(("dtype", "short"), [("float32", "fp32"), ("bfloat16", "bf16")])
def test_values_that_are_not_finite_end_the_request(tmp_path, value, dtype, short):
    """Source: vllm-project/vllm#3998. An error that names layer and dtype, never token 0."""
    tiny_llama(tmp_path, dtype=dtype)

    def change(tensors):
        tensors["model.layers.1.mlp.down_proj.weight"][3, 5] = value
        return tensors

    rewrite_tensors(tmp_path, change)
    run = run_rows(tmp_path, ROWS, STREAMED)
    assert [row.finish_reason for row in run.finished] == [FinishReason.ERROR] * 3
    assert run.ids == [[], [], []]
    for row in run.finished:
        assert f"not finite after layers.1.mlp in {short}" in row.error
        assert ("use --dtype fp32" in row.error) == (short != "fp32")
    assert run.report["totals"]["num_failed"] == 3


def test_one_bad_row_leaves_the_others_alone(tmp_path):
    """Source: vllm-project/vllm#3998. A bad embedding row fails those who use it and no other."""
    tiny_llama(tmp_path)

    def change(tensors):
        tensors["model.embed_tokens.weight"][11] = float("nan")
        return tensors

    rewrite_tensors(tmp_path, change)
    good, bad = run_rows(tmp_path, [ROWS[0], [4, 6, 11]], STREAMED).finished
    assert "not finite after embed in fp32" in bad.error
    assert good.finish_reason is FinishReason.LENGTH
    assert list(good.token_ids) == run_rows(tmp_path, [ROWS[0]], STREAMED).ids[0]


TIED = {
    "llama": (partial(tiny_llama, tie_word_embeddings=True), "model.embed_tokens.weight"),
    "gpt2": (tiny_gpt2, "transformer.wte.weight"),
    "bloom": (tiny_bloom, "transformer.word_embeddings.weight"),
    "opt": (tiny_opt, "model.decoder.embed_tokens.weight"),
    "opt-350m-form": (tiny_opt350, "model.decoder.embed_tokens.weight"),
    "gpt_neox": (partial(tiny_gpt_neox, tie_word_embeddings=True), "gpt_neox.embed_in.weight"),
    "gptj": (partial(tiny_gptj, tie_word_embeddings=True), "transformer.wte.weight"),
    "qwen2": (partial(tiny_qwen2, tie_word_embeddings=True), "model.embed_tokens.weight"),
    "falcon": (tiny_falcon, "transformer.word_embeddings.weight"),
}


@pytest.mark.parametrize("settings", [STREAMED, RESIDENT], ids=["streamed", "resident"])
@pytest.mark.parametrize("family", TIED)
def test_tied_matrix_is_stored_and_budgeted_once(tmp_path, family, settings):
    """Source: huggingface/transformers#38870."""
    make, table = TIED[family]
    make(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert not {"lm_head.weight", "embed_out.weight"} & set(saved)
    run = _assert_oracle_ids(tmp_path, settings)
    slices = [piece for unit in run.plan.units for piece in unit.slices if piece.name == table]
    (whole,) = slices
    assert whole.row_start == 0
    assert whole.row_stop == 97
    file_bytes = sum(tensor.nbytes for tensor in saved.values())
    assert sum(unit.num_bytes for unit in run.plan.units) == file_bytes
    assert run.report["model"]["weight_bytes"] == file_bytes


def test_end_ids_of_the_generation_config(tmp_path):
    """Source: vllm-project/vllm#4180."""
    write_scripted_model(tmp_path)
    request = Request(request_id=0, prompt_token_ids=tuple(byte_ids(SCRIPT_PROMPT)))
    (row,) = run_requests(tmp_path, [request], STREAMED, has_tokenizer=True).finished
    assert row.token_ids[-1] == EOT_ID
    assert list(row.token_ids) == script_ids()
    assert row.finish_reason is FinishReason.STOP
    assert row.text == SCRIPT


def test_dynamic_rope_forgets_long_requests(tmp_path):
    """Source: huggingface/transformers#25306. All three in one engine, one place."""
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    tiny_llama(tmp_path, max_position_embeddings=32, rope_parameters=rope)
    long = [int(token) for token in torch.arange(60) * 7 % 97]
    one_by_one = {**STREAMED, "scheduler.max_num_seqs": 1}
    run = run_rows(tmp_path, [ROWS[0], long, ROWS[0]], one_by_one, max_tokens=8)
    assert run.ids[2] == run.ids[0]
    assert torch.equal(run.logits[2], run.logits[0])
    together = run_rows(tmp_path, [ROWS[0], long, ROWS[0]], STREAMED, max_tokens=8)
    assert together.ids == run.ids


ROPES = {
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32},
    "llama3": {
        "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", ROPES)
def test_rope_variants_are_not_mixed_up(tmp_path, kind):
    """Source: huggingface/text-generation-inference#816."""
    rope = {"rope_type": kind, "rope_theta": 10000.0, **ROPES[kind]}
    length = 32 if kind == "dynamic" else 128
    tiny_llama(tmp_path, max_position_embeddings=length, rope_parameters=rope)
    rows = [[int(token) for token in torch.arange(n) * 11 % 97] for n in (10, 60)]
    torch.set_num_threads(1)
    run = run_rows(tmp_path, rows, STREAMED, max_tokens=1)
    for row, logits in zip(rows, run.logits, strict=True):
        expected = oracle_logits(load_oracle(tmp_path), row)[-1:]
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def test_unknown_rope_variant_is_refused_by_name(tmp_path):
    """Source: huggingface/text-generation-inference#816."""
    tiny_llama(tmp_path)
    _edit_config(tmp_path, rope_parameters={"rope_type": "spiral", "rope_theta": 1e4, "factor": 2})
    with pytest.raises(UnsupportedModelError, match="rope scaling 'spiral'"):
        plan_of(tmp_path, greedy_requests(ROWS), STREAMED)


def _llama_with_nested_base(folder):
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 500000.0}
    tiny_llama(folder, rope_parameters=rope)
    return [int(token) for token in torch.arange(60) * 5 % 97]


@pytest.mark.parametrize("spell", [lambda folder: None, spell_config_old], ids=["new", "old"])
def test_both_spellings_of_the_rope_base(tmp_path, spell):
    """Source: deepspeedai/DeepSpeed#8345."""
    row = _llama_with_nested_base(tmp_path)
    torch.set_num_threads(1)
    expected = oracle_logits(load_oracle(tmp_path), row)[-1:]
    spell(tmp_path)
    (logits,) = run_rows(tmp_path, [row], STREAMED, max_tokens=1).logits
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "contradiction",
    [{"rope_theta": 10000.0}, {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 8}}],
    ids=["base", "scaling"],
)
def test_contradicting_spellings_warn_and_the_newer_wins(tmp_path, contradiction, caplog):
    """Source: deepspeedai/DeepSpeed#8345."""
    row = _llama_with_nested_base(tmp_path)
    torch.set_num_threads(1)
    expected = oracle_logits(load_oracle(tmp_path), row)[-1:]
    _edit_config(tmp_path, **contradiction)
    with caplog.at_level(logging.WARNING):
        (logits,) = run_rows(tmp_path, [row], STREAMED, max_tokens=1).logits
    assert "the newer is used" in caplog.text
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("pad", "end", "row"),
    [(0, None, [5, 6, 0, 8, 0, 10]), (8, 8, [5, 8, 6, 8, 10])],
    ids=["pad-is-0", "pad-is-end"],
)
def test_pad_id_inside_a_prompt_is_a_token_like_any(tmp_path, pad, end, row):
    """Source: microsoft/onnxruntime-genai#1694."""
    tiny_llama(tmp_path)
    _edit_config(tmp_path, pad_token_id=pad, eos_token_id=end)
    _assert_oracle_ids(tmp_path, rows=[row, ROWS[1]], max_tokens=12)


@pytest.mark.parametrize(
    ("make", "prefix"),
    [
        (tiny_bloom, "transformer."),
        (tiny_gpt2, "transformer."),
        (tiny_opt, "model."),
        (tiny_gpt_neox, "gpt_neox."),
        (tiny_gptj, "transformer."),
        (partial(tiny_qwen2, tie_word_embeddings=True), "model."),
        (tiny_falcon, "transformer."),
    ],
)
def test_checkpoint_without_the_outer_prefix(tmp_path, make, prefix):
    """Source: onnxruntime/mobius#113."""
    make(tmp_path)
    expected = run_rows(tmp_path, ROWS, STREAMED, max_tokens=8).ids
    strip_prefix(tmp_path, prefix)
    assert not any(n.startswith(prefix) for n in load_file(tmp_path / "model.safetensors"))
    assert _assert_oracle_ids(tmp_path).ids == expected


@pytest.mark.parametrize(
    ("make", "prefix"), [(tiny_llama, "model."), (tiny_opt350, "model.decoder.")]
)
def test_checkpoint_of_a_bare_decoder(tmp_path, make, prefix):
    """Source: onnxruntime/mobius#113. Saved without its head's owner."""
    make(tmp_path)
    expected = run_rows(tmp_path, ROWS, STREAMED, max_tokens=8).ids
    strip_prefix(tmp_path, prefix)
    assert run_rows(tmp_path, ROWS, STREAMED, max_tokens=8).ids == expected


@pytest.mark.parametrize("name", ["embed_out.weight", "lm_head.weight"])
def test_either_name_of_the_gpt_neox_head(tmp_path, name):
    """Source: onnxruntime/mobius#113. Releases before 5 call it embed_out."""
    tiny_gpt_neox(tmp_path)
    expected = run_rows(tmp_path, ROWS, STREAMED, max_tokens=8).ids
    heads = {"embed_out.weight", "lm_head.weight"}
    rewrite_tensors(tmp_path, lambda ts: {name if n in heads else n: t for n, t in ts.items()})
    assert name in load_file(tmp_path / "model.safetensors")
    assert _assert_oracle_ids(tmp_path).ids == expected


def test_layers_spread_over_shards(tmp_path):
    """Source: huggingface/transformers-bloom-inference#24. Bytes of a pass are read once."""
    sharded_llama(tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) == 7
    run = _assert_oracle_ids(tmp_path)
    assert any(len(unit.slices) > 1 for unit in run.plan.units), (
        "units must join tensors of several shards"
    )
    table_bytes = 97 * 32 * 4
    file_bytes = sum(
        tensor.nbytes
        for path in tmp_path.glob("*.safetensors")
        for tensor in load_file(path).values()
    )
    assert run.plan.streamed_bytes == file_bytes - table_bytes
    rows_bytes = (sum(map(len, map(set, ROWS))) + 7 * len(ROWS)) * 32 * 4
    needed = run.report["io"]["nvme"]["bytes_needed"]
    assert 0 <= 8 * run.plan.streamed_bytes + rows_bytes - needed <= rows_bytes


def _make_mixed(folder):
    tiny_llama(folder, dtype="bfloat16")

    def change(tensors):
        return {
            name: tensor.float() if "norm" in name or ".layers.1." in name else tensor
            for name, tensor in tensors.items()
        }

    rewrite_tensors(folder, change)


def test_mixed_dtypes_forced_to_fp32(tmp_path):
    """Source: huggingface/accelerate#757."""
    _make_mixed(tmp_path)
    _assert_oracle_ids(tmp_path, {**STREAMED, "model.dtype": "fp32"}, max_tokens=16)


def test_mixed_dtypes_under_auto(tmp_path):
    """Source: huggingface/accelerate#757. config.json says bf16, so everything is rounded to it."""
    _make_mixed(tmp_path)
    run = run_rows(tmp_path, ROWS, STREAMED, max_tokens=8)
    assert run.report["model"]["dtype"] == "bf16"

    def change(tensors):
        return {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}

    rewrite_tensors(tmp_path, change)
    rounded = run_rows(tmp_path, ROWS, STREAMED, max_tokens=8)
    assert run.ids == rounded.ids
    assert all(map(torch.equal, run.logits, rounded.logits))


STRAY = {
    "gpt2": (
        tiny_gpt2,
        {
            "transformer.h.0.attn.bias": torch.ones(1, 1, 128, 128, dtype=torch.uint8),
            "transformer.h.0.attn.masked_bias": torch.tensor(-1e4),
        },
    ),
    "llama": (
        tiny_llama,
        {
            f"model.layers.{idx}.self_attn.rotary_emb.inv_freq": torch.ones(4)
            for idx in range(2)
        },
    ),
    "gpt_neox": (
        tiny_gpt_neox,
        {
            "gpt_neox.layers.0.attention.bias": torch.ones(1, 1, 256, 256, dtype=torch.uint8),
            "gpt_neox.layers.0.attention.masked_bias": torch.tensor(-1e9),
            "gpt_neox.layers.1.attention.rotary_emb.inv_freq": torch.ones(2),
        },
    ),
    "gptj": (
        tiny_gptj,
        {
            "transformer.h.0.attn.bias": torch.ones(1, 1, 256, 256, dtype=torch.uint8),
            "transformer.h.0.attn.masked_bias": torch.tensor(-1e9),
        },
    ),
    "opt": (tiny_opt, {"model.decoder.version": torch.tensor([3.0])}),
    "mistral": (tiny_mistral, {"model.layers.1.self_attn.rotary_emb.inv_freq": torch.ones(4)}),
    "falcon": (
        tiny_falcon,
        {"transformer.h.0.self_attention.maybe_rotary.inv_freq": torch.ones(4)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", STRAY)
def test_old_buffers_are_ignored_in_silence(tmp_path, family, caplog):
    """Source: huggingface/text-generation-inference#1460."""
    make, buffers = STRAY[family]
    make(tmp_path)
    rewrite_tensors(tmp_path, lambda tensors: tensors | buffers)
    with caplog.at_level(logging.WARNING):
        _assert_oracle_ids(tmp_path)
    assert "not used" not in caplog.text


def test_tensor_of_a_missing_layer_is_named_once(tmp_path, caplog):
    """Source: huggingface/text-generation-inference#1460."""
    tiny_llama(tmp_path)
    name = "model.layers.7.mlp.up_proj.weight"
    rewrite_tensors(tmp_path, lambda tensors: tensors | {name: torch.ones(64, 32)})
    with caplog.at_level(logging.WARNING):
        run_rows(tmp_path, ROWS, STREAMED, max_tokens=1)
    (record,) = [r for r in caplog.records if "not used" in r.getMessage()]
    assert name in record.getMessage()


def test_file_system_without_direct_io(tmp_path, caplog):
    """Source: ServerlessLLM/ServerlessLLM#318. One line says so, and the answer is the same."""
    plain, mounted = tmp_path / "plain", tmp_path / "mounted"
    tiny_llama(plain)
    expected = run_rows(plain, ROWS, STREAMED, max_tokens=8).ids
    mounted.mkdir()
    with ramfs_mount(mounted), caplog.at_level(logging.INFO):
        sharded_llama(mounted / "model")
        assert run_rows(mounted / "model", ROWS, STREAMED, max_tokens=8).ids == expected
    said = [r for r in caplog.records if "has no direct I/O" in r.getMessage()]
    assert len(said) == 1


def test_tail_of_a_file_that_ends_inside_a_block(tmp_path):
    """Source: ggml-org/llama.cpp#18766."""
    tiny_llama(tmp_path)
    path = tmp_path / "model.safetensors"
    short = (100 - path.stat().st_size) % 4096
    data = path.read_bytes()
    # The header may be followed by spaces; they move the data until the file ends as wanted.
    header_bytes = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + header_bytes] + b" " * short
    path.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + header_bytes :])
    assert path.stat().st_size % 4096 == 100
    _assert_oracle_ids(tmp_path)


@FAMILIES
def test_streaming_that_was_asked_for_happens(tmp_path, make):
    """Source: vllm-project/vllm#51396. Bytes of each pass are the weights, rows of tables aside."""
    make(tmp_path)
    run = run_rows(tmp_path, [[3]], STREAMED, max_tokens=5)
    weights = run.report["model"]["weight_bytes"]
    is_gathered = {piece.name for u in run.plan.units if u.is_gathered for piece in u.slices}
    table_bytes = sum(u.num_bytes for u in run.plan.units if u.is_gathered)
    assert run.plan.streamed_bytes == weights - table_bytes
    # One row per position of each table: those gathered alone, and a tied head's matrix.
    num_tables = len(is_gathered | {"tied"}) if make is not tiny_llama else 1
    needed = run.report["io"]["nvme"]["bytes_needed"]
    assert needed == 5 * (run.plan.streamed_bytes + num_tables * 32 * 4)
    assert run.report["io"]["nvme"]["bytes_read"] >= needed


def test_each_position_is_computed_once(tmp_path):
    """Source: lyogavin/airllm#111."""
    tiny_llama(tmp_path)
    run = run_rows(tmp_path, [[idx % 97 for idx in range(50)]], STREAMED, max_tokens=10)
    assert [step.num_tokens for step in run.steps] == [50] + [1] * 9
    totals = run.report["totals"]
    assert totals["num_computed_rows"] == 50 + 9
    assert totals["num_steps"] == 10
    assert totals["num_prompt_tokens"] == 50
    assert totals["num_generated_tokens"] == 10


@FAMILIES
def test_weights_that_fit_are_read_once(tmp_path, make):
    """Source: lyogavin/airllm#325."""
    make(tmp_path)
    (path,) = tmp_path.glob("*.safetensors")
    budget = {"offload.weights": "auto", "offload.dram_weights": 3 * path.stat().st_size}
    run = run_rows(tmp_path, [[3, 4]], budget, max_tokens=20)
    io = run.report["io"]["nvme"]
    assert io["bytes_needed"] == run.report["model"]["weight_bytes"]
    assert io["bytes_read"] <= sum(run.plan.footprints)
    assert [step.nvme_bytes for step in run.steps[1:]] == [0] * 19


def test_weights_read_are_those_of_disk(tmp_path):
    """Bits that change on disk change the answer: nothing is kept from an earlier run."""
    tiny_llama(tmp_path)
    before = run_rows(tmp_path, ROWS, STREAMED, max_tokens=4)
    _scale(tmp_path, "lm_head.weight", -1)
    after = run_rows(tmp_path, ROWS, STREAMED, max_tokens=4)
    assert all(torch.equal(-a[0], b[0]) for a, b in zip(after.logits, before.logits, strict=True))


def test_sampling_of_a_scripted_model_follows_the_script(tmp_path):
    """A model sure of itself draws the same text at any temperature that keeps one token."""
    write_scripted_model(tmp_path)
    sampling = SamplingParams(max_tokens=4, temperature=1.0, top_k=1)
    request = Request(
        request_id=0, prompt_token_ids=tuple(byte_ids(SCRIPT_PROMPT)), sampling=sampling
    )
    (row,) = run_requests(tmp_path, [request], STREAMED, has_tokenizer=True).finished
    assert list(row.token_ids) == script_ids()[:4]
    assert row.finish_reason is FinishReason.LENGTH
