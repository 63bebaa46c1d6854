"""An engine without a model: each row's tokens follow from its prompt and seed alone.

It behaves as the facade promises: rows wait, run, end in the step that brings their last token,
and go on after the tokens of an interrupted run.
"""

import zlib
from collections.abc import Callable, Sequence
from typing import ClassVar

from zeroinfer.engine import (
    FinishedRequest,
    FinishReason,
    Request,
    StepInterrupted,
    StepOutput,
    StepStats,
)
from zeroinfer.errors import RequestError

EOS_ID = 2


class FakeEngine:
    """Runs up to `max_num_seqs` rows at a time, first come first served."""

    def __init__(
        self,
        *,
        max_num_seqs: int = 4,
        max_model_len: int = 10_000,
        on_step: Callable[[int], None] | None = None,
        failing_ids: Sequence[int] = (),
    ) -> None:
        self.max_num_seqs = max_num_seqs
        self.max_model_len = max_model_len
        self.num_steps = 0
        self.max_seen_outstanding = 0
        self.added: list[Request] = []
        self._on_step = on_step
        self._failing_ids = frozenset(failing_ids)
        self._waiting: list[Request] = []
        self._running: dict[int, tuple[Request, list[int]]] = {}
        self._is_stopping = False

    def add_request(self, request: Request) -> None:
        if len(request.prompt_token_ids) >= self.max_model_len:
            raise RequestError(
                f"prompt of {len(request.prompt_token_ids)} tokens, window {self.max_model_len}"
            )
        self.added.append(request)
        self._waiting.append(request)
        outstanding = len(self._waiting) + len(self._running)
        self.max_seen_outstanding = max(self.max_seen_outstanding, outstanding)

    def has_unfinished_requests(self) -> bool:
        return bool(self._waiting or self._running)

    def request_stop(self) -> None:
        self._is_stopping = True

    def step(self) -> StepOutput:
        if self._on_step is not None:
            self._on_step(self.num_steps)
        if self._is_stopping:
            raise StepInterrupted
        self.num_steps += 1
        while self._waiting and len(self._running) < self.max_num_seqs:
            request = self._waiting.pop(0)
            self._running[request.request_id] = (request, list(request.generated_token_ids))
        num_seqs = len(self._running)
        new_token_ids: dict[int, int] = {}
        finished: list[FinishedRequest] = []
        for request_id, (request, tokens) in list(self._running.items()):
            tokens.append(next_token(request, len(tokens)))
            new_token_ids[request_id] = tokens[-1]
            reason = self._reason(request, tokens)
            if reason is not None:
                finished.append(_finish(request, tokens, reason))
                del self._running[request_id]
        stats = StepStats(
            wall_s=0.01, num_tokens=num_seqs, num_seqs=num_seqs, nvme_bytes=10_000_000,
            fetch_wait_s=0.0, compute_s=0.0,
        )  # fmt: skip
        return StepOutput(new_token_ids=new_token_ids, finished=tuple(finished), stats=stats)

    def _reason(self, request: Request, tokens: list[int]) -> FinishReason | None:
        if request.request_id in self._failing_ids:
            return FinishReason.ERROR
        if tokens[-1] == EOS_ID and not request.sampling.ignore_eos:
            return FinishReason.STOP
        if len(tokens) >= request.sampling.max_tokens:
            return FinishReason.LENGTH
        return None


def next_token(request: Request, position: int) -> int:
    """Return token `position` of a row: about one in eight ends the row."""
    key = f"{request.prompt_token_ids} {request.sampling.seed} {position}".encode()
    value = zlib.crc32(key)
    return EOS_ID if value % 8 == 0 and position else 10 + value % 80


def expected_tokens(request: Request) -> list[int]:
    """Return all tokens of a row, as an undisturbed run makes them."""
    tokens: list[int] = []
    while not tokens or (
        len(tokens) < request.sampling.max_tokens
        and (tokens[-1] != EOS_ID or request.sampling.ignore_eos)
    ):
        tokens.append(next_token(request, len(tokens)))
    return tokens


def _finish(request: Request, tokens: list[int], reason: FinishReason) -> FinishedRequest:
    return FinishedRequest(
        request_id=request.request_id,
        token_ids=tuple(tokens),
        text=" ".join(map(str, tokens)),
        finish_reason=reason,
        num_prompt_tokens=len(request.prompt_token_ids),
        error="logits of layer 0 are not finite" if reason is FinishReason.ERROR else None,
    )


class FakePlan:
    """What the command line shows of a plan."""

    def render(self) -> str:
        return "the plan's table"

    def to_dict(self) -> dict[str, object]:
        return {"max_num_seqs": 4}


class FakeFacade(FakeEngine):
    """Stands where the command line expects the engine; remembers how it was opened."""

    opened: ClassVar[list["FakeFacade"]] = []
    plan = FakePlan()
    on_open: ClassVar[Callable[["FakeFacade"], None] | None] = None

    @classmethod
    def open(cls, config, *, checkpoint, tokenizer, workload, trace=None) -> "FakeFacade":
        facade = cls()
        facade.config, facade.checkpoint, facade.workload = config, checkpoint, workload
        facade.tokenizer, facade.trace = tokenizer, trace
        facade.batch_invariant = config.compute.batch_invariant != "off"
        cls.opened.append(facade)
        if cls.on_open is not None:
            cls.on_open(facade)
        return facade

    def __enter__(self) -> "FakeFacade":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self.is_closed = True

    def report(self) -> dict[str, object]:
        return {
            "schema": 1,
            "profile": {"nvme_read_bytes_per_s": 2e9},
            "totals": {"load_s": 0.25},
            "io": {"nvme": {"bytes_read": 3_000_000_000, "busy_s": 2.0}},
            "time": {"compute_s": 1.0, "fetch_wait_s": 2.0, "other_s": 0.5},
            "memory": {"dram_peak_bytes": 1 << 30, "dram_budget_bytes": 2 << 30},
            "roofline": {"bound_by": "nvme", "efficiency": 0.97},
        }
