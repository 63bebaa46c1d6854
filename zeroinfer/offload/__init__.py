"""Weight store, fetch coordinator, release: the heart of ZeRO-Inference.

Yields landed units; knows tensors by name and extent, never models.
"""

from zeroinfer.offload.coordinator import FetchCoordinator, LandedUnit
from zeroinfer.offload.device_store import DeviceStore
from zeroinfer.offload.device_transport import DeviceTransport
from zeroinfer.offload.row_gather import RowTable, staging_bytes
from zeroinfer.offload.sources import SliceSource, UnitSource, unit_sources
from zeroinfer.offload.transport import Transport
from zeroinfer.offload.weight_store import Home, HomeRun, WeightStore

__all__ = [
    "DeviceStore",
    "DeviceTransport",
    "FetchCoordinator",
    "Home",
    "HomeRun",
    "LandedUnit",
    "RowTable",
    "SliceSource",
    "Transport",
    "UnitSource",
    "WeightStore",
    "staging_bytes",
    "unit_sources",
]
