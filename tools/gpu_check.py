"""Check one GPU: its tests, its link, and streaming to it beside what link and products allow.

    python tools/gpu_check.py --out tools/results/gpu.json [--wheels wheels]
    python tools/gpu_check.py --double --out double.json

Synthetic weights, no downloads, under five minutes. What the package imports and a bare Python
with torch, transformers and safetensors lacks is installed from a folder of wheels, into a folder
of its own; pydantic has a small stand-in in tools/bare and needs no wheel. With --double the device
double stands in for the GPU, in small: it shows that every line here runs, and no speed.
"""

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
NEEDED = {"psutil": "psutil", "yaml": "PyYAML"}
"""Module -> wheel, of what the engine imports."""
BARE = REPOSITORY / "tools" / "bare"
"""Stands in for pydantic where that is neither installed nor among the wheels."""
NEEDED_BY_TESTS = {"pytest": "pytest", "pytest_timeout": "pytest-timeout"}
LINK_BAR, STEP_BAR = 0.90, 1.10


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What is measured: small for the double, large enough for a GPU."""

    geometry: str
    dram: str
    """Not what is free now: machines that get their memory as they use it show little of it."""
    num_layers: int
    dtype: str
    fetch_unit_bytes: str
    batch: int
    prompt_tokens: int
    max_tokens: int
    nvme_tokens: int
    """Fewer, as a step from storage may take seconds."""
    link_bytes: int
    double_bytes_per_s: float | None


GPU = Sizes(
    geometry="llama-7b", dram="48GiB", num_layers=8, dtype="bf16", fetch_unit_bytes="32MiB",
    batch=32, prompt_tokens=32, max_tokens=10, nvme_tokens=4, link_bytes=256 << 20,
    double_bytes_per_s=None,
)  # fmt: skip
DOUBLE = Sizes(
    geometry="llama-tiny", dram="8GiB", num_layers=2, dtype="fp32", fetch_unit_bytes="1MiB",
    batch=2, prompt_tokens=4, max_tokens=6, nvme_tokens=4, link_bytes=1 << 16,
    double_bytes_per_s=2e6,
)  # fmt: skip


def prepare_environment(wheels: Path | None, *, with_tests: bool) -> None:
    """Make the package and what it imports importable, here and in child processes.

    Raises:
        SystemExit: something is missing and no wheel of it is there.
    """
    paths = [str(REPOSITORY), str(REPOSITORY / "tools")]
    needed = {**NEEDED, **(NEEDED_BY_TESTS if with_tests else {})}
    missing = [wheel for module, wheel in needed.items() if not importlib.util.find_spec(module)]
    if not importlib.util.find_spec("pydantic"):
        if wheels is not None and any(wheels.glob("pydantic-*.whl")):
            missing.append("pydantic")
        else:
            paths.append(str(BARE))
    if missing:
        if wheels is None:
            raise SystemExit(f"missing: {', '.join(missing)}; give --wheels with a folder of them")
        target = tempfile.mkdtemp(prefix="gpu-check-")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index"]
        command += ["--find-links", str(wheels), "--target", target, *missing]
        if subprocess.run(command, check=False).returncode:
            raise SystemExit(f"cannot install {', '.join(missing)} from {wheels}")
        paths.append(target)
    sys.path[:0] = paths
    inherited = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, *([inherited] if inherited else [])])


def require_gpu() -> None:
    """Say it at once where there is no GPU.

    Raises:
        SystemExit: torch finds none.
    """
    import torch  # noqa: PLC0415

    if not torch.cuda.is_available():
        raise SystemExit(
            f"torch {torch.__version__} finds no CUDA device; run this on a machine with one, or "
            "try it with --double"
        )


def open_device(sizes: Sizes) -> Any:
    from zeroinfer.memory import CudaDevice, DoubleDevice, MlockPinner  # noqa: PLC0415

    if sizes.double_bytes_per_s is None:
        return CudaDevice.open()
    return DoubleDevice.open(bytes_per_s=sizes.double_bytes_per_s, pinner=MlockPinner())


def check(name: str, value: float, bar: float, *, is_at_least: bool) -> dict[str, Any]:
    is_met = value >= bar if is_at_least else value <= bar
    sign = ">=" if is_at_least else "<="
    return {"check": name, "value": value, "bar": f"{sign} {bar:g}", "is_met": is_met}


def run_tests(sizes: Sizes) -> dict[str, Any]:
    """Run the tests of the device in a process of their own.

    With the double those of a GPU are collected, and skipped where there is none.
    """
    chosen = ["tests/gpu"]
    if sizes.double_bytes_per_s is not None:
        chosen += ["tests/unit/memory/test_devices.py", "-k", "TestDouble or gpu"]
    command = [sys.executable, "-m", "pytest", *chosen, "-q", "-p", "no:cacheprovider"]
    start_s = time.perf_counter()
    done = subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=180
    )
    print(done.stdout[-6000:], done.stderr[-1000:])
    summary = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else done.stderr[-300:]
    return {
        "summary": summary,
        "wall_s": time.perf_counter() - start_s,
        "checks": [check("tests failed", float(done.returncode), 0, is_at_least=False)],
    }


def measure_link(sizes: Sizes) -> dict[str, Any]:
    """Copy one place from locked and from unlocked memory."""
    import torch  # noqa: PLC0415

    from zeroinfer.memory import Arena, HostPins  # noqa: PLC0415
    from zeroinfer.profiling import measure_link as measure  # noqa: PLC0415

    rates = {}
    with (
        open_device(sizes) as device,
        Arena.create(sizes.link_bytes, name="probe", is_prefaulted=True) as host,
    ):
        memory = device.allocate(sizes.link_bytes, name="probe")
        shape = (sizes.link_bytes,)
        pair = (memory.tensor(0, shape, torch.uint8), host.tensor(0, shape, torch.uint8))

        def copy() -> None:
            device.synchronize(device.copy([pair]))

        rates["unlocked_bytes_per_s"] = measure(copy, sizes.link_bytes)
        with HostPins(device.pinner) as pins:
            pins.pin(host, 0, sizes.link_bytes)
            rates["locked_bytes_per_s"] = measure(copy, sizes.link_bytes)
            rates["locked_bytes"] = pins.num_bytes
        memory.close()
    locked = check("locked", rates["locked_bytes"], sizes.link_bytes, is_at_least=True)
    return {**rates, "checks": [locked]}


def make_checkpoint(sizes: Sizes, folder: Path) -> Path:
    out = folder / "model"
    command = [sys.executable, str(REPOSITORY / "tools" / "make_checkpoint.py")]
    command += ["--family", "llama", "--geometry", sizes.geometry, "--dtype", sizes.dtype]
    command += ["--num-layers", str(sizes.num_layers), "--out", str(out)]
    subprocess.run(command, check=True, capture_output=True, timeout=180)
    return out


def run_engine(sizes: Sizes, model: Path, weights: str, max_tokens: int) -> dict[str, Any]:
    """Answer a batch with the weights on one tier; return its report and ids."""
    from zeroinfer.config import load_config  # noqa: PLC0415
    from zeroinfer.diskformat import open_checkpoint  # noqa: PLC0415
    from zeroinfer.engine import Engine, Request, SamplingParams, Workload  # noqa: PLC0415

    settings = {
        "offload.dram": sizes.dram,
        "offload.weights": weights,
        "offload.fetch_unit_bytes": sizes.fetch_unit_bytes,
        "scheduler.max_num_seqs": sizes.batch,
        "compute.batch_invariant": "off",
    }
    config = load_config(None, [f"{key}={value}" for key, value in settings.items()])
    length, count = sizes.prompt_tokens, sizes.batch
    workload = Workload(
        num_requests=count,
        max_prompt_tokens=length,
        total_prompt_tokens=length * count,
        max_new_tokens=sizes.max_tokens,
    )
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    ids: dict[int, tuple[int, ...]] = {}
    checkpoint = open_checkpoint(model)
    with Engine.open(
        config, checkpoint=checkpoint, tokenizer=None, workload=workload, device=open_device(sizes)
    ) as engine:
        print(engine.plan.render(), flush=True)
        vocab = checkpoint.config["vocab_size"]
        for row in range(count):
            prompt = tuple((31 * row + 7 * at) % (vocab - 3) + 3 for at in range(length))
            engine.add_request(Request(request_id=row, prompt_token_ids=prompt, sampling=sampling))
        while engine.has_unfinished_requests():
            ids |= {done.request_id: done.token_ids for done in engine.step().finished}
        return {"report": engine.report(), "ids": [ids[row] for row in range(count)]}


def decode_step_s(report: Mapping[str, Any]) -> float:
    """Median of the decode steps but the last, which fetches nothing ahead for a next one."""
    steps = [step for step in report["steps"] if step["num_tokens"] == step["num_seqs"]]
    return median(step["wall_s"] for step in steps[:-1])


def measure_streaming(sizes: Sizes) -> dict[str, Any]:
    """Stream one model from each tier; compare ids, and steps with link and products."""
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        model = make_checkpoint(sizes, Path(folder))
        lengths = {"gpu": sizes.max_tokens, "dram": sizes.max_tokens, "nvme": sizes.nvme_tokens}
        runs = {
            weights: run_engine(sizes, model, weights, max_tokens)
            for weights, max_tokens in lengths.items()
        }
    reports = {weights: run["report"] for weights, run in runs.items()}
    steps = {weights: decode_step_s(report) for weights, report in reports.items()}
    plan = reports["dram"]["plan"]
    link_s = plan["h2d_bytes_per_step"] / reports["dram"]["profile"]["h2d_bytes_per_s"]
    floor_s = max(link_s, steps["gpu"])
    differing = sum(
        runs[weights]["ids"] != [row[: lengths[weights]] for row in runs["gpu"]["ids"]]
        for weights in ("dram", "nvme")
    )
    peak_share = max(
        report["memory"]["gpu_peak_bytes"] / report["plan"]["total_gpu_bytes"]
        for report in reports.values()
    )
    checks = [
        check("placements with other ids", differing, 0, is_at_least=False),
        check("gpu peak / planned", peak_share, 1.0, is_at_least=False),
        check("step / longer of link and resident step", steps["dram"] / floor_s, STEP_BAR,
              is_at_least=False),
    ]  # fmt: skip
    if link_s >= steps["gpu"]:
        checks.append(
            check("share of the link", link_s / steps["dram"], LINK_BAR, is_at_least=True)
        )
    return {"decode_step_s": steps, "link_s": link_s, "reports": reports, "checks": checks}


SECTIONS: dict[str, Callable[[Sizes], dict[str, Any]]] = {
    "tests": run_tests,
    "link": measure_link,
    "streaming": measure_streaming,
}


def measure_all(sizes: Sizes, names: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each section's figures; one that fails is written down and the next one runs."""
    for name in names:
        start_s = time.perf_counter()
        try:
            result = SECTIONS[name](sizes)
        except Exception:  # noqa: BLE001 - whatever fails must not cost the other sections
            failed = {"check": name, "value": None, "bar": "runs", "is_met": False}
            result = {"error": traceback.format_exc(), "checks": [failed]}
            print(result["error"], file=sys.stderr)
        yield name, {**result, "section_s": time.perf_counter() - start_s}


