"""Operators of transformer models on packed rows; mathematics only, no I/O."""

from zeroinfer.layers.activation import activation
from zeroinfer.layers.attention import AttentionConfig, alibi_slopes, attend
from zeroinfer.layers.frame import Frame, KVView, PackedBatch, SequenceKV, SequenceSlice
from zeroinfer.layers.fused import split_qkv
from zeroinfer.layers.ops import Activate, Apply, Embed, Linear, Norm, Op, SelectLogits
from zeroinfer.layers.params import LandedWeights, Param, PlainWeights, Role, Rows
from zeroinfer.layers.rotary import RopeConfig

__all__ = [
    "Activate",
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
    "attend",
    "split_qkv",
]
