"""Bytes per tier, cost and placement as pure functions on plain data; never loads torch."""

from zeroinfer.planner.placement import choose_resident
from zeroinfer.planner.plan import PLAN_VERSION, Plan, Prediction
from zeroinfer.planner.planning import PlanInputs, WorkspaceModel, make_plan
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
