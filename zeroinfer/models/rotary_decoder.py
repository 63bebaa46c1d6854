"""The decoder that llama made common, for the families that keep its names and sizes.

Norms before attention and MLP, rotary positions, grouped-query attention; parameters under
`model.layers`. A family file composes its layers from these stages and names what differs.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from zeroinfer.errors import CheckpointError
from zeroinfer.layers import (
    Apply,
    AttentionConfig,
    Embed,
    Norm,
    Op,
    Param,
    Role,
    attend,
)
from zeroinfer.models.base import Model, Stage, head_stage, key_value_planes
from zeroinfer.models.hf_config import divide_heads, get_eps, get_int, get_value, rope_config
from zeroinfer.models.parts import activated, layer_norm, linear

__all__ = ["RotaryDecoder"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RotaryDecoder:
    """Sizes of one decoder; its methods return the stages."""

    config: Mapping[str, Any]
    hidden_size: int
    vocab_size: int
    attention: AttentionConfig
    max_model_len: int
    windows: tuple[int | None, ...]
    """Keys that a query sees, layer by layer; None is all."""
    norm_eps: float
    is_rms: bool
    """Whether norms are RMS norms; else layer norms, which have a bias."""

    @classmethod
    def read(
        cls,
        config: Mapping[str, Any],
        *,
        windows: Sequence[int | None] | None = None,
        eps_key: str = "rms_norm_eps",
        is_rms: bool = True,
    ) -> Self:
        """Read the keys that these families share; `windows` is None if no layer has one.

        Raises:
            CheckpointError: a key is missing or contradicts another.
            UnsupportedModelError: the rope scaling is not implemented.
        """
        attention = _attention_config(config)
        rope = rope_config(config, head_dim=attention.head_dim)
        num_layers = get_int(config, "num_hidden_layers")
        return cls(
            config=config,
            hidden_size=get_int(config, "hidden_size"),
            vocab_size=get_int(config, "vocab_size"),
            attention=replace(attention, rope=rope),
            max_model_len=rope.max_model_len,
            windows=tuple(windows or [None] * num_layers),
            norm_eps=get_eps(config, eps_key, default=1e-6),
            is_rms=is_rms,
        )

    def norm(self, prefix: str) -> Norm:
        """Return a norm of the hidden state, into `x`."""
        if not self.is_rms:
            return layer_norm(prefix, self.hidden_size, eps=self.norm_eps)
        weight = Param(name=f"{prefix}.weight", shape=(self.hidden_size,))
        return Norm(weight=weight, eps=self.norm_eps, src="hidden", dst="x", is_rms=True)

    def attention_stage(
        self,
        idx: int,
        *,
        has_qkv_bias: bool = False,
        has_output_bias: bool = False,
        has_head_norms: bool = False,
    ) -> Stage:
        """Return the attention of layer `idx`.

        With `has_head_norms` every query and key head is normalised before it is rotated.
        """
        prefix = f"model.layers.{idx}"
        attention = replace(self.attention, window=self.windows[idx])
        width = attention.num_heads * attention.head_dim
        projections = [
            linear(
                f"{prefix}.self_attn.{name}_proj",
                (num_heads * attention.head_dim, self.hidden_size),
                Role.COLUMN,
                src="x",
                dst=name,
                has_bias=has_qkv_bias,
            )
            for name, num_heads in self._num_heads.items()
        ]
        return Stage(
            name=f"layers.{idx}.self_attn",
            layer_idx=idx,
            ops=(
                self.norm(f"{prefix}.input_layernorm"),
                *projections,
                *(self._head_norms(f"{prefix}.self_attn") if has_head_norms else ()),
                Apply(
                    fn=attend(attention, query="q", key="k", value="v", dst="attended"),
                    num_output_columns=width,
                ),
                linear(
                    f"{prefix}.self_attn.o_proj", (self.hidden_size, width), Role.ROW,
                    src="attended", dst="hidden", has_bias=has_output_bias, is_accumulated=True,
                ),
            ),
        )  # fmt: skip

    @property
    def _num_heads(self) -> dict[str, int]:
        num_kv_heads = self.attention.num_kv_heads
        return {"q": self.attention.num_heads, "k": num_kv_heads, "v": num_kv_heads}

    def _head_norms(self, prefix: str) -> list[Norm]:
        shape = (self.attention.head_dim,)
        return [
            Norm(
                weight=Param(name=f"{prefix}.{name}_norm.weight", shape=shape),
                eps=self.norm_eps,
                src=name,
                dst=name,
                is_rms=True,
                num_heads=self._num_heads[name],
            )
            for name in "qk"
        ]

    def mlp_stage(self, idx: int, *ops: Op) -> Stage:
        """Return the MLP of layer `idx`: these operators behind its norm, from `x` to `hidden`."""
        norm = self.norm(f"model.layers.{idx}.post_attention_layernorm")
        return Stage(name=f"layers.{idx}.mlp", layer_idx=idx, ops=(norm, *ops))

    def gated_mlp_stage(self, idx: int, *, has_bias: bool = False) -> Stage:
        """Return the MLP of layer `idx` as ``down(act(gate(x)) * up(x))``."""
        prefix = f"model.layers.{idx}.mlp"
        hidden, width = self.hidden_size, get_int(self.config, "intermediate_size")
        act = str(get_value(self.config, "hidden_act", default="silu"))
        gate, up = (
            linear(
                f"{prefix}.{name}_proj", (width, hidden), Role.COLUMN,
                src="x", dst=name, has_bias=has_bias,
            )
            for name in ("gate", "up")
        )  # fmt: skip
        down = linear(
            f"{prefix}.down_proj", (hidden, width), Role.ROW,
            src="gate", dst="hidden", has_bias=has_bias, is_accumulated=True,
        )  # fmt: skip
        return self.mlp_stage(idx, *activated(gate, act, up=up), down)

    def model(self, model_type: str, layer: Callable[[int], tuple[Stage, ...]]) -> Model:
        """Return the model whose layer `idx` is made of the stages `layer(idx)`."""
        shape = (self.vocab_size, self.hidden_size)
        table = Param(name="model.embed_tokens.weight", shape=shape, role=Role.VOCAB)
        own_head = Param(name="lm_head.weight", shape=shape, role=Role.VOCAB)
        is_tied = bool(self.config.get("tie_word_embeddings", False))
        num_layers = len(self.windows)
        return Model(
            model_type=model_type,
            num_layers=num_layers,
            hidden_size=self.hidden_size,
            vocab_size=self.vocab_size,
            max_model_len=self.max_model_len,
            stages=(
                Stage(name="embed", layer_idx=-1, ops=(Embed(weight=table, dst="hidden"),)),
                *(stage for idx in range(num_layers) for stage in layer(idx)),
                head_stage(self.norm("model.norm"), table if is_tied else own_head),
            ),
            kv_planes=key_value_planes(self.attention),
            num_bias_heads=len(set(self.windows)),
            prefixes=("", "model."),
            ignored=r"rotary_emb\.inv_freq$",
            tied_names=(own_head.name,) if is_tied else (),
        )


def _attention_config(config: Mapping[str, Any]) -> AttentionConfig:
    num_heads = get_int(config, "num_attention_heads")
    num_kv_heads = get_int(config, "num_key_value_heads", default=num_heads)
    if num_heads % num_kv_heads:
        raise CheckpointError(
            f"config.json: num_attention_heads {num_heads} is no multiple of "
            f"num_key_value_heads {num_kv_heads}"
        )
    if config.get("head_dim") is None:
        head_dim = divide_heads(get_int(config, "hidden_size"), num_heads)
    else:
        head_dim = get_int(config, "head_dim")
    return AttentionConfig(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
