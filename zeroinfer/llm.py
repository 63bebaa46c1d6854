"""The offline API: a list of prompts in, answers out.

    from zeroinfer import LLM, SamplingParams

    with LLM("/models/llama-2-7b", nvme="/mnt/nvme", dram="6GiB") as llm:
        prompts = ["The sea is", [{"role": "user", "content": "Name three fruits."}]]
        for answer in llm.generate(prompts, SamplingParams(max_tokens=64)):
            print(answer.index, answer.text or answer.error)

Engine, checks and error texts are those of the command line. Opening reads headers only; the first
call plans for its prompts, and weights are read while it runs. Later calls go on with that engine
as long as they bring no more and no longer prompts, so that resident weights are read once.
"""

from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict, Unpack

from zeroinfer.closing import Closing
from zeroinfer.config import FLAG_KEYS, EngineConfig, let_idle_threads_sleep, make_config
from zeroinfer.engine import (
    FinishReason,
    OpenedModel,
    Request,
    SamplingParams,
    Workload,
    read_sampling,
    resolve_sampling,
)
from zeroinfer.errors import ConfigError, RequestError
from zeroinfer.fields import json_type, read_text, refuse_unknown_keys, wrong_type
from zeroinfer.log import get_logger
from zeroinfer.tokenization import Tokenizer

if TYPE_CHECKING:
    from zeroinfer.engine import Engine

__all__ = ["LLM", "Answer", "Flags", "Prompt"]

_LOGGER = get_logger(__name__)

Prompt: TypeAlias = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""A text, token ids, or the messages of a conversation."""


class Flags(TypedDict, total=False):
    """Settings under the names of the command line's flags; None counts as not given."""

    nvme: str | Path | Sequence[str | Path] | None
    dtype: str | None
    dram: str | int | None
    dram_weights: str | int | None
    gpu_memory: str | int | None
    weights: str | None
    prefetch_depth: str | int | None
    kv: str | None
    max_num_seqs: str | int | None
    admit: str | None
    batch_invariant: str | bool | None
    reader: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What came of one prompt; the fields are those of a line of the command line's output."""

    index: int
    """Place of the prompt in the list."""
    prompt: Prompt
    """As it was given."""
    text: str | None
    """None where the model folder has no tokenizer, and where nothing was generated."""
    token_ids: tuple[int, ...]
    finish_reason: str
    """``stop``, ``length`` or ``error``."""
    usage: Mapping[str, int]
    """prompt_tokens, completion_tokens and total_tokens."""
    error: str | None = None
    """Why the prompt could not be answered; set exactly when the reason is ``error``."""


