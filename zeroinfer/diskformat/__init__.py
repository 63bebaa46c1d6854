"""Headers of checkpoints: tensors as extents of files, validated before any data is read.

Nothing here loads torch or touches tensor data.
"""

from zeroinfer.diskformat.checkpoint import Checkpoint, open_checkpoint
from zeroinfer.diskformat.runs import Extent, ReadRun, plan_runs
from zeroinfer.diskformat.safetensors_header import (
    FileIdentity,
    TensorExtent,
    read_safetensors_header,
)
from zeroinfer.diskformat.strict_json import read_json_object

__all__ = [
    "Checkpoint",
    "Extent",
    "FileIdentity",
    "ReadRun",
    "TensorExtent",
    "open_checkpoint",
    "plan_runs",
    "read_json_object",
    "read_safetensors_header",
]
