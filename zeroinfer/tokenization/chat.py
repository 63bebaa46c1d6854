"""Chat templates: messages to the text of a prompt, as transformers renders them.

A template is a program that came with a model, so it runs in Jinja's sandbox and whatever it
raises becomes an error of the one row that used it. Jinja itself is loaded with the first chat.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, NoReturn

from zeroinfer.errors import RequestError

if TYPE_CHECKING:
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

__all__ = ["ChatTemplate"]

_TEMPLATE_FAULTS = (
    ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError,
)  # fmt: skip


class ChatTemplate:
    """The chat template of one model, compiled when first used."""

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        """Keep the sources.

        Args:
            templates: source by name; `default` is the one used, or the only one there is.
            special_tokens: what the template sees as `bos_token`, `eos_token` and so on.
        """
        self._templates = templates
        self._special_tokens = special_tokens
        self._compiled: jinja2.Template | None = None

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Return the prompt text, ending where the model is to answer.

        Raises:
            RequestError: no template, messages of the wrong form, or the template refuses them.
        """
        import jinja2  # noqa: PLC0415

        plain = _plain_messages(messages)
        try:
            if self._compiled is None:
                self._compiled = _environment().from_string(self._source())
            return self._compiled.render(
                messages=plain,
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self._special_tokens,
            )
        except RequestError:
            raise
        except (jinja2.TemplateError, *_TEMPLATE_FAULTS) as error:
            raise RequestError(
                f"the chat template of the model refuses these messages: "
                f"{error or type(error).__name__}; change them or use prompt instead of messages"
            ) from error

    def _source(self) -> str:
        if not self._templates:
            raise RequestError(
                "messages cannot be rendered: the model folder has no chat template; "
                "use prompt instead of messages"
            )
        if "default" in self._templates:
            return self._templates["default"]
        if len(self._templates) == 1:
            return next(iter(self._templates.values()))
        names = ", ".join(sorted(self._templates))
        raise RequestError(
            f"messages cannot be rendered: got the chat templates {names}, need one called "
            "default; use prompt instead of messages"
        )


def _plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Check the form and flatten text parts; keys set to null are left out as if never given."""
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        got = "an empty list" if isinstance(messages, list) else type(messages).__name__
        raise RequestError(f"messages is not a chat: got {got}, need a list of role and content")
    return [_plain_message(message, idx) for idx, message in enumerate(messages)]


def _plain_message(message: Any, idx: int) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        kind = type(message).__name__
        raise RequestError(f"messages[{idx}] is no message: got {kind}, need role and content")
    if not isinstance(message.get("role"), str):
        raise RequestError(
            f"messages[{idx}] has no role: got {message.get('role')!r}, need a string such as user"
        )
    plain = {key: value for key, value in message.items() if value is not None}
    if "content" in plain:
        plain["content"] = _plain_content(plain["content"], idx)
    return plain


def _plain_content(content: Any, idx: int) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        kind = type(content).__name__
        raise RequestError(
            f"messages[{idx}].content is no text: got {kind}, need a string or text parts"
        )
    return "".join(_text_of_part(part, idx) for part in content)


def _text_of_part(part: Any, idx: int) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if kind != "text":
        raise RequestError(
            f"messages[{idx}].content holds a part of type {kind}: need text parts only; remove it"
        )
    text = part.get("text")
    if not isinstance(text, str):
        raise RequestError(f"messages[{idx}].content: got a text part without text, need a string")
    return text


def _environment() -> "ImmutableSandboxedEnvironment":
    """Build the environment that templates of the hub are written for.

    Source: transformers, utils/chat_template_utils.py.
    """
    from jinja2 import nodes  # noqa: PLC0415
    from jinja2.ext import Extension, loopcontrols  # noqa: PLC0415
    from jinja2.sandbox import ImmutableSandboxedEnvironment  # noqa: PLC0415

    class GenerationBlock(Extension):
        """Accept `{% generation %}`, which marks training targets, as a plain block."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> nodes.Node:
            lineno = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body).set_lineno(lineno)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which no model was trained on.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise RequestError(f"the chat template of the model refuses these messages: {message}")


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
