"""The prompts of a run without an input file."""

import json
from collections.abc import Mapping
from typing import Any

from zeroinfer.jobs import InputReader, JobInput
from zeroinfer.tokenization import Tokenizer

__all__ = ["BUILT_IN_MAX_TOKENS", "BUILT_IN_PROMPTS", "read_built_in"]

BUILT_IN_MAX_TOKENS = 64

BUILT_IN_PROMPTS = (
    "What is the capital of France? Answer in one sentence.",
    "Write a short poem about the sea.",
    "Explain to a child why the sky is blue.",
    "Name three fruits that are red.",
    "What is 7 plus 5?",
    "Give me a recipe for pancakes in three steps.",
    "Why do we have seasons?",
    "Translate to French: Good morning, my friend.",
)


def read_built_in(reader: InputReader, tokenizer: Tokenizer | None) -> JobInput:
    """Read the built-in prompts, as chats where the model has a template.

    Without a tokenizer there is no text to read or show; then each row is one token.
    """
    lines = [json.dumps(_line(text, tokenizer)).encode() for text in BUILT_IN_PROMPTS]
    job = reader.read_jsonl(lines)
    if tokenizer is not None and any(row.error is not None for row in job.rows):
        lines = [json.dumps({"prompt": text}).encode() for text in BUILT_IN_PROMPTS]
        job = reader.read_jsonl(lines)
    return job


def _line(text: str, tokenizer: Tokenizer | None) -> Mapping[str, Any]:
    if tokenizer is None:
        return {"prompt_token_ids": [1]}
    return {"messages": [{"role": "user", "content": text}]}
