"""What stands between the command and its first layer: a run loads nothing that it does not use."""

import json
import subprocess
import sys

from tests.helpers.scripted_model import write_scripted_model

UNUSED = (
    "transformers", "huggingface_hub", "safetensors", "gguf", "jinja2", "rich", "pygments",
    "torch._dynamo", "torch._inductor", "torch.onnx",
)  # fmt: skip
"""By a run with a `tokenizer.json`, plain prompts and an output file."""

PROBE = f"""
import sys
from zeroinfer.cli import main
code = main(sys.argv[1:])
loaded = [name for name in {UNUSED!r} if name in sys.modules]
sys.exit(f"loaded {{loaded}}" if loaded else code)
"""


def test_a_run_loads_nothing_that_it_does_not_use(tmp_path):
    model = write_scripted_model(tmp_path / "model")
    lines = [{"prompt": "Q"}, {"prompt_token_ids": [5, 6]}]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, lines)))
    flags = "--model model --nvme nvme --input in.jsonl --output out.jsonl --dram 8GiB"
    done = subprocess.run(
        [sys.executable, "-c", PROBE, *flags.split(), "--max-tokens", "2"],
        cwd=model.parent, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == len(lines)
