"""What a model file produces: stages of operators, parameters with roles, KV planes.

A model knows shapes and mathematics. It does not know tiers, files or ranks: fetch units,
placement and parallelism follow from what it says here.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from zeroinfer.errors import CheckpointError
from zeroinfer.kvcache import KVPlane
from zeroinfer.layers import AttentionConfig, Linear, Norm, Op, Param, SelectLogits
from zeroinfer.log import get_logger

__all__ = ["Binding", "Model", "Stage", "bind", "head_stage", "key_value_planes"]

_logger = get_logger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """Operators whose parameters are fetched and released together; the largest fetch unit."""

    name: str
    layer_idx: int
    """Decoder layer, or -1 before the first and after the last."""
    ops: tuple[Op, ...]
    kept: frozenset[str] = frozenset({"hidden"})
    """Activations that live on after the stage."""


def head_stage(norm: Norm, table: Param, *, bias: Param | None = None) -> Stage:
    """Return the last stage: the wanted rows, their final norm, the logits."""
    select = SelectLogits(src="hidden", dst="hidden", num_output_columns=table.shape[1])
    head = Linear(weight=table, bias=bias, src=norm.dst, dst="logits")
    return Stage(name="head", layer_idx=-1, ops=(select, norm, head), kept=frozenset({"logits"}))


def key_value_planes(attention: AttentionConfig) -> tuple[KVPlane, ...]:
    """Return the planes of ordinary attention: keys and values."""
    return tuple(
        KVPlane(name=name, num_heads=attention.num_kv_heads, head_dim=attention.head_dim)
        for name in ("key", "value")
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """A decoder as an ordered list of stages."""

    model_type: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    max_model_len: int
    """Longest sequence the position scheme allows."""
    stages: tuple[Stage, ...]
    kv_planes: tuple[KVPlane, ...]
    prefixes: tuple[str, ...] = ("",)
    """Outer prefixes: a checkpoint may have any of them where the canonical name has one."""
    other_names: Mapping[str, str] = field(default_factory=dict)
    """Canonical name -> the name that other releases write."""
    ignored: str = r"(?!)"
    """Pattern of buffers that old checkpoints carry and that are computed here."""
    num_bias_heads: int = 1
    """Masks that a step keeps for a row: 1 if it is causal, 1 per kind of window, 1 per head with
    ALiBi."""
    tied_names: tuple[str, ...] = ()
    """Names a checkpoint may hold besides the matrix they are tied to."""

    @property
    def params(self) -> dict[str, Param]:
        """Every parameter once, by name."""
        return {
            param.name: param
            for stage in self.stages
            for op in stage.ops
            for param in (*op.gathered, *op.params)
        }

    @property
    def num_parameters(self) -> int:
        """Elements over all parameters; a tied matrix counts once."""
        return sum(param.num_elements for param in self.params.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class Binding:
    """Which checkpoint tensor serves each parameter."""

    names: Mapping[str, str]
    """Parameter name -> checkpoint name."""
    unused: tuple[str, ...]
    """Checkpoint tensors that nothing uses, known buffers left out."""


def bind(model: Model, tensors: Mapping[str, tuple[int, ...]]) -> Binding:
    """Find each parameter among a checkpoint's tensors, given by name and shape.

    Raises:
        CheckpointError: a parameter is missing or has another shape than config.json says.
    """
    names = {param.name: _find(model, param, tensors) for param in model.params.values()}
    used = set(names.values())
    unused = tuple(sorted(name for name in tensors if name not in used))
    unused = tuple(_without_known(model, unused))
    if unused:
        _logger.warning(
            "%d tensor(s) of the checkpoint are not used by a %d-layer %s: %s",
            len(unused), model.num_layers, model.model_type, ", ".join(unused[:8]),
        )  # fmt: skip
    return Binding(names=names, unused=unused)


def _find(model: Model, param: Param, tensors: Mapping[str, tuple[int, ...]]) -> str:
    candidates = _spellings(model, param.name)
    found = next((name for name in candidates if name in tensors), None)
    if found is None:
        raise CheckpointError(
            f"tensor {param.name} is missing from the checkpoint (looked for "
            f"{', '.join(candidates)}); it is incomplete or not a {model.model_type} model"
        )
    if tensors[found] != param.shape:
        raise CheckpointError(
            f"tensor {found} has shape {list(tensors[found])}, config.json asks for "
            f"{list(param.shape)}; weights and config belong to different models"
        )
    return found


def _spellings(model: Model, name: str) -> list[str]:
    """The canonical name and its other name, then both with every outer prefix."""
    names = [name, model.other_names.get(name, name)]
    stems = [_without_prefix(model, each) for each in names]
    spelled = [prefix + stem for stem in stems for prefix in model.prefixes]
    return list(dict.fromkeys([*names, *spelled]))


def _without_prefix(model: Model, name: str) -> str:
    """Drop the longest outer prefix that the name has."""
    return name.removeprefix(max(filter(name.startswith, model.prefixes), key=len, default=""))


def _without_known(model: Model, names: Iterable[str]) -> Iterable[str]:
    pattern = re.compile(model.ignored)
    tied = {name for tied in model.tied_names for name in _spellings(model, tied)}
    return (name for name in names if name not in tied and not pattern.search(name))
