"""Operators of transformer models on packed rows; mathematics only, no I/O."""

from zeroinfer.layers.activation import activation, gated, pointwise
from zeroinfer.layers.attention import AttentionConfig, alibi_slopes, attend
from zeroinfer.layers.frame import Frame, KVView, PackedBatch, SequenceKV, SequenceSlice
from zeroinfer.layers.fused import split_qkv
from zeroinfer.layers.ops import Apply, Embed, Linear, Norm, Op, SelectLogits
from zeroinfer.layers.params import LandedWeights, Param, PlainWeights, Role, Rows
from zeroinfer.layers.rotary import RopeConfig, apply_rotary

__all__ = [
    "Apply",
    "AttentionConfig",
    "Embed",
    "Frame",
    "KVView",
    "LandedWeights",
    "Linear",
    "Norm",
    "Op",
    "PackedBatch",
    "Param",
    "PlainWeights",
    "Role",
    "RopeConfig",
    "Rows",
    "SelectLogits",
    "SequenceKV",
    "SequenceSlice",
    "activation",
    "alibi_slopes",
    "apply_rotary",
    "attend",
    "gated",
    "pointwise",
    "split_qkv",
]
