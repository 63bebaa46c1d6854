"""Bytes per tier, cost and placement as pure functions on plain data; never loads torch."""

from zeroinfer.planner.inputs import GpuInputs, PlanInputs, WorkspaceModel
from zeroinfer.planner.placement import choose_resident
from zeroinfer.planner.plan import PLAN_VERSION, GpuPlan, Plan, Prediction
from zeroinfer.planner.planning import make_plan
from zeroinfer.planner.profile import DiskCell, MatmulRate, Profile
from zeroinfer.planner.ring import RingLayout, lay_out_ring
from zeroinfer.planner.units import (
    FetchUnit,
    OpData,
    ParamData,
    StageData,
    TensorSlice,
    UnitPart,
    build_units,
)

__all__ = [
    "PLAN_VERSION",
    "DiskCell",
    "FetchUnit",
    "GpuInputs",
    "GpuPlan",
    "MatmulRate",
    "OpData",
    "ParamData",
    "Plan",
    "PlanInputs",
    "Prediction",
    "Profile",
    "RingLayout",
    "StageData",
    "TensorSlice",
    "UnitPart",
    "WorkspaceModel",
    "build_units",
    "choose_resident",
    "lay_out_ring",
    "make_plan",
]
