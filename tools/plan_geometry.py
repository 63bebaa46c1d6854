"""Plan a preset for the machine it is made for, without the machine and without the model.

    python tools/plan_geometry.py configs/opt-175b-a6000.yaml

The name of the file says which geometry (tools/geometries.py) and which machine
(tools/hardware.py). The model is a checkpoint of headers alone, whose data are holes that take no
disk. With --update the figures in the file's comment are brought up to date.
"""

import argparse
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from geometries import GEOMETRIES, resolve_config, tensor_specs
from hardware import HARDWARE, Hardware
from make_checkpoint import TORCH_NAMES, write_metadata
from shards import split_shards

from zeroinfer.config import EngineConfig, load_config
from zeroinfer.diskformat import open_checkpoint
from zeroinfer.dtypes import DType
from zeroinfer.engine import Workload
from zeroinfer.engine.prepare import compute_plan, prepare
from zeroinfer.errors import ConfigError, ZeroInferError
from zeroinfer.planner import Plan
from zeroinfer.units import GIB

__all__ = ["JOB", "describe", "plan_for", "plan_preset", "split_name", "write_headers"]

JOB = Workload(
    num_requests=1024, max_prompt_tokens=128, total_prompt_tokens=1024 * 128, max_new_tokens=64
)
"""What presets are planned for."""

SHARD_BYTES = 10 * 10**9
# Element types that are not bf16, as published (smollm2: as the embedded model is converted).
DTYPES = {"opt": DType.F16, "smollm2": DType.F32}


def split_name(stem: str) -> tuple[str, str]:
    """Return geometry and machine of a preset's name.

    Raises:
        ConfigError: it names none.
    """
    for machine in HARDWARE:
        geometry = stem.removesuffix(f"-{machine}")
        if geometry != stem and geometry in GEOMETRIES:
            return geometry, machine
    raise ConfigError(
        f"preset {stem} has no geometry and machine in its name; need GEOMETRY-MACHINE with one "
        f"of {', '.join(HARDWARE)}"
    )


def write_headers(folder: Path, geometry: str) -> Path:
    """Write a checkpoint that has everything but data: files of their full size, all holes."""
    named = GEOMETRIES[geometry]
    dtype = DTYPES.get(geometry.split("-")[0], DType.BF16)
    config = resolve_config(named.family, named.sizes, None) | {"torch_dtype": TORCH_NAMES[dtype]}
    shards = split_shards(tensor_specs(config, dtype), SHARD_BYTES)
    write_metadata(folder, config, shards)
    for shard in shards:
        header = shard.header()
        with (folder / shard.name).open("wb") as file:
            file.write(header)
            file.truncate(len(header) + shard.num_bytes)
    return folder


def plan_preset(path: Path, job: Workload = JOB) -> Plan:
    """Plan a preset for the geometry and machine of its name.

    Raises:
        ConfigError: the name says neither, or a setting is refused.
        CapacityError: it does not fit.
    """
    geometry, machine = split_name(path.stem)
    return plan_for(load_config(path), geometry, HARDWARE[machine], job)


def plan_for(config: EngineConfig, geometry: str, hardware: Hardware, job: Workload = JOB) -> Plan:
    """Plan a geometry for a machine.

    Raises:
        CapacityError: it does not fit.
    """
    # Rates are given, so nothing of ours is read or written.
    config = config.model_copy(update={"io": config.io.model_copy(update={"nvme": ()})})
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = open_checkpoint(write_headers(Path(folder), geometry))
        prepared = prepare(config, checkpoint, device=hardware.gpu, profile=hardware.profile)
        return compute_plan(config, prepared, job, base_bytes=hardware.base_bytes)


def describe(plan: Plan, path: Path, job: Workload = JOB) -> list[str]:
    """Return the lines that a preset's comment has of its plan."""
    on_gpu = f"{plan.gpu_resident_bytes / GIB:.1f} GiB on the gpu, " if plan.gpu else ""
    return [
        f"Predicted, not measured, for {job.num_requests} prompts of {job.max_prompt_tokens} "
        f"tokens and {job.max_new_tokens} new ones each:",
        f"  step {_figure(plan.prediction.step_s)} s for {plan.max_num_seqs} sequences, bound by "
        f"{plan.prediction.bound_by}, {_figure(plan.predicted_tokens_per_s)} tokens/s",
        f"  weights: {on_gpu}{plan.resident_bytes / GIB:.1f} GiB in memory, "
        f"{plan.streamed_bytes / GIB:.1f} GiB from disk in every step",
        f"  python tools/plan_geometry.py configs/{path.name}",
    ]


def update(path: Path, lines: Sequence[str]) -> None:
    """Replace the figures in a preset's comment."""
    text = path.read_text(encoding="utf-8")
    block = "".join(f"# {line}\n" for line in lines)
    pattern = r"^# Predicted(?:.*\n#)*?.*plan_geometry\.py.*\n"
    path.write_text(re.sub(pattern, block, text, count=1, flags=re.MULTILINE), encoding="utf-8")


def _figure(value: float) -> str:
    if value < 10:
        return f"{value:.2f}" if value >= 0.1 else f"{value:.3f}"
    return f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Plan presets for the machines they are made for.")
    parser.add_argument("presets", type=Path, nargs="+", metavar="FILE.yaml")
    parser.add_argument("--update", action="store_true", help="write the figures into the files")
    arguments = parser.parse_args()
    for path in arguments.presets:
        try:
            plan = plan_preset(path)
        except ZeroInferError as error:
            print(f"{path}: {error}", file=sys.stderr)
            return error.exit_code
        lines = describe(plan, path)
        print("\n".join([f"{path}: {HARDWARE[split_name(path.stem)[1]].text}", *lines, ""]))
        print(f"{plan.render()}\n")
        if arguments.update:
            update(path, lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
