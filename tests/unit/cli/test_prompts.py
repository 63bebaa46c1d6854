from tests.helpers.scripted_model import write_scripted_model
from zeroinfer.cli.prompts import BUILT_IN_PROMPTS, read_built_in
from zeroinfer.engine import PromptReader, SamplingParams
from zeroinfer.jobs import InputReader
from zeroinfer.tokenization import Tokenizer


def rows_of(tokenizer):
    reader = InputReader(prompts=PromptReader(tokenizer=tokenizer), defaults=SamplingParams())
    rows = read_built_in(reader, tokenizer).rows
    assert len(rows) == len(BUILT_IN_PROMPTS)
    assert all(row.error is None for row in rows)
    return rows


def test_prompts_are_chats_where_there_is_a_template(tmp_path):
    template = "<s>{{ messages[0]['content'] }}"
    write_scripted_model(tmp_path, chat_template=template)
    tokenizer = Tokenizer.open(tmp_path)
    ids = rows_of(tokenizer)[0].prompt_token_ids
    assert list(ids) == tokenizer.encode(f"<s>{BUILT_IN_PROMPTS[0]}", add_special_tokens=False)


def test_prompts_are_plain_without_a_template(tmp_path):
    write_scripted_model(tmp_path)
    tokenizer = Tokenizer.open(tmp_path)
    assert list(rows_of(tokenizer)[0].prompt_token_ids) == tokenizer.encode(BUILT_IN_PROMPTS[0])


def test_without_a_tokenizer_rows_are_ids():
    assert [list(row.prompt_token_ids) for row in rows_of(None)] == [[1]] * len(BUILT_IN_PROMPTS)
