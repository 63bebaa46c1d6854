"""Peer: DeepSpeed ZeRO-Inference (ZeRO stage 3, parameters on NVMe) on the CPU.

Runs in the environment that tools/setup_peers.sh makes. Loading writes all parameters as swap
files under `--work` and needs more memory than the model; the driver limits memory after it.
"""

import argparse
import os
import shutil

import deepspeed
import torch
from peer_common import announce_loaded, generate, parse_arguments, read_prompts
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations import HfDeepSpeedConfig


def zero_config(args: argparse.Namespace, largest_parameter: int) -> dict[str, object]:
    """Settings for inference from NVMe: read ahead, large blocks, nothing kept beyond a window."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "stage3_prefetch_bucket_size": args.prefetch_elements or 2 * largest_parameter,
            "stage3_param_persistence_threshold": 0,
            "stage3_max_live_parameters": 4 * largest_parameter,
            "stage3_max_reuse_distance": 0,
            "offload_param": {
                "device": "nvme",
                "nvme_path": str(args.work),
                "pin_memory": False,
                "buffer_count": args.buffer_count,
                "buffer_size": largest_parameter,
            },
        },
        "aio": {
            "block_size": args.block_bytes,
            "queue_depth": args.queue_depth,
            "intra_op_parallelism": args.aio_threads,
            "single_submit": False,
            "overlap_events": True,
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--block-bytes", type=int, default=1 << 20)
    parser.add_argument("--queue-depth", type=int, default=8)
    parser.add_argument("--aio-threads", type=int, default=1)
    parser.add_argument("--buffer-count", type=int, default=6, help="swap buffers in DRAM")
    parser.add_argument("--prefetch-elements", type=int, default=0)
    args = parse_arguments(parser)
    args.work.mkdir(parents=True, exist_ok=True)
    for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_PORT": 0}.items():
        os.environ.setdefault(name, str(value))
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    config = AutoConfig.from_pretrained(args.model)
    # Embedding and head are the largest parameters, and every swap buffer has the largest's size.
    largest = max(config.vocab_size, config.intermediate_size) * config.hidden_size
    settings = zero_config(args, largest)
    # It must stay alive while the model is made: that is how transformers knows of ZeRO 3.
    keep = HfDeepSpeedConfig(settings)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16)
    engine = deepspeed.initialize(model=model, config=settings)[0]
    engine.module.eval()
    announce_loaded(args)
    generate(engine.module, read_prompts(args.input), args.max_tokens)
    del keep
    shutil.rmtree(args.work, ignore_errors=True)
    # Its I/O threads do not end by themselves in some versions.
    os._exit(0)


if __name__ == "__main__":
    main()
