import pytest
from transformers import PreTrainedTokenizerFast

from tests.helpers.tokenizers import SPECIAL_TOKENS, s_tok, write_tokenizer
from zeroinfer.errors import RequestError
from zeroinfer.tokenization import Tokenizer
from zeroinfer.tokenization.chat import ChatTemplate

CHATML = """\
{% for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message.content | trim + '<|im_end|>' + '\\n' }}
{% endfor %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant\\n' }}
{% endif %}
"""
INST = """\
{%- if messages[0].role == 'system' %}{% set system = messages[0].content %}
{%- set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif %}
{{- bos_token }}
{%- for m in rest %}
    {%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate') }}
    {%- endif %}
    {%- if m.role == 'user' %}
        {{- '[INST] ' + (system ~ '\\n\\n' if system is defined and loop.first else '') }}
        {{- m.content + ' [/INST]' }}
    {%- else %}{% generation %}{{ ' ' + m.content + eos_token }}{% endgeneration %}{% endif %}
{%- endfor %}
"""
ODD = """\
{%- set ns = namespace(n=0) -%}
{% for m in messages %}{% if m.name is defined %}{% continue %}{% endif -%}
{% set ns.n = ns.n + 1 %}{{ ns.n }}: {{ m | tojson }}
{{ {'b': [1, '<\u00e9>'], 'a': none} | tojson(indent=2) }}
{% if not loop.last %}{% else %}{% break %}{% endif %}{% endfor %}
{{ tools is none }} {{ documents is none }} {{ mask_token }}|{{ strftime_now('%Y') | length }}
"""
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "  h\u00e9 <b> \U0001f600 "},
    {"role": "assistant", "content": "ok", "tool_calls": None},
    {"role": "user", "content": "more"},
]


def render(template, messages, **special_tokens):
    return ChatTemplate({"default": template}, special_tokens).render(messages)


@pytest.mark.parametrize("template", [CHATML, INST, ODD])
def test_text_and_ids_equal_transformers(tmp_path, template):
    oracle = PreTrainedTokenizerFast(tokenizer_object=s_tok(begin=True), **SPECIAL_TOKENS)
    expected = oracle.apply_chat_template(
        CHAT, chat_template=template, tokenize=False, add_generation_prompt=True
    )
    assert render(template, CHAT, **SPECIAL_TOKENS) == expected
    tokenizer = Tokenizer.open(write_tokenizer(tmp_path, begin=True, chat_template=template))
    ids = oracle.apply_chat_template(
        CHAT, chat_template=template, add_generation_prompt=True, return_dict=False
    )
    assert tokenizer.encode_chat(CHAT) == ids


def test_text_parts_are_joined():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "user", "content": parts}]
    assert render("{{ messages[0].content }}", messages) == "ab"


def test_a_message_without_content_is_left_to_the_template():
    messages = [{"role": "assistant", "content": None, "tool_calls": [{"id": "x"}]}]
    template = "{{ messages[0].tool_calls[0].id }}{{ messages[0].content is defined }}"
    assert render(template, messages) == "xFalse"


def test_a_single_named_template_is_used():
    assert ChatTemplate({"only": "x"}, {}).render(CHAT) == "x"


def test_no_template_says_to_use_prompt():
    with pytest.raises(RequestError, match=r"no chat template; use prompt"):
        ChatTemplate({}, {}).render(CHAT)


def test_several_templates_without_a_default_are_named():
    with pytest.raises(RequestError, match=r"got the chat templates a, b, need one called default"):
        ChatTemplate({"b": "", "a": ""}, {}).render(CHAT)


def test_the_reason_a_template_gives_is_told():
    with pytest.raises(RequestError, match="refuses these messages: roles must alternate"):
        render(INST, [CHAT[1], CHAT[1]], **SPECIAL_TOKENS)


@pytest.mark.parametrize(
    "template",
    [
        "{% for %}",
        "{{ messages[0].content + 1 }}",
        "{{ messages[9].content }}",
        "{{ 1 / 0 }}",
        "{{ undefined_function() }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
    ],
)
def test_whatever_a_template_raises_is_an_error_of_its_row(template):
    with pytest.raises(RequestError, match="chat template of the model refuses these messages"):
        render(template, CHAT)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "got an empty list"),
        ("hi", "got str, need a list"),
        ({"role": "user"}, "got dict, need a list"),
        (None, "got NoneType, need a list"),
        (["hi"], r"messages\[0\] is no message: got str"),
        ([{"content": "hi"}], r"messages\[0\] has no role: got None"),
        ([{"role": "user", "content": 3}], r"messages\[0\]\.content is no text: got int"),
        ([{"role": "user", "content": ["hi"]}], r"a part of type str"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "a part of type image_url"),
        ([{"role": "user", "content": [{"type": "text"}]}], "a text part without text"),
    ],
)
def test_messages_of_another_form_are_refused(messages, message):
    with pytest.raises(RequestError, match=message):
        render(CHATML, messages)
