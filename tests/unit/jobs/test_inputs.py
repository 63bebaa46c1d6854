import io
import json

import pytest

from tests.helpers.tokenizers import s_tok, write_tokenizer
from zeroinfer.engine import PromptReader, SamplingParams
from zeroinfer.errors import ConfigError, RequestError, StorageError
from zeroinfer.jobs import InputReader, RowStyle, read_job_input
from zeroinfer.tokenization import Tokenizer

pytestmark = pytest.mark.filterwarnings("error")


class ByteTokenizer:
    """Ids of the scripted tokenizer: byte + 3; no begin token."""

    def encode(self, text):
        return [byte + 3 for byte in text.encode("utf-8")]

    def encode_chat(self, messages):
        return self.encode("".join(f"{m['role']}:{m['content']};" for m in messages))


class NoTemplateTokenizer(ByteTokenizer):
    def encode_chat(self, messages):
        raise RequestError("the model has no chat template; use prompt")


def reader(defaults=None, model_names=frozenset(), **kwargs):
    prompts = PromptReader(**({"tokenizer": ByteTokenizer()} | kwargs))
    defaults = defaults or SamplingParams(seed=100)
    return InputReader(prompts=prompts, defaults=defaults, model_names=model_names)


def read(*lines, **kwargs):
    data = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    return reader(**kwargs).read_jsonl(io.BytesIO(data.encode()))


def only_error(line, **kwargs):
    (row,) = read(line, **kwargs).rows
    assert row.error is not None
    return row.error.message


def chat(custom_id="a", **body):
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]} | body
    return {
        "custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body
    }  # fmt: skip


def completion(custom_id="a", **body):
    body = {"model": "m", "prompt": "hi"} | body
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}


def test_the_four_forms_of_a_line():
    job = read(
        {"prompt": "hi"},
        {"prompt_token_ids": [5, 6]},
        {"messages": [{"role": "user", "content": "hi"}]},
        completion("c1"),
        chat("c2"),
    )
    assert [row.error for row in job.rows] == [None] * 5
    assert [list(row.prompt_token_ids) for row in job.rows[:2]] == [[107, 108], [5, 6]]
    assert list(job.rows[2].prompt_token_ids) == list(job.rows[4].prompt_token_ids)
    assert [row.style for row in job.rows] == [
        RowStyle.PLAIN, RowStyle.PLAIN, RowStyle.PLAIN, RowStyle.COMPLETION, RowStyle.CHAT
    ]  # fmt: skip
    assert [row.custom_id for row in job.rows] == [None, None, None, "c1", "c2"]


