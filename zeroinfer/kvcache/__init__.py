"""Block pool, block tables and the KV tensors."""

from zeroinfer.kvcache.block_pool import BlockPool
from zeroinfer.kvcache.kv_cache import KVCache, KVPlane

__all__ = ["BlockPool", "KVCache", "KVPlane"]
