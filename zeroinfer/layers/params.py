"""What a layer says of its parameters: name, shape and role; no values."""

import enum
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

__all__ = ["LandedWeights", "Param", "PlainWeights", "Role", "Rows"]


class Role(enum.Enum):
    """How a parameter divides over ranks; streaming and quantisation read it too."""

    COLUMN = "column"
    ROW = "row"
    VOCAB = "vocab"
    REPLICATED = "replicated"
    EXPERT = "expert"


@dataclass(frozen=True, kw_only=True, slots=True)
class Param:
    """A parameter by its canonical Hugging Face name."""

    name: str
    shape: tuple[int, ...]
    role: Role = Role.REPLICATED

    @property
    def num_elements(self) -> int:
        """Product of the shape."""
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """Output rows [start, stop) of a matrix that is streamed in pieces."""

    start: int
    stop: int


class LandedWeights(Protocol):
    """Tensors of the fetch unit in use, by parameter name; valid until the unit is released.

    For a row piece of a matrix the tensor holds these rows alone.
    """

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return the landed tensor."""
        ...

    def gather(self, name: str, ids: torch.Tensor) -> torch.Tensor:
        """Return rows `ids` of a matrix not fetched as a whole; blocks until they landed."""
        ...


class PlainWeights:
    """Landed weights over a plain mapping: everything is there, nothing moves."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return the tensor."""
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        """Iterate over names."""
        return iter(self._tensors)

    def gather(self, name: str, ids: torch.Tensor) -> torch.Tensor:
        """Return rows `ids`."""
        return self._tensors[name][ids]
