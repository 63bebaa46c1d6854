"""Requests, scheduler, model runner, sampler, the step loop."""

from typing import TYPE_CHECKING, Any

from zeroinfer.engine.request import (
    FinishedRequest,
    FinishReason,
    Request,
    SamplingParams,
    StepInterrupted,
    StepOutput,
    StepStats,
    Workload,
)

if TYPE_CHECKING:
    from zeroinfer.engine.engine import Engine, make_plan

__all__ = [
    "Engine",
    "FinishReason",
    "FinishedRequest",
    "Request",
    "SamplingParams",
    "StepInterrupted",
    "StepOutput",
    "StepStats",
    "Workload",
    "make_plan",
]

_HEAVY = {
    "Engine": "zeroinfer.engine.engine",
    "make_plan": "zeroinfer.engine.engine",
}


def __getattr__(name: str) -> Any:
    """Resolve what needs torch on first use, so that jobs and the command line start at once."""
    if name in _HEAVY:
        from importlib import import_module

        return getattr(import_module(_HEAVY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
