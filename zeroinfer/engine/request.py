"""What a user asked, how its tokens are chosen, and what comes back; plain data.

A request is identified by the caller's `request_id`. Text is the tokenizer's business: a request
carries token ids, and a finished one carries ids and, where a tokenizer is there, text.
"""

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from zeroinfer.errors import RequestError
from zeroinfer.fields import read_bool, read_int, read_number, read_text, wrong_type

__all__ = [
    "MAX_SEED",
    "FinishReason",
    "FinishedRequest",
    "Request",
    "SamplingParams",
    "StepInterrupted",
    "StepOutput",
    "StepStats",
    "Workload",
]

MAX_SEED = 2**63 - 1


class FinishReason(enum.Enum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    ERROR = "error"


class StepInterrupted(Exception):  # noqa: N818 - an outcome that the caller asked for, no error
    """A step ended early because `request_stop` was called; no token of it counts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How the next token of one request is chosen."""

    max_tokens: int = 256
    """Most new tokens of the request."""
    temperature: float = 0.0
    """0 is greedy; otherwise logits are divided by it."""
    top_k: int = 0
    """Keep the k likeliest tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probabilities sum to at least this."""
    seed: int = 0
    """Seed of this request alone; its batch mates never change its tokens."""
    stop: Sequence[str] = ()
    """Strings that end the text, or one string; the text is cut exactly before the first found.
    Kept as a tuple."""
    ignore_eos: bool = False
    """Go on to max_tokens whatever end token comes."""

    def __post_init__(self) -> None:
        """Check types and ranges.

        Raises:
            RequestError: a value has the wrong type or is out of range.
        """
        for name, read in _FIELD_READERS:
            read(name, getattr(self, name))
        checks = (
            ("max_tokens", self.max_tokens, self.max_tokens >= 1, "at least 1"),
            ("temperature", self.temperature, 0 <= self.temperature <= 100, "0 to 100"),
            ("top_k", self.top_k, self.top_k >= 0, "0 or more"),
            ("top_p", self.top_p, 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("seed", self.seed, 0 <= self.seed <= MAX_SEED, f"0 to {MAX_SEED}"),
        )
        for name, value, is_valid, need in checks:
            if not is_valid:
                raise RequestError(f"{name} is out of range: got {value}, need {need}")
        stop = _read_stop(self.stop)
        object.__setattr__(self, "stop", stop)
        for idx, text in enumerate(stop):
            if not read_text(f"stop[{idx}]", text):
                raise RequestError("stop holds an empty string; remove it")


def _read_stop(value: object) -> tuple[Any, ...]:
    """Return one string or several as a tuple whose entries are still to be checked."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, Iterable) or isinstance(value, Mapping):
        raise wrong_type("stop", value, "a string or a list of strings")
    return tuple(value)


_FIELD_READERS: tuple[tuple[str, Callable[[str, object], object]], ...] = (
    ("max_tokens", read_int),
    ("temperature", read_number),
    ("top_k", read_int),
    ("top_p", read_number),
    ("seed", read_int),
    ("ignore_eos", read_bool),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One prompt with its sampling, ready for the engine."""

    request_id: int
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    generated_token_ids: tuple[int, ...] = ()
    """Tokens of an interrupted run; the engine rebuilds their KV and goes on after them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedRequest:
    """The end of a request; `error` is set exactly when the reason is ERROR."""

    request_id: int
    token_ids: tuple[int, ...]
    text: str | None
    """None when the model folder has no tokenizer."""
    finish_reason: FinishReason
    num_prompt_tokens: int
    error: str | None = None

    @property
    def usage(self) -> dict[str, int]:
        """Counts of tokens, by the names of OpenAI's protocol."""
        num_generated = len(self.token_ids)
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": num_generated,
            "total_tokens": self.num_prompt_tokens + num_generated,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class StepStats:
    """Measurements of one step; seconds and bytes."""

    wall_s: float
    num_tokens: int
    num_seqs: int
    nvme_bytes: int
    fetch_wait_s: float
    compute_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class StepOutput:
    """What one step brought."""

    new_token_ids: dict[int, int]
    """request_id -> the token it gained; rows still in prefill are absent."""
    finished: tuple[FinishedRequest, ...]
    stats: StepStats


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """What the planner needs to know of a job before it runs."""

    num_requests: int = 1
    max_prompt_tokens: int = 512
    total_prompt_tokens: int = 512
    max_new_tokens: int = 256
    """Largest max_tokens over the requests."""

    @classmethod
    def of(cls, sizes: Iterable[tuple[int, int]]) -> "Workload | None":
        """Sum up requests by the tokens of their prompts and their max_tokens; None of none."""
        requests = list(sizes)
        if not requests:
            return None
        prompts = [num_tokens for num_tokens, _ in requests]
        return cls(
            num_requests=len(requests),
            max_prompt_tokens=max(prompts),
            total_prompt_tokens=sum(prompts),
            max_new_tokens=max(max_tokens for _, max_tokens in requests),
        )

    def covers(self, other: "Workload") -> bool:
        """Whether a plan for this work has room for another: no more requests, none longer."""
        return (
            other.num_requests <= self.num_requests
            and other.max_prompt_tokens <= self.max_prompt_tokens
            and other.total_prompt_tokens <= self.total_prompt_tokens
            and other.max_new_tokens <= self.max_new_tokens
        )
