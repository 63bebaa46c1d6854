"""``bench``: load seconds and milliseconds per token for growing batches.

The figure is wall time over batch times tokens, prompts included, as in public tables of batch
scripts. A batch that the plan refuses shows OOM; nothing ever runs out in the middle.
"""

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from zeroinfer.cli.command import make_command
from zeroinfer.cli.console import Output, StatusLine
from zeroinfer.cli.model import OpenedModel, open_model
from zeroinfer.cli.options import EngineOptions
from zeroinfer.errors import CapacityError, ConfigError, RequestError

if TYPE_CHECKING:
    from zeroinfer.engine import Engine, Request

__all__ = ["BenchOptions", "BenchRow", "command", "run"]


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchOptions(EngineOptions):
    """Shape of the measured work."""

    batch_sizes: Annotated[
        str,
        typer.Option("--batch-sizes", metavar="N,N,...", help="Rows of each measured batch."),
    ] = "1,8,32,128,512"
    prompt_tokens: Annotated[
        int, typer.Option("--prompt-tokens", metavar="N", help="Tokens of each prompt.", min=1)
    ] = 32
    tokens: Annotated[
        int, typer.Option("--tokens", metavar="N", help="New tokens of each row.", min=1)
    ] = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchRow:
    """One measured batch; figures are None where it does not fit."""

    batch_size: int
    load_s: float | None = None
    """From planning to the end of the first layer."""
    wall_s: float | None = None
    ms_per_token: float | None = None
    tokens_per_s: float | None = None
    nvme_gb_s: float | None = None
    oom: str | None = None
    """Why it does not fit."""


def run(options: BenchOptions) -> int:
    """Measure each batch in an engine of its own and print a table."""
    batch_sizes = _parse_batch_sizes(options.batch_sizes)
    output = Output(is_json=options.json_output)
    opened = open_model(options)
    status = StatusLine()
    rows = []
    for batch_size in batch_sizes:
        row = _measure(opened, options, batch_size, status)
        rows.append(row)
        output.event("batch", _to_dict(row))
    status.close()
    if not options.json_output:
        Console(highlight=False).print(_render(rows, options))
    return 0


command = make_command(BenchOptions, run)


def _parse_batch_sizes(text: str) -> list[int]:
    sizes = [int(word) if word.strip().isdecimal() else 0 for word in text.split(",")]
    if min(sizes) < 1:
        raise ConfigError(
            f"--batch-sizes is not understood: got {text!r}, need whole numbers from 1 up, such "
            "as 1,8,32"
        )
    return sizes


def _measure(
    opened: OpenedModel, options: BenchOptions, batch_size: int, status: StatusLine
) -> BenchRow:
    from zeroinfer.engine import Engine, Workload

    workload = Workload(
        num_requests=batch_size,
        max_prompt_tokens=options.prompt_tokens,
        total_prompt_tokens=options.prompt_tokens * batch_size,
        max_new_tokens=options.tokens,
    )
    scheduler = opened.config.scheduler.model_copy(update={"max_num_seqs": batch_size})
    config = opened.config.model_copy(update={"scheduler": scheduler})
    try:
        with Engine.open(
            config, checkpoint=opened.checkpoint, tokenizer=None, workload=workload
        ) as engine:
            _check_length(options, engine.max_model_len)
            wall_s = _run_batch(engine, _requests(opened, options, batch_size), status)
            report = engine.report()
    except CapacityError as error:
        return BenchRow(batch_size=batch_size, oom=str(error).splitlines()[0])
    num_tokens = batch_size * options.tokens
    return BenchRow(
        batch_size=batch_size,
        load_s=report["totals"]["load_s"],
        wall_s=wall_s,
        ms_per_token=wall_s / num_tokens * 1e3,
        tokens_per_s=num_tokens / wall_s,
        nvme_gb_s=report["io"]["nvme"]["bytes_read"] / wall_s / 1e9,
    )


def _check_length(options: BenchOptions, max_model_len: int) -> None:
    """Refuse rows that would end at the model's window: fewer tokens than are counted."""
    num_tokens = options.prompt_tokens + options.tokens
    if num_tokens > max_model_len:
        raise ConfigError(
            f"--prompt-tokens and --tokens do not fit the model: got {num_tokens}, need at most "
            f"the {max_model_len} of its window; lower them"
        )


def _requests(opened: OpenedModel, options: BenchOptions, batch_size: int) -> "list[Request]":
    """Make rows of random tokens that run to their full length."""
    from zeroinfer.engine import Request, SamplingParams
    from zeroinfer.models import build_model

    vocab_size = build_model(opened.checkpoint.config).vocab_size
    chance = random.Random(0)
    sampling = SamplingParams(max_tokens=options.tokens, ignore_eos=True)
    return [
        Request(
            request_id=row_idx,
            prompt_token_ids=tuple(chance.choices(range(vocab_size), k=options.prompt_tokens)),
            sampling=sampling,
        )
        for row_idx in range(batch_size)
    ]


def _run_batch(engine: "Engine", requests: "Sequence[Request]", status: StatusLine) -> float:
    start_s = time.perf_counter()
    for request in requests:
        try:
            engine.add_request(request)
        except RequestError as error:
            raise ConfigError(
                f"--prompt-tokens and --tokens do not fit the model: {error}"
            ) from error
    num_steps = 0
    while engine.has_unfinished_requests():
        engine.step()
        num_steps += 1
        text = f"batch {len(requests)}: {num_steps} steps"
        status.show(lambda text=text: text)  # type: ignore[misc]
    return time.perf_counter() - start_s


def _to_dict(row: BenchRow) -> Mapping[str, Any]:
    return {name: getattr(row, name) for name in BenchRow.__dataclass_fields__}


def _render(rows: Sequence[BenchRow], options: BenchOptions) -> Table:
    table = Table(
        "batch", "load s", "ms/token", "tokens/s", "GB/s from nvme",
        title=f"{options.prompt_tokens} prompt tokens, {options.tokens} new tokens",
    )  # fmt: skip
    for row in rows:
        if row.oom is not None:
            table.add_row(str(row.batch_size), "-", "OOM", "-", "-")
            continue
        figures = (row.load_s, row.ms_per_token, row.tokens_per_s, row.nvme_gb_s)
        table.add_row(str(row.batch_size), *(f"{value or 0:.2f}" for value in figures))
    return table
