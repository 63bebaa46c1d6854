"""The state of one request: its tokens, how many are computed, its text and its end."""

from zeroinfer.engine.request import FinishedRequest, FinishReason, Request
from zeroinfer.tokenization import TextStream, Tokenizer

__all__ = ["Sequence"]


class Sequence:
    """Tokens of a request: the prompt, then what was generated.

    All tokens but the last sampled one have their KV computed once the sequence decodes; a resumed
    one begins with generated tokens whose KV is still to be rebuilt.
    """

    def __init__(
        self,
        request: Request,
        *,
        tokenizer: Tokenizer | None,
        eos_token_ids: frozenset[int],
        max_model_len: int,
    ) -> None:
        self.request = request
        self.token_ids = [*request.prompt_token_ids]
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.num_computed_tokens = 0
        self.block_table: tuple[int, ...] = ()
        self.max_total_tokens = min(
            self.num_prompt_tokens + request.sampling.max_tokens, max_model_len
        )
        self.num_rebuilt_tokens = len(request.generated_token_ids)
        self.finish_reason: FinishReason | None = None
        self.error: str | None = None
        self._eos_token_ids = frozenset() if request.sampling.ignore_eos else eos_token_ids
        self._text = TextStream(tokenizer, request.sampling.stop) if tokenizer is not None else None
        for token_id in request.generated_token_ids:
            self.append(token_id)

    @property
    def num_uncomputed_tokens(self) -> int:
        """Known tokens that have no KV yet; 1 in decode."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def num_generated_tokens(self) -> int:
        """Tokens after the prompt."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def is_finished(self) -> bool:
        """Whether the sequence has ended."""
        return self.finish_reason is not None

    @property
    def may_need_another_step(self) -> bool:
        """Whether tokens may remain after the next one is sampled."""
        return len(self.token_ids) + 1 < self.max_total_tokens or self.num_uncomputed_tokens > 1

    def append(self, token_id: int) -> None:
        """Add a generated token and see whether it ends the sequence."""
        if self.is_finished:
            return
        self.token_ids.append(token_id)
        if token_id in self._eos_token_ids:
            self.finish_reason = FinishReason.STOP
            return
        if self._text is not None:
            self._text.push(token_id)
            if self._text.is_stopped:
                self.finish_reason = FinishReason.STOP
                return
        if len(self.token_ids) >= self.max_total_tokens:
            self.finish_reason = FinishReason.LENGTH

    def fail(self, error: str) -> None:
        """End the sequence with an error of its own; the others go on."""
        self.finish_reason = FinishReason.ERROR
        self.error = error

    def to_finished(self) -> FinishedRequest:
        """Return the result; called once, after the end."""
        assert self.finish_reason is not None, f"request {self.request.request_id} still runs"
        if self._text is not None:
            self._text.finish()
        return FinishedRequest(
            request_id=self.request.request_id,
            token_ids=tuple(self.token_ids[self.num_prompt_tokens :]),
            text=self._text.text if self._text is not None else None,
            finish_reason=self.finish_reason,
            num_prompt_tokens=self.num_prompt_tokens,
            error=self.error,
        )
