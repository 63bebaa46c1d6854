"""The engine: requests in, tokens out, one step at a time."""

import contextlib
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Self

import torch

from zeroinfer.closing import Closing
from zeroinfer.config import EngineConfig
from zeroinfer.counters import Trace, seconds_since_start
from zeroinfer.diskformat import Checkpoint
from zeroinfer.dtypes import DType
from zeroinfer.engine.batch import pack
from zeroinfer.engine.devices import open_device
from zeroinfer.engine.prepare import Prepared, compute_plan, prepare
from zeroinfer.engine.report import RunFacts, RunTotals, build_report
from zeroinfer.engine.request import (
    FinishReason,
    Request,
    StepInterrupted,
    StepOutput,
    StepStats,
    Workload,
)
from zeroinfer.engine.sampler import sample
from zeroinfer.engine.scheduler import Scheduled, Scheduler
from zeroinfer.engine.sequence import Sequence
from zeroinfer.engine.step_loop import StepLoop
from zeroinfer.engine.streaming import Streaming
from zeroinfer.errors import RequestError
from zeroinfer.kvcache import BlockPool, KVCache
from zeroinfer.layers import Frame
from zeroinfer.memory import TransferEngine
from zeroinfer.native import Reader
from zeroinfer.planner import Plan
from zeroinfer.tokenization import Tokenizer, eos_token_ids

__all__ = ["Engine", "make_plan"]

LogitsObserver = Callable[[int, torch.Tensor], None]
"""Called with a request id and the logits (vocab,) of its row, valid during the call alone."""


def make_plan(
    config: EngineConfig,
    checkpoint: Checkpoint,
    workload: Workload,
    *,
    device: TransferEngine | None = None,
) -> Plan:
    """Compute the plan of a job without allocating anything for it.

    Args:
        config: what the user set.
        checkpoint: the model's files.
        workload: sizes of the job.
        device: planned for instead of the configured one; it is closed.

    Raises:
        CapacityError: it does not fit.
        CheckpointError: the model cannot be run.
    """
    with contextlib.closing(device or open_device(config)) as device:
        return compute_plan(config, prepare(config, checkpoint, device=device), workload)


