"""Taking apart the product of one fused query-key-value projection.

Letters: T rows, V key/value heads, G query heads per key/value head, D head_dim.
"""

from collections.abc import Callable

from zeroinfer.layers.attention import AttentionConfig
from zeroinfer.layers.frame import Frame

__all__ = ["split_qkv"]


def split_qkv(
    config: AttentionConfig, *, src: str, query: str, key: str, value: str
) -> Callable[[Frame], None]:
    """Return a function that parts `src`, fused head by head, into queries, keys and values.

    The columns of one key/value head lie together: its query heads, its key, its value. With one
    query head each that is the layout of BLOOM and GPT-NeoX; grouped and multi-query heads lie so
    too.

    Shapes:
        src: (T, V * (G + 2) * D). query: (T, V * G * D). key, value: (T, V * D).
    """
    group = config.group_size

    def run(frame: Frame) -> None:
        num_rows = frame[src].shape[0]
        fused_TVGD = frame[src].view(num_rows, config.num_kv_heads, group + 2, config.head_dim)
        frame[query] = fused_TVGD[:, :, :group].reshape(num_rows, -1).contiguous()
        frame[key] = fused_TVGD[:, :, group].reshape(num_rows, -1).contiguous()
        frame[value] = fused_TVGD[:, :, group + 1].reshape(num_rows, -1).contiguous()

    return run
