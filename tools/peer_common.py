"""What the peer programs share: arguments, the timed greedy loop, and events on stdout.

Events are JSON lines: `loaded`, one `step` for the prefill and each decode step, `done`. A driver
thus sees how far a program came that was killed. Each step is one forward pass over all rows,
timed by itself.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

PROCESS_START_S = time.monotonic()


def parse_arguments(parser: argparse.ArgumentParser) -> argparse.Namespace:
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--input", type=Path, required=True, help="lines of prompt_token_ids")
    parser.add_argument("--max-tokens", type=int, default=4)
    parser.add_argument("--work", type=Path, required=True, help="folder for offloaded weights")
    parser.add_argument(
        "--handshake", action="store_true", help="wait for a line on stdin after loading"
    )
    return parser.parse_args()


def emit(event: str, **values: Any) -> None:
    print(json.dumps({"event": event, **values}), flush=True)


def vm_hwm_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def announce_loaded(args: argparse.Namespace) -> None:
    """Report the load; with a handshake, let the driver set the limit before going on."""
    emit("loaded", load_s=time.monotonic() - PROCESS_START_S, vm_hwm_bytes=vm_hwm_bytes())
    if args.handshake:
        sys.stdin.readline()
        # From here on the peak is that of generating, which is what the limit applies to.
        Path("/proc/self/clear_refs").write_text("5")


def read_prompts(path: Path) -> torch.Tensor:
    rows = [json.loads(line)["prompt_token_ids"] for line in path.read_text().splitlines()]
    return torch.tensor(rows, dtype=torch.long)


@torch.inference_mode()
def generate(model: Any, input_ids: torch.Tensor, max_tokens: int) -> None:
    """Generate greedily, one timed forward pass a token."""
    generated: list[torch.Tensor] = []
    past_key_values = None
    for idx in range(max_tokens):
        start_s = time.perf_counter()
        output = model(
            input_ids=input_ids, past_key_values=past_key_values, use_cache=True, logits_to_keep=1
        )
        past_key_values = output.past_key_values
        input_ids = output.logits[:, -1].argmax(dim=-1, keepdim=True)
        generated.append(input_ids)
        phase = "decode" if idx else "prefill"
        emit("step", phase=phase, wall_s=time.perf_counter() - start_s)
    token_ids = torch.cat(generated, dim=1).tolist()
    emit("done", vm_hwm_bytes=vm_hwm_bytes(), token_ids=token_ids)
