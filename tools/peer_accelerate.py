"""Peer: transformers with Accelerate's disk offload, straight from the safetensors files.

Runs in the environment that tools/setup_peers.sh makes. Weights beyond `--resident` (which also
counts room for the largest layer) stay in the checkpoint's own files, without a second copy, and
are loaded for each use.
"""

import argparse

import torch
from peer_common import announce_loaded, generate, parse_arguments, read_prompts
from transformers import AutoModelForCausalLM


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--resident", default="0", help="its max_memory for the CPU, as 4GiB; 0 = all from disk"
    )
    args = parse_arguments(parser)
    args.work.mkdir(parents=True, exist_ok=True)
    if args.resident == "0":
        placement = {"device_map": {"": "disk"}}
    else:
        placement = {"device_map": "auto", "max_memory": {"cpu": args.resident}}
    model = AutoModelForCausalLM.from_pretrained(
        args.model,
        dtype=torch.bfloat16,
        offload_folder=str(args.work),
        **placement,
    )
    model.eval()
    announce_loaded(args)
    generate(model, read_prompts(args.input), args.max_tokens)


if __name__ == "__main__":
    main()
