"""Requests, scheduler, model runner, sampler, the step loop."""

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

__all__ = [
    "FinishReason",
    "FinishedRequest",
    "Request",
    "SamplingParams",
    "StepInterrupted",
    "StepOutput",
    "StepStats",
    "Workload",
]
