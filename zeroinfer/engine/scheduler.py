"""Who runs in the next step, and how many tokens of each; no tensors.

First come, first served. A sequence takes all the kv_blocks it can ever need when it is admitted,
so a running one is never preempted. Prompts are cut on the chunk grid only, which keeps the bits
of a prompt independent of how it was scheduled.
"""

from collections import deque
from dataclasses import dataclass

from zeroinfer.engine.sequence import Sequence
from zeroinfer.kvcache import BlockPool

__all__ = ["Scheduled", "Scheduler"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Scheduled:
    """A sequence and the number of its tokens computed in the step."""

    sequence: Sequence
    num_scheduled_tokens: int

    @property
    def has_logits(self) -> bool:
        """Whether the step computes the last known token, so that the next can be sampled."""
        return self.num_scheduled_tokens == self.sequence.num_uncomputed_tokens


class Scheduler:
    """Queues of waiting and running sequences over one block pool."""

    def __init__(
        self,
        *,
        block_pool: BlockPool,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        prompt_chunk_tokens: int,
    ) -> None:
        self._block_pool = block_pool
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._prompt_chunk_tokens = prompt_chunk_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        self.waiting.append(sequence)

    def has_unfinished(self) -> bool:
        """Whether anything waits or runs."""
        return bool(self.waiting or self.running)

    def schedule(self) -> list[Scheduled]:
        """Choose the tokens of the next step: decodes first, then prompts, then new sequences."""
        budget = self._max_num_batched_tokens
        scheduled: list[Scheduled] = []
        for sequence in sorted(self.running, key=lambda item: item.num_uncomputed_tokens > 1):
            count = self._num_tokens(sequence, budget)
            if count:
                scheduled.append(Scheduled(sequence=sequence, num_scheduled_tokens=count))
                budget -= count
        while self.waiting and (admitted := self._admit(budget)) is not None:
            scheduled.append(admitted)
            budget -= admitted.num_scheduled_tokens
        return scheduled

    def has_next_step(self, scheduled: list[Scheduled]) -> bool:
        """Whether another step is likely to follow the one that was just scheduled."""
        if self.waiting:
            return True
        return any(
            item.sequence.may_need_another_step or not item.has_logits for item in scheduled
        ) or len(scheduled) < len(self.running)

    def retire(self, sequence: Sequence) -> None:
        """Free the place and the kv_blocks of a finished sequence."""
        self.running.remove(sequence)
        self._block_pool.release(sequence.block_table)
        sequence.block_table = ()

    def _admit(self, budget: int) -> Scheduled | None:
        sequence = self.waiting[0]
        count = self._num_tokens(sequence, budget)
        has_place = len(self.running) < self._max_num_seqs
        if not count or not has_place or not self._can_allocate(sequence):
            return None
        self.waiting.popleft()
        sequence.block_table = self._block_pool.allocate(sequence.max_total_tokens)
        self.running.append(sequence)
        return Scheduled(sequence=sequence, num_scheduled_tokens=count)

    def _can_allocate(self, sequence: Sequence) -> bool:
        return self._block_pool.can_allocate(sequence.max_total_tokens)

    def _num_tokens(self, sequence: Sequence, budget: int) -> int:
        """Tokens to compute within the budget; prompt pieces end on the grid or at the prompt."""
        first = sequence.num_computed_tokens
        count = min(sequence.num_uncomputed_tokens, budget)
        if first + count >= sequence.num_prompt_tokens:
            return count
        grid = self._prompt_chunk_tokens
        return max(0, (first + count) // grid * grid - first)
