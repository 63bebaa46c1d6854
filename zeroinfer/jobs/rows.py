"""What a job is made of: rows, their errors, and the totals the planner asks for.

A row keeps its prompt as unsigned 32-bit ids (4 bytes a token; a tuple of Python integers costs
36), so that jobs of a hundred thousand prompts stay small. The request is built when it is added.
"""

import enum
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from zeroinfer.engine import Request, SamplingParams, Workload

__all__ = ["JobInput", "Row", "RowError", "RowStyle"]


class RowStyle(enum.Enum):
    """Which form a row came in; its answer leaves in the same form."""

    PLAIN = "plain"
    COMPLETION = "completion"
    CHAT = "chat"

    @property
    def is_openai(self) -> bool:
        """Whether the row is a line of an OpenAI batch file."""
        return self is not RowStyle.PLAIN


@dataclass(frozen=True, kw_only=True, slots=True)
class RowError:
    """Why a row has no answer."""

    message: str
    type: str = "invalid_request_error"
    status_code: int = 400


def _no_tokens() -> "array[int]":
    return array("I")


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One line of the input: a prompt with its sampling, or the error that it is."""

    index: int
    """Position among the rows, from 0; blank lines do not count."""
    line: int
    """Line of the input file, from 1; blank lines count."""
    style: RowStyle = RowStyle.PLAIN
    custom_id: str | None = None
    model: str | None = None
    """The model name of an OpenAI line, given back in its answer."""
    prompt_token_ids: "array[int]" = field(default_factory=_no_tokens)
    sampling: SamplingParams = field(default_factory=SamplingParams)
    error: RowError | None = None

    def to_request(self, generated_token_ids: Sequence[int] = ()) -> Request:
        """Build the engine's request; `generated_token_ids` are those of an interrupted run."""
        return Request(
            request_id=self.index,
            prompt_token_ids=tuple(self.prompt_token_ids),
            sampling=self.sampling,
            generated_token_ids=tuple(generated_token_ids),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class JobInput:
    """All rows of a job and the hash of the bytes they came from."""

    rows: tuple[Row, ...]
    sha256: str

    def workload(self) -> Workload | None:
        """Sum up the rows that can run, for the planner; None when there are none."""
        return Workload.of(
            (len(row.prompt_token_ids), row.sampling.max_tokens)
            for row in self.rows
            if row.error is None
        )