class Engine(Closing):
    """One model under one plan. Use it from one thread; `request_stop` may come from anywhere."""

    def __init__(
        self,
        *,
        config: EngineConfig,
        prepared: Prepared,
        plan: Plan,
        streaming: Streaming,
        checkpoint: Checkpoint,
        tokenizer: Tokenizer | None,
        trace: Trace,
        opened_s: float,
    ) -> None:
        self.plan = plan
        self.max_model_len = plan.max_model_len
        self.eos_token_ids = eos_token_ids(
            checkpoint.config, checkpoint.generation_config, tokenizer
        )
        self._config = config
        self._checkpoint = checkpoint
        self._prepared = prepared
        self._tokenizer = tokenizer
        self._streaming = streaming
        self._kernel = replace(prepared.kernel, is_batch_invariant=plan.is_batch_invariant)
        self._trace = trace
        self._block_pool = BlockPool(num_blocks=plan.num_kv_blocks, block_size=plan.kv_block_size)
        self._scheduler = Scheduler(
            block_pool=self._block_pool,
            max_num_seqs=plan.max_num_seqs,
            max_num_batched_tokens=plan.max_num_batched_tokens,
            prompt_chunk_tokens=config.scheduler.prompt_chunk_tokens,
        )
        self._kv = KVCache.create(
            prepared.model.kv_planes,
            num_layers=prepared.model.num_layers,
            num_blocks=plan.num_kv_blocks,
            block_size=plan.kv_block_size,
            dtype=prepared.kv_dtype,
            torch_device=prepared.device.torch_device,
        )
        self._loop = StepLoop(
            stages=prepared.model.stages,
            units=plan.units,
            fetch=streaming.fetch,
            trace=trace,
            device=prepared.device,
        )
        self.on_logits: LogitsObserver | None = None
        """Sees the logits of each row before its token is chosen."""
        self._generator = torch.Generator()
        self._finished_early: list[Sequence] = []
        self._totals = RunTotals()
        self._num_bytes_seen = 0
        self._opened_s = opened_s

    @classmethod
    def open(
        cls,
        config: EngineConfig,
        *,
        checkpoint: Checkpoint,
        tokenizer: Tokenizer | None,
        workload: Workload,
        trace: Trace | None = None,
        reader: Reader | None = None,
        device: TransferEngine | None = None,
    ) -> Self:
        """Plan, check, allocate, open the files; no weight is read yet.

        Args:
            config: what the user set.
            checkpoint: the model's files.
            tokenizer: gives texts and stop strings; None serves token ids alone.
            workload: sizes of the job, for the plan.
            trace: receives reads, waits and computations.
            reader: used instead of the configured one; the engine closes it.
            device: used instead of the configured one; the engine closes it.

        Raises:
            CapacityError: the job does not fit; the message says what would.
            CheckpointError: the model cannot be run.
            StorageError: a file or the --nvme folder cannot be used.
        """
        opened_s = time.perf_counter()
        trace = trace or Trace()
        with contextlib.ExitStack() as stack:
            device = stack.enter_context(contextlib.closing(device or open_device(config, trace)))
            prepared = prepare(config, checkpoint, device=device)
            plan = compute_plan(config, prepared, workload)
            streaming = stack.enter_context(
                Streaming.open(config, prepared, plan, trace, reader=reader)
            )
            engine = cls(
                config=config,
                prepared=prepared,
                plan=plan,
                streaming=streaming,
                checkpoint=checkpoint,
                tokenizer=tokenizer,
                trace=trace,
                opened_s=opened_s,
            )
            stack.pop_all()
        return engine

    @property
    def batch_invariant(self) -> bool:
        """Whether a row's bits are independent of its batch."""
        return self.plan.is_batch_invariant

    def add_request(self, request: Request) -> None:
        """Queue a request.

        Raises:
            RequestError: the prompt is empty, too long, holds an unknown id, or needs more KV than
                the plan has.
        """
        self._check(request)
        sequence = Sequence(
            request,
            tokenizer=self._tokenizer,
            eos_token_ids=self.eos_token_ids,
            max_model_len=self.max_model_len,
        )
        self._totals.num_requests += 1
        if sequence.is_finished:
            self._finished_early.append(sequence)
        else:
            self._scheduler.add(sequence)

    def has_unfinished_requests(self) -> bool:
        """Whether a call of `step` has anything to do."""
        return bool(self._finished_early) or self._scheduler.has_unfinished()

    @torch.inference_mode()
    def step(self) -> StepOutput:
        """Compute one pass over all layers and sample what it brings.

        Raises:
            StepInterrupted: after `request_stop`, now and in every later call; the tokens of a pass
                that was cut short are dropped.
            StorageError: weights could not be read.
            CheckpointError: a weight file was changed since it was opened.
        """
        if self._loop.is_stop_requested:
            raise StepInterrupted
        self._checkpoint.verify_unchanged()
        start_s = time.perf_counter()
        fetch = self._streaming.fetch
        before = fetch.fetch_wait_s, self._loop.compute_s
        is_queued = bool(self._scheduler.waiting)
        scheduled = self._scheduler.schedule()
        new_token_ids = self._run(scheduled) if scheduled else {}
        stats = StepStats(
            wall_s=time.perf_counter() - start_s,
            num_tokens=sum(item.num_scheduled_tokens for item in scheduled),
            num_seqs=len(scheduled),
            # Reads go on between steps; what came then belongs to the step it is for.
            nvme_bytes=self._streaming.reader.counters.bytes_read - self._num_bytes_seen,
            fetch_wait_s=fetch.fetch_wait_s - before[0],
            compute_s=self._loop.compute_s - before[1],
        )
        self._num_bytes_seen += stats.nvme_bytes
        if scheduled:
            self._totals.add_step(stats, is_queued=is_queued or bool(self._scheduler.waiting))
            self._streaming.check_moved(self.plan, num_steps=self._totals.num_steps)
        return StepOutput(new_token_ids=new_token_ids, finished=self._collect(), stats=stats)

    def request_stop(self) -> None:
        """End the current step after the fetch unit in use; safe from a signal handler."""
        self._loop.is_stop_requested = True

    def report(self) -> dict[str, Any]:
        """Return what the run did so far, in the report's schema 1."""
        prepared, plan, fetch = self._prepared, self.plan, self._streaming.fetch
        rate = prepared.profile.matmul_rate(
            prepared.dtype.short_name, prepared.product_mode, plan.max_num_seqs
        )
        facts = RunFacts(
            model=self._model_facts(),
            plan=plan,
            profile=prepared.profile,
            flops_per_row=sum(unit.flops_per_row for unit in plan.units),
            product_flops_per_s=rate,
        )
        first_stop_s = self._loop.first_layer_stop_s or self._opened_s
        times = {
            "wall_s": time.perf_counter() - self._opened_s,
            "load_s": first_stop_s - self._opened_s,
            "first_layer_s": seconds_since_start(first_stop_s),
            "compute_s": self._loop.compute_s,
            "fetch_wait_s": fetch.fetch_wait_s,
        }
        io = self._streaming.reader.counters
        return build_report(
            facts,
            self._totals,
            io=io,
            bytes_needed=fetch.bytes_needed,
            times=times,
            link=self._streaming.link,
            gpu_peak_bytes=prepared.device.peak_bytes,
        )

    def close(self) -> None:
        """Wait for reads in flight, then give files, weights and device back; idempotent.

        Keys and values go with the engine itself.
        """
        self._streaming.close()

    def _check(self, request: Request) -> None:
        ids, vocab = request.prompt_token_ids, self._prepared.model.vocab_size
        if not ids:
            raise RequestError("the prompt is empty: got 0 tokens, need at least 1")
        if len(ids) >= self.max_model_len:
            raise RequestError(
                f"the prompt is too long: got {len(ids)} tokens, need at most "
                f"{self.max_model_len - 1} so that one can be generated"
            )
        wrong = next((token for token in ids if not 0 <= token < vocab), None)
        if wrong is not None:
            raise RequestError(f"token id {wrong} is not in the vocabulary of {vocab}")
        total = min(len(ids) + request.sampling.max_tokens, self.max_model_len)
        available = min(
            self.plan.max_sequence_tokens, self.plan.num_kv_blocks * self.plan.kv_block_size
        )
        if total > available:
            raise RequestError(
                f"the request needs KV for {total} tokens, the plan has {available}; lower "
                "max_tokens, or plan for a longer sequence"
            )

    def _run(self, scheduled: list[Scheduled]) -> dict[int, int]:
        frame = Frame(
            batch=pack(scheduled, self._kernel),
            kernel=self._kernel,
            kv=self._kv,
            prompt_chunk_tokens=self._config.scheduler.prompt_chunk_tokens,
            device=self._prepared.device.torch_device,
            kernels=self._prepared.kernels,
        )
        has_next = self._scheduler.has_next_step(scheduled)
        try:
            logits = self._loop.run(frame, has_next=has_next)
        except BaseException:
            self._streaming.fetch.restart()
            raise
        with self._trace.span("compute", "sample"):
            return self._sample(scheduled, frame, logits)

    def _sample(
        self, scheduled: list[Scheduled], frame: Frame, logits: torch.Tensor
    ) -> dict[int, int]:
        is_finite = torch.isfinite(logits.sum(-1)).tolist()
        new_token_ids: dict[int, int] = {}
        row = 0
        for item in scheduled:
            sequence = item.sequence
            has_logits = item.has_logits
            self._count(item)
            sequence.num_computed_tokens += item.num_scheduled_tokens
            if not has_logits:
                continue
            if self.on_logits is not None:
                self.on_logits(sequence.request.request_id, logits[row])
            if is_finite[row]:
                token_id = sample(
                    logits[row],
                    sequence.request.sampling,
                    position=sequence.num_generated_tokens,
                    generator=self._generator,
                )
                sequence.append(token_id)
                new_token_ids[sequence.request.request_id] = token_id
            else:
                sequence.fail(self._describe_not_finite(int(frame.batch.logits_indices[row])))
            row += 1
        self._totals.num_generated_tokens += len(new_token_ids)
        return new_token_ids

    def _count(self, item: Scheduled) -> None:
        first, last = item.sequence.num_computed_tokens, item.num_scheduled_tokens
        prompt = max(0, min(item.sequence.num_prompt_tokens, first + last) - first)
        self._totals.num_prompt_tokens += prompt
        # The token whose logits are wanted would have been computed anyway.
        self._totals.num_rebuilt_tokens += max(0, last - prompt - item.has_logits)

    def _describe_not_finite(self, row: int) -> str:
        stage = self._loop.first_bad_stage(row)
        where = f"after {stage.name}" if stage is not None else "in the logits"
        dtype = self._prepared.dtype
        wider = "" if dtype is DType.F32 else "use --dtype fp32, or "
        return f"values are not finite {where} in {dtype.short_name}; {wider}check the checkpoint"

    def _collect(self) -> tuple[Any, ...]:
        ended = [sequence for sequence in self._scheduler.running if sequence.is_finished]
        for sequence in ended:
            self._scheduler.retire(sequence)
        ended, self._finished_early = [*self._finished_early, *ended], []
        self._totals.num_failed += sum(s.finish_reason is FinishReason.ERROR for s in ended)
        return tuple(sequence.to_finished() for sequence in ended)

    def _model_facts(self) -> dict[str, Any]:
        model = self._prepared.model
        return {
            "path": str(self._checkpoint.root),
            "model_type": model.model_type,
            "num_parameters": model.num_parameters,
            "weight_bytes": self._prepared.weight_bytes,
            "dtype": self._prepared.dtype.short_name,
            "quantization": "none",
        }
