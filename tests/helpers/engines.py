"""Engines over a folder: opened with overrides, run to the end, every logit kept."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from zeroinfer.config import load_config
from zeroinfer.diskformat import open_checkpoint
from zeroinfer.engine import (
    Engine,
    FinishedRequest,
    Request,
    SamplingParams,
    StepStats,
    Workload,
    make_plan,
)
from zeroinfer.planner import Plan
from zeroinfer.tokenization import Tokenizer

DEFAULTS = {
    "offload.dram": "8GiB",
    "offload.debug_poison": "true",
    "compute.batch_invariant": "off",
    "compute.num_threads": 1,
}
"""A budget that does not follow the machine, released weights that turn into NaN, and one thread:
tiny products gain nothing from two, and lose much when cores are shared."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """What came out of rows that ran together; lists follow the order of the requests."""

    plan: Plan
    finished: list[FinishedRequest]
    logits: list[torch.Tensor]
    """(steps, vocabulary) of each row, a row's first from its last prompt token."""
    steps: list[StepStats]
    report: dict
    num_hits: int
    num_acquired: int

    @property
    def ids(self) -> list[list[int]]:
        """Generated ids of each row."""
        return [list(request.token_ids) for request in self.finished]


def engine_config(settings: Mapping[str, object] = {}):
    """Return an EngineConfig from `DEFAULTS` and overrides such as {"offload.weights": "nvme"}."""
    merged = {**DEFAULTS, **settings}
    return load_config(None, [f"{key}={value}" for key, value in merged.items()])


def workload_of(requests: Sequence[Request]) -> Workload:
    """Return the sizes of a job with these requests."""
    lengths = [len(request.prompt_token_ids) for request in requests]
    return Workload(
        num_requests=len(requests),
        max_prompt_tokens=max(lengths),
        total_prompt_tokens=sum(lengths),
        max_new_tokens=max(request.sampling.max_tokens for request in requests),
    )


def greedy_requests(rows: Sequence[Sequence[int]], *, max_tokens: int = 24) -> list[Request]:
    """Return greedy requests without an end, numbered from 0."""
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return [
        Request(request_id=idx, prompt_token_ids=tuple(row), sampling=sampling)
        for idx, row in enumerate(rows)
    ]


def plan_of(
    folder, requests: Sequence[Request], settings: Mapping[str, object] = {}, *, device=None
) -> Plan:
    """Return the plan alone."""
    checkpoint = open_checkpoint(folder)
    return make_plan(engine_config(settings), checkpoint, workload_of(requests), device=device)


def half_resident(folder, requests: Sequence[Request], *, fetch_unit_bytes: int) -> dict[str, int]:
    """Return settings under which about half of the weights stay in memory."""
    cut = {"offload.fetch_unit_bytes": fetch_unit_bytes}
    plan = plan_of(folder, requests, cut)
    stages = [plan.footprints[unit.unit_idx] for unit in plan.units if not unit.is_gathered]
    wanted = min(sum(stages) // 2 + max(stages), sum(stages) - min(filter(None, stages)))
    return {**cut, "offload.dram_weights": wanted}


@contextmanager
def open_engine(
    folder,
    requests: Sequence[Request],
    settings: Mapping[str, object] = {},
    *,
    reader=None,
    device=None,
    has_tokenizer: bool = False,
):
    """Open an engine on a folder for a job of these requests; none is added yet."""
    with Engine.open(
        engine_config(settings),
        checkpoint=open_checkpoint(folder),
        tokenizer=Tokenizer.open(folder) if has_tokenizer else None,
        workload=workload_of(requests),
        reader=reader,
        device=device,
    ) as engine:
        yield engine


def run_requests(
    folder,
    requests: Sequence[Request],
    settings: Mapping[str, object] = {},
    **kwargs,
) -> Run:
    """Run all requests to their end and keep what every step brought."""
    with open_engine(folder, requests, settings, **kwargs) as engine:
        return drive(engine, requests)


def run_rows(
    folder,
    rows: Sequence[Sequence[int]],
    settings: Mapping[str, object] = {},
    *,
    max_tokens: int = 24,
    **kwargs,
) -> Run:
    """Run prompts greedily to `max_tokens` each."""
    return run_requests(folder, greedy_requests(rows, max_tokens=max_tokens), settings, **kwargs)


def drive(engine: Engine, requests: Sequence[Request]) -> Run:
    """Add requests to an open engine and step until all have ended."""
    logits: dict[int, list[torch.Tensor]] = defaultdict(list)
    engine.on_logits = lambda request_id, row: logits[request_id].append(row.clone())
    for request in requests:
        engine.add_request(request)
    finished: dict[int, FinishedRequest] = {}
    steps: list[StepStats] = []
    while engine.has_unfinished_requests():
        output = engine.step()
        steps.append(output.stats)
        finished |= {request.request_id: request for request in output.finished}
    order = [request.request_id for request in requests]
    fetch = engine._streaming.fetch
    return Run(
        plan=engine.plan,
        finished=[finished[request_id] for request_id in order],
        logits=[torch.stack(logits[request_id]) for request_id in order if logits[request_id]],
        steps=steps,
        report=engine.report(),
        num_hits=fetch.num_hits,
        num_acquired=fetch.num_acquired,
    )


def stop_after(engine: Engine, num_units: int) -> list[int]:
    """Make a stop come in once this many more units have been computed; returns a 1 for each."""
    account, seen = engine._loop._account, []

    def count(*args):
        account(*args)
        seen.append(1)
        if len(seen) == num_units:
            engine.request_stop()

    engine._loop._account = count
    return seen


def take_back_stop(engine: Engine) -> None:
    """Let an engine that was stopped go on, as no user can."""
    engine._loop.is_stop_requested = False


def assert_same_bits(run: Run, oracle: Run) -> None:
    """Compare ids and logits of all rows bit by bit."""
    assert run.ids == oracle.ids
    assert len(run.logits) == len(oracle.logits)
    for row_idx, (got, want) in enumerate(zip(run.logits, oracle.logits, strict=True)):
        assert torch.equal(got, want), f"row {row_idx} differs by {(got - want).abs().max()}"