def test_text_file_holds_one_prompt_a_line(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_bytes(b"\xef\xbb\xbfhi\r\n\r\n{not json\n\xff\n")
    rows = read_job_input(str(path), reader()).rows
    assert [row.line for row in rows] == [1, 3, 4]
    assert list(rows[0].prompt_token_ids) == [107, 108]
    assert rows[1].error is None
    assert rows[2].error.message == "the line is not UTF-8: byte 0xff at column 1"


def test_standard_input(monkeypatch):
    class Stdin:
        buffer = io.BytesIO(b'{"prompt": "hi"}')

    monkeypatch.setattr("sys.stdin", Stdin)
    assert len(read_job_input("-", reader()).rows) == 1


def test_missing_input_is_named(tmp_path):
    with pytest.raises(StorageError, match=r"none\.jsonl cannot be opened: No such file"):
        read_job_input(str(tmp_path / "none.jsonl"), reader())


@pytest.mark.parametrize(
    ("data", "lines"),
    [
        (b"", []),
        (b"\n\r\n  \n", []),
        (b'{"prompt": "a"}', [1]),
        (b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n\n{"prompt": "b"}', [1, 4]),
        (b'{"prompt": "a"}\n{"prompt": "b"}\n', [1, 2]),
        ('{"prompt": "a\u2028b\u0085"}\n{"prompt": "b"}\n'.encode(), [1, 2]),
    ],
)
def test_tiny_inputs_and_line_ends(data, lines):
    """Source: vllm-project/vllm#28703."""
    job = reader().read_jsonl(io.BytesIO(data))
    assert [(row.line, row.error) for row in job.rows] == [(line, None) for line in lines]


def test_line_numbers_in_errors_stay_true():
    job = reader().read_jsonl(io.BytesIO(b'\r\n{"prompt": "a"}\r\n\r\n{oops\r\n'))
    assert [(row.index, row.line, row.error is None) for row in job.rows] == [
        (0, 2, True), (1, 4, False)
    ]  # fmt: skip


def test_a_bad_row_is_one_row():
    """Source: ray-project/ray#59194."""
    unknown_type = completion("unknown")
    unknown_type["body"]["temperature"] = {"value": 1}
    missing_body = {"custom_id": "no-body", "method": "POST", "url": "/v1/completions"}
    job = read(
        completion("first"),
        '{"custom_id": "cut", "method": "POST", "url": "/v1/comp',
        missing_body,
        completion("long", prompt=[5] * 70),
        unknown_type,
        completion("last"),
        max_model_len=64,
    )
    assert [row.custom_id for row in job.rows] == [
        "first", "cut", "no-body", "long", "unknown", "last"
    ]  # fmt: skip
    assert [row.error is None for row in job.rows] == [True, False, False, False, False, True]
    messages = [row.error.message for row in job.rows if row.error is not None]
    assert "not JSON" in messages[0]
    assert messages[1] == "the line has no body; need custom_id, method, url, body"
    assert "70" in messages[2]
    assert "64" in messages[2]
    assert messages[3] == "temperature has the wrong type: got an object, need a number"
    assert all(row.style.is_openai for row in job.rows)


def test_a_cut_line_without_custom_id_takes_the_form_of_its_file():
    job = read(completion("a"), "{", max_model_len=64)
    assert job.rows[1].style is RowStyle.COMPLETION
    job = read({"prompt": "a"}, "{", max_model_len=64)
    assert job.rows[1].style is RowStyle.PLAIN


def test_too_long_prompt_is_an_error_with_both_lengths():
    """Source: vllm-project/vllm#1655."""
    job = read(*({"prompt_token_ids": [5] * n} for n in (10, 200, 10)), max_model_len=64)
    assert [row.error is None for row in job.rows] == [True, False, True]
    assert job.rows[1].error.message.startswith("the prompt is too long: got 200 tokens, and the")
    assert "window of 64" in job.rows[1].error.message


@pytest.mark.parametrize("length", [62, 63, 64])
def test_prompt_at_the_window(length):
    (row,) = read({"prompt_token_ids": [5] * length}, max_model_len=64).rows
    assert (row.error is None) == (length < 64)
    if row.error is None:
        assert row.sampling.max_tokens == 64 - length


@pytest.mark.parametrize("prompt", ["", [""], [], [[]]])
@pytest.mark.parametrize("form", ["plain", "openai"])
def test_empty_prompt_is_an_error_in_plain_words(prompt, form):
    """Source: vllm-project/vllm#7283."""
    line = {"prompt": prompt} if form == "plain" else completion(prompt=prompt)
    good = {"prompt": "hi"}
    rows = read(line, good).rows
    assert rows[0].error.message == "the prompt is empty; need at least one token"
    assert rows[0].error.status_code == 400
    assert rows[1].error is None


def test_empty_ids_are_an_error():
    assert only_error({"prompt_token_ids": []}) == "the prompt is empty; need at least one token"


def test_duplicate_custom_id_is_refused_before_work():
    """Source: sgl-project/sglang#1415."""
    with pytest.raises(ConfigError, match="custom_id 'a' is used twice: lines 1 and 3"):
        read(completion("a"), completion("b"), completion("a", prompt="other"))


def test_duplicate_custom_id_counts_in_bad_lines_too():
    with pytest.raises(ConfigError, match="lines 1 and 2"):
        read(completion("a"), '{"custom_id": "a", "method": ')


def test_another_model_is_a_404_that_names_it():
    """Source: TU-Wien-dataLAB/aqueduct#118."""
    rows = read(completion("a"), chat("b", model="other"), model_names=("m",)).rows
    assert rows[0].error is None
    assert rows[1].error.status_code == 404
    assert rows[1].error.type == "model_not_found"
    assert "'other'" in rows[1].error.message
    assert rows[1].style is RowStyle.CHAT


def test_a_line_may_set_its_own_sampling():
    line = {
        "prompt": "a", "max_tokens": 3, "temperature": 1, "top_p": 0.5, "top_k": 7, "seed": 9,
        "stop": "x", "ignore_eos": True,
    }  # fmt: skip
    (row,) = read(line).rows
    assert row.sampling == SamplingParams(
        max_tokens=3, temperature=1.0, top_p=0.5, top_k=7, seed=9, stop=("x",), ignore_eos=True
    )


def test_openai_body_sets_sampling():
    (row,) = read(
        chat(max_completion_tokens=5, temperature=0.5, top_p=0.9, seed=4, stop=["a", "b"], n=1)
    ).rows
    assert row.error is None
    assert row.sampling == SamplingParams(
        max_tokens=5, temperature=0.5, top_p=0.9, seed=4, stop=("a", "b")
    )


def test_seeds_count_up_from_the_jobs_seed():
    rows = read({"prompt": "a"}, {"prompt": "b", "seed": 7}, {"prompt": "c"}).rows
    assert [row.sampling.seed for row in rows] == [100, 7, 102]


def test_null_counts_as_absent():
    (row,) = read({"prompt": "a", "messages": None, "temperature": None, "stop": None}).rows
    assert row.error is None
    assert row.sampling == SamplingParams(seed=100)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[1]", "the line is a list, need a JSON object"),
        ("{", "the line is not JSON: Expecting property name"),
        ("[" * 100_000, "the line is not JSON that can be read: nested or long beyond reason"),
        ('{"seed": 1' + "0" * 5000 + "}", "the line is not JSON that can be read"),
        ({}, "exactly one of prompt, prompt_token_ids and messages, got none"),
        ({"prompt": "a", "messages": []}, "got prompt and messages"),
        ({"prompt": "a", "temprature": 1}, "did you mean temperature?"),
        ({"prompt": "a", "zzz": 1}, "unknown field 'zzz' in the line; known are ignore_eos,"),
        ({"prompt": 5}, "prompt has the wrong type: got an integer, need a string or token ids"),
        ({"prompt": ["a", "b"]}, "prompt holds 2 entries, need one"),
        ({"prompt": [None]}, "prompt[0] has the wrong type: got null, need a string"),
        ({"prompt": "\ud800"}, "prompt holds half of a surrogate pair at character 0"),
        ({"prompt_token_ids": "a"}, "prompt_token_ids has the wrong type: got a string"),
        ({"prompt_token_ids": [1, True]}, "prompt_token_ids[1] has the wrong type: got a boolean"),
        ({"prompt_token_ids": [1, 97]}, "[1] is not in the vocabulary: got 97, need 0 to 96"),
        ({"prompt_token_ids": [-1]}, "prompt_token_ids[0] is not in the vocabulary: got -1"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens is out of range: got 0, need at least 1"),
        ({"prompt": "a", "max_tokens": 1.5}, "max_tokens has the wrong type: got a number"),
        ({"prompt": "a", "top_p": 0}, "top_p is out of range: got 0.0"),
        ({"prompt": "a", "top_p": True}, "top_p has the wrong type: got a boolean, need a number"),
        ('{"prompt": "a", "temperature": NaN}', "temperature is out of range: got nan"),
        ({"prompt": "a", "temperature": 10**400}, "temperature is out of range: an integer of 401"),
        ({"prompt": "a", "seed": -1}, "seed is out of range: got -1"),
        ({"prompt": "a", "stop": 5}, "stop has the wrong type: got an integer"),
        ({"prompt": "a", "stop": ["x", 5]}, "stop[1] has the wrong type: got an integer"),
        ({"prompt": "a", "stop": ""}, "stop holds an empty string"),
        ({"prompt": "a", "ignore_eos": 1}, "ignore_eos has the wrong type: got an integer"),
        ({"messages": []}, "messages is empty; need at least one message"),
        ({"messages": {}}, "messages has the wrong type: got an object, need a list"),
        ({"messages": [5]}, "messages[0] has the wrong type: got an integer, need an object"),
        ({"messages": [{"role": "user"}]}, "messages[0] has no content"),
        ({"messages": [{"role": 5, "content": "a"}]}, "messages[0].role has the wrong type"),
        ({"messages": [{"role": "user", "content": "a", "contnt": 1}]}, "did you mean content?"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0] is not supported: got 'image_url', need a text part",
        ),
        (completion(n=2), "n is not supported: got 2, need 1 or nothing"),
        (completion(logprobs=3), "logprobs is not supported: got 3, need False or nothing"),
        (completion(stream=True), "stream is not supported: got True"),
        (completion(max_tokns=3), "unknown field 'max_tokns' in body; did you mean max_tokens?"),
        (completion(max_tokens=1, max_completion_tokens=2), "contradict each other: got 1 and 2"),
        (completion(prompt=None), "body has no prompt"),
        (chat(messages=None), "body has no messages"),
        (completion() | {"url": "/v1/embeddings"}, "url is not supported: got '/v1/embeddings'"),
        (completion() | {"method": "GET"}, "method is not supported: got 'GET'"),
        (completion() | {"body": []}, "body has the wrong type: got a list"),
        (completion() | {"custom_id": 5}, "custom_id has the wrong type: got an integer"),
        (completion() | {"custmid": 5}, "unknown field 'custmid' in the line"),
        (completion() | {"custom_id": None}, "the line has no custom_id"),
    ],
)  # fmt: skip
def test_refusals_name_field_and_value(line, message):
    assert message in only_error(line, vocab_size=97 if "vocabulary" in message else None)


