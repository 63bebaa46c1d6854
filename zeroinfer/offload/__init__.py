"""Weight store, fetch coordinator, release: the heart of ZeRO-Inference.

Yields landed units; knows tensors by name and extent, never models.
"""

from zeroinfer.offload.coordinator import FetchCoordinator, LandedUnit
from zeroinfer.offload.row_gather import RowTable, staging_bytes
from zeroinfer.offload.sources import SliceSource, UnitSource, unit_sources
from zeroinfer.offload.weight_store import Home, HomeRun, WeightStore

__all__ = [
    "FetchCoordinator",
    "Home",
    "HomeRun",
    "LandedUnit",
    "RowTable",
    "SliceSource",
    "UnitSource",
    "WeightStore",
    "staging_bytes",
    "unit_sources",
]