class LLM(Closing):
    """One model, ready for lists of prompts; use it from one thread, one call at a time."""

    # The constructor opens, against the habit of this code: this is how offline APIs are called.
    def __init__(
        self,
        model: str | Path | None = None,
        *,
        config: EngineConfig | Mapping[str, Any] | str | Path | None = None,
        copy: bool = False,
        stripe: bool = False,
        **flags: Unpack[Flags],
    ) -> None:
        """Find and check the model; no weight is read.

        Args:
            model: folder or hub id; left out, that of the config, else the embedded default.
            config: settings to start from: an EngineConfig, a tree of sections, or a YAML file.
            copy: stream from a verified copy under the first nvme folder, made if need be.
            stripe: spread that copy over all nvme folders.
            flags: settings that override it, by the names of the command line's flags.

        Raises:
            ConfigError: a setting is unknown or its value refused.
            CheckpointError: the model is not there, damaged or cannot be run.
            StorageError: a folder or file cannot be used.
        """
        # Threads can be told to sleep only before torch is loaded.
        let_idle_threads_sleep()
        self.model = OpenedModel.open(
            _make_config("" if model is None else str(model), config, flags),
            is_copied=copy,
            is_striped=stripe,
        )
        """The model's files, and the settings that it runs with."""
        checkpoint = self.model.checkpoint
        self._tokenizer = Tokenizer.open(checkpoint.root)
        self._reader = self.model.prompt_reader(self._tokenizer)
        self.default_sampling = resolve_sampling(checkpoint.generation_config, user={})
        """What is used where a call brings no sampling_params: the model's generation_config."""
        self._engine: Engine | None = None
        self._planned = Workload(num_requests=0)
        self._is_running = False
        self._is_closed = False

    def generate(
        self,
        prompts: Iterable[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Answer]:
        """Answer prompts and return the answers in their order; blocks until all have ended.

        Args:
            prompts: texts, lists of token ids or lists of messages, mixed at will.
            sampling_params: for all prompts, whose seed is that of prompt 0 and grows by one from
                prompt to prompt, or one for each. None is `default_sampling`.

        Returns:
            One answer for each prompt. One that cannot run has an error instead of a text.

        Raises:
            ConfigError: the arguments do not belong together, or the LLM is closed or in use.
            CapacityError: the prompts do not fit the budget; the message says what would.
            StorageError: weights could not be read.
        """
        answers = self.stream(prompts, sampling_params)
        return sorted(answers, key=lambda answer: answer.index)

    def stream(
        self,
        prompts: Iterable[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Generator[Answer, None, None]:
        """Answer prompts and yield each answer when it is complete; see `generate`.

        An iterator that is closed or dropped before its end ends the rest; what stayed in memory is
        then given back.
        """
        if not _holds_prompts(prompts):
            raise ConfigError(
                f"prompts has the wrong type: got {json_type(prompts)}, need a list of prompts"
            )
        self._check_usable()
        rows = list(prompts)
        samplings = self._spread(sampling_params, len(rows))
        requests: list[Request] = []
        refused: list[Answer] = []
        for index, (prompt, sampling) in enumerate(zip(rows, samplings, strict=True)):
            try:
                requests.append(self._to_request(index, prompt, sampling))
            except RequestError as error:
                refused.append(_refusal(index, prompt, error))
        return self._run(rows, requests, refused)

    def report(self) -> dict[str, Any]:
        """Return what the engine did since it was planned, as ``--report``; empty before a call."""
        return self._engine.report() if self._engine is not None else {}

    def close(self) -> None:
        """Give memory and files back; idempotent."""
        self._is_closed = True
        self._close_engine()

    def _run(
        self, prompts: Sequence[Prompt], requests: Sequence[Request], refused: Sequence[Answer]
    ) -> Generator[Answer, None, None]:
        yield from refused
        sizes = ((len(item.prompt_token_ids), item.sampling.max_tokens) for item in requests)
        workload = Workload.of(sizes)
        if workload is None:
            return
        self._check_usable()
        self._is_running = True
        try:
            engine = self._engine_for(workload)
            for request in requests:
                try:
                    engine.add_request(request)
                except RequestError as error:
                    yield _refusal(request.request_id, prompts[request.request_id], error)
                    self._check_open()
            while engine.has_unfinished_requests():
                for finished in engine.step().finished:
                    yield Answer(
                        index=finished.request_id,
                        prompt=prompts[finished.request_id],
                        text=finished.text,
                        token_ids=finished.token_ids,
                        finish_reason=finished.finish_reason.value,
                        usage=finished.usage,
                        error=finished.error,
                    )
                if engine.has_unfinished_requests():
                    self._check_open()
        finally:
            self._is_running = False
            if self._engine is not None and self._engine.has_unfinished_requests():
                self._close_engine()

    def _engine_for(self, workload: Workload) -> "Engine":
        """Return the open engine if its plan has room for this work, else one planned for it."""
        from zeroinfer.engine import Engine  # noqa: PLC0415 - loads torch

        if self._engine is None or not self._planned.covers(workload):
            self._close_engine()
            self._engine = Engine.open(
                self.model.config,
                checkpoint=self.model.checkpoint,
                tokenizer=self._tokenizer,
                workload=workload,
            )
            self._planned = workload
            _LOGGER.info("%s", self._engine.plan.render())
        return self._engine

    def _close_engine(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def _spread(
        self, given: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
    ) -> list[SamplingParams]:
        """Return the sampling of each prompt."""
        if given is None or isinstance(given, SamplingParams):
            defaults = given or self.default_sampling
            return [
                read_sampling({}, defaults=defaults, row_idx=index) for index in range(num_prompts)
            ]
        own = list(given) if isinstance(given, Sequence) else [given]
        for item in own:
            if not isinstance(item, SamplingParams):
                raise ConfigError(
                    f"sampling_params has the wrong type: got {json_type(item)}, need "
                    "SamplingParams for all prompts or a list with one for each"
                )
        if len(own) != num_prompts:
            raise ConfigError(
                f"sampling_params does not match prompts: got {len(own)} for {num_prompts}, need "
                "one for each or one for all"
            )
        return own

    def _to_request(self, index: int, prompt: Prompt, sampling: SamplingParams) -> Request:
        ids = self._encode(prompt)
        sampling = self._reader.fit(ids, sampling)
        return Request(request_id=index, prompt_token_ids=tuple(ids), sampling=sampling)

    def _encode(self, prompt: Prompt) -> Sequence[int]:
        if isinstance(prompt, str):
            return self._reader.encode_text(read_text("prompt", prompt))
        if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
            raise wrong_type("prompt", prompt, "a string, token ids or messages")
        if prompt and isinstance(prompt[0], Mapping):
            return self._reader.encode_messages(prompt)
        return self._reader.check_ids("prompt", list(prompt))

    def _check_usable(self) -> None:
        self._check_open()
        if self._is_running:
            raise ConfigError(
                f"LLM of {self.model.name} is in use: got a call while a stream is not at its "
                "end, need one call at a time; finish or close the stream"
            )

    def _check_open(self) -> None:
        if self._is_closed:
            raise ConfigError(f"LLM of {self.model.name} is closed; open another")


def _make_config(
    model: str, config: EngineConfig | Mapping[str, Any] | str | Path | None, flags: Flags
) -> EngineConfig:
    try:
        refuse_unknown_keys(flags, FLAG_KEYS, where="the settings of LLM")
    except RequestError as error:
        raise ConfigError(str(error)) from error
    given: dict[str, Any] = {"model": model or None, **flags}
    return make_config(
        config, {FLAG_KEYS[name]: value for name, value in given.items() if value is not None}
    )


def _holds_prompts(value: object) -> bool:
    """Whether this is something that holds prompts, not one prompt."""
    return isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping)


def _refusal(index: int, prompt: Prompt, error: RequestError) -> Answer:
    return Answer(
        index=index,
        prompt=prompt,
        text=None,
        token_ids=(),
        finish_reason=FinishReason.ERROR.value,
        usage={"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0},
        error=str(error),
    )
