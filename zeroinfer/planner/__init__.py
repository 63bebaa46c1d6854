"""Bytes per tier, cost and placement as pure functions on plain data; never loads torch."""

from zeroinfer.planner.profile import DiskCell, MatmulRate, Profile

__all__ = ["DiskCell", "MatmulRate", "Profile"]
