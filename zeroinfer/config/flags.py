"""Names of settings that the command line's flags and the Python API share."""

__all__ = ["FLAG_KEYS"]

FLAG_KEYS = {
    "model": "model.path",
    "nvme": "io.nvme",
    "dtype": "model.dtype",
    "dram": "offload.dram",
    "dram_weights": "offload.dram_weights",
    "gpu_memory": "offload.gpu_memory",
    "weights": "offload.weights",
    "prefetch_depth": "offload.prefetch_depth",
    "kv": "kv.tier",
    "max_num_seqs": "scheduler.max_num_seqs",
    "admit": "scheduler.admit",
    "batch_invariant": "compute.batch_invariant",
    "reader": "io.reader",
}
"""Flag without its dashes -> the key of the config tree that it sets."""
