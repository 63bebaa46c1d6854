"""Requests, scheduler, model runner, sampler, the step loop."""

from typing import TYPE_CHECKING, Any

from zeroinfer.engine.prompts import PromptReader, TextEncoder
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
from zeroinfer.engine.sampling import (
    SAMPLING_FIELDS,
    describe_sampling,
    read_sampling,
    resolve_sampling,
)

if TYPE_CHECKING:
    from zeroinfer.engine.engine import Engine, make_plan
    from zeroinfer.engine.opening import OpenedModel
    from zeroinfer.engine.placing import order_of_use

__all__ = [
    "SAMPLING_FIELDS",
    "Engine",
    "FinishReason",
    "FinishedRequest",
    "OpenedModel",
    "PromptReader",
    "Request",
    "SamplingParams",
    "StepInterrupted",
    "StepOutput",
    "StepStats",
    "TextEncoder",
    "Workload",
    "describe_sampling",
    "make_plan",
    "order_of_use",
    "read_sampling",
    "resolve_sampling",
]

_HEAVY = {
    "Engine": "zeroinfer.engine.engine",
    "OpenedModel": "zeroinfer.engine.opening",
    "make_plan": "zeroinfer.engine.engine",
    "order_of_use": "zeroinfer.engine.placing",
}


def __getattr__(name: str) -> Any:
    """Resolve what needs torch or opens files on first use, so that the command line starts."""
    if name in _HEAVY:
        from importlib import import_module

        return getattr(import_module(_HEAVY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
