import json
from array import array
from dataclasses import replace

import pytest

from zeroinfer.engine import FinishedRequest, FinishReason
from zeroinfer.errors import StorageError
from zeroinfer.jobs import RecordFormat, Row, RowError, RowStyle
from zeroinfer.jobs.outputs import recover_output

FORMAT = RecordFormat(model_name="tiny", clock=lambda: 1234.5)
FINISHED = FinishedRequest(
    request_id=3, token_ids=(7, 8), text="gr\u00fcn", finish_reason=FinishReason.STOP,
    num_prompt_tokens=5,
)  # fmt: skip
USAGE = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}


def row(style=RowStyle.PLAIN, **kwargs):
    return Row(index=3, line=9, style=style, prompt_token_ids=array("I", [1] * 5), **kwargs)


def test_plain_result():
    line = FORMAT.format_result(row(), FINISHED)
    assert json.loads(line) == {
        "index": 3, "text": "gr\u00fcn", "token_ids": [7, 8],
        "finish_reason": "stop", "usage": USAGE,
    }  # fmt: skip
    assert "gr\u00fcn" in line
    assert "\n" not in line


def test_result_without_a_tokenizer_has_null_text():
    line = FORMAT.format_result(row(), replace(FINISHED, text=None))
    assert json.loads(line)["text"] is None


def test_plain_error():
    line = FORMAT.format_error(row(), RowError(message="bad"))
    detail = {"message": "bad", "type": "invalid_request_error"}
    assert json.loads(line) == {"index": 3, "line": 9, "error": detail}


def test_chat_result():
    record = json.loads(
        FORMAT.format_result(row(RowStyle.CHAT, custom_id="c", model="m"), FINISHED)
    )
    assert record["custom_id"] == "c"
    assert record["error"] is None
    assert record["response"]["status_code"] == 200
    assert record["response"]["body"] == {
        "id": "chatcmpl-3", "object": "chat.completion", "created": 1234, "model": "m",
        "choices": [{
            "index": 0, "message": {"role": "assistant", "content": "gr\u00fcn"}, "logprobs": None,
            "finish_reason": "stop",
        }],
        "usage": USAGE,
    }  # fmt: skip


def test_completion_result_takes_the_jobs_model_name():
    record = json.loads(FORMAT.format_result(row(RowStyle.COMPLETION, custom_id="c"), FINISHED))
    body = record["response"]["body"]
    assert (body["object"], body["model"]) == ("text_completion", "tiny")
    assert body["choices"][0]["text"] == "gr\u00fcn"


def test_openai_error():
    error = RowError(message="no", type="model_not_found", status_code=404)
    record = json.loads(FORMAT.format_error(row(RowStyle.CHAT, custom_id="c"), error))
    assert record["custom_id"] == "c"
    assert record["response"]["status_code"] == 404
    assert record["response"]["body"]["error"]["message"] == "no"
    assert record["error"] == {"code": "model_not_found", "message": "no", "line": 9}


def test_failed_request_is_an_error_record():
    failed = replace(FINISHED, finish_reason=FinishReason.ERROR, error="layer 0 is not finite")
    record = json.loads(FORMAT.format_result(row(), failed))
    assert record["error"] == {"message": "layer 0 is not finite", "type": "server_error"}


def test_half_a_surrogate_pair_can_be_written():
    line = FORMAT.format_error(row(), RowError(message="got '\ud800'"))
    assert json.loads(line.encode())["error"]["message"] == "got '\ud800'"


def write(path, *lines, tail=""):
    path.write_text("".join(f"{line}\n" for line in lines) + tail)
    return path


def test_recovery_finds_done_rows_and_the_torn_line(tmp_path):
    answer = FORMAT.format_result(row(RowStyle.CHAT, custom_id="c"), FINISHED)
    error = FORMAT.format_error(replace(row(), index=0), RowError(message="bad"))
    path = write(tmp_path / "out", answer, error, tail='{"index": 1, "te')
    found = recover_output(path, num_rows=4)
    assert found.done == {0, 3}
    assert found.num_errors == 1
    assert found.torn_bytes == len('{"index": 1, "te')
    assert found.whole_bytes == path.stat().st_size - found.torn_bytes


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (['{"index": 0}', '{"index": 0}'], "line 2 of .*: row 0 appears twice"),
        (['{"index": 4}'], "line 1 of .*: row 4 is not one of 4 rows"),
        (["hello"], "line 1 of .* is not a result of this job"),
        (['{"id": "other"}'], "line 1 of .* is not a result of this job"),
        (["[]"], "line 1 of .* is not a result of this job"),
    ],
)
def test_foreign_output_is_refused(tmp_path, lines, message):
    with pytest.raises(StorageError, match=message):
        recover_output(write(tmp_path / "out", *lines), num_rows=4)