def device_facts(sizes: Sizes) -> dict[str, Any]:
    import torch  # noqa: PLC0415

    if sizes.double_bytes_per_s is not None:
        return {"device": "double", "link_bytes_per_s": sizes.double_bytes_per_s}
    properties = torch.cuda.get_device_properties(0)
    return {
        "device": properties.name,
        "memory_bytes": properties.total_memory,
        "cuda": torch.version.cuda,
        "capability": f"{properties.major}.{properties.minor}",
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="JSON file")
    parser.add_argument("--wheels", type=Path, help="folder of wheels, for what is not installed")
    parser.add_argument("--double", action="store_true", help="the device double, in small")
    parser.add_argument("--sections", default=",".join(SECTIONS), help="some of them")
    args = parser.parse_args()
    sizes, names = DOUBLE if args.double else GPU, args.sections.split(",")
    prepare_environment(args.wheels, with_tests="tests" in names)
    if not args.double:
        require_gpu()
    from bench_common import format_table, write_results  # noqa: PLC0415

    results = {"sizes": vars(sizes), "gpu": device_facts(sizes)}
    lines = []
    for name, result in measure_all(sizes, names):
        results[name] = result
        lines += [[name, *row.values()] for row in result["checks"]]
        if args.out:
            write_results(args.out, "one GPU", Path(tempfile.gettempdir()), results)
    print(format_table(["section", "check", "value", "bar", "met"], lines))
    return 0 if all(line[-1] for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