def test_neutral_values_and_labels_are_accepted():
    body = {"n": 1, "stream": False, "presence_penalty": 0.0, "user": "u", "metadata": {"a": 1}}
    (row,) = read(chat(**body)).rows
    assert row.error is None


def test_text_parts_are_joined():
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    rows = read(
        {"messages": [{"role": "user", "content": parts}]},
        {"messages": [{"role": "user", "content": "hi"}]},
    ).rows
    assert rows[0].prompt_token_ids == rows[1].prompt_token_ids


def test_without_a_tokenizer_only_ids_serve():
    rows = read({"prompt": "a"}, {"prompt_token_ids": [1]}, tokenizer=None).rows
    assert "the model folder has no tokenizer" in rows[0].error.message
    assert rows[1].error is None


def test_without_a_chat_template_only_chats_fail():
    line = {"messages": [{"role": "user", "content": "a"}]}
    rows = read(line, {"prompt": "a"}, tokenizer=NoTemplateTokenizer()).rows
    assert rows[0].error.message == "the model has no chat template; use prompt"
    assert rows[1].error is None


def test_ids_beyond_the_model_are_an_error():
    assert "model and tokenizer do not belong together" in only_error(
        {"prompt": "z"}, vocab_size=97
    )


def test_prompts_are_kept_small():
    (row,) = read({"prompt_token_ids": [70_000] * 1000}).rows
    assert row.prompt_token_ids.itemsize == 4


def test_workload_sums_up_the_rows_that_run():
    job = read({"prompt": "abc"}, "{", {"prompt": "a", "max_tokens": 7})
    workload = job.workload()
    assert (workload.num_requests, workload.max_prompt_tokens) == (2, 3)
    assert (workload.total_prompt_tokens, workload.max_new_tokens) == (4, 256)
    assert read("{").workload() is None


def test_real_tokenizer_serves_the_protocol(tmp_path):
    write_tokenizer(tmp_path, tokenizer=s_tok(), chat_template="{{ messages[0]['content'] }}")
    lines = ({"prompt": "hi"}, {"messages": [{"role": "user", "content": "hi"}]})
    rows = read(*lines, tokenizer=Tokenizer.open(tmp_path)).rows
    assert [list(row.prompt_token_ids) for row in rows] == [[74, 75]] * 2


def test_hash_covers_every_byte():
    assert read({"prompt": "a"}).sha256 != read({"prompt": "a"}, "").sha256


def test_a_closed_standard_input_is_a_storage_error(monkeypatch):
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(StorageError, match="standard input is closed"):
        read_job_input("-", reader())
