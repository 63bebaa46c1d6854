"""``profile``: measure the disk under the weights, memory and products, and print the grid."""

from rich.console import Console
from rich.table import Table

from zeroinfer.cli.command import make_command
from zeroinfer.cli.console import Output
from zeroinfer.cli.copying import lies_elsewhere
from zeroinfer.cli.model import open_model
from zeroinfer.cli.options import EngineOptions, ProfileOptions
from zeroinfer.planner import Profile
from zeroinfer.profiling import load_or_measure, measure_folder
from zeroinfer.units import format_bytes

__all__ = ["command", "render_grid", "render_rates", "run"]


def run(options: ProfileOptions) -> int:
    """Measure on the weights of a model and keep the result under ``--nvme``."""
    output = Output(is_json=options.json_output)
    engine = EngineOptions(model=options.model, nvme=options.nvme, reader=options.reader)
    opened = open_model(engine)
    folder, reader = opened.config.io.nvme[0], opened.config.io.reader
    profile = load_or_measure(folder, opened.checkpoint.files, reader=reader, is_forced=True)
    if not options.json_output:
        console = Console(highlight=False)
        console.print(f"{profile.filesystem}: direct reads in GB/s, chunk size by queue depth")
        console.print(render_grid(profile))
        console.print(render_rates(profile))
    output.event("profile", profile.to_dict())
    if lies_elsewhere(folder, opened.checkpoint.files):
        # The plan can then say whether a copy there would be read faster.
        own = measure_folder(folder, reader=reader)
        if own is not None:
            rate = f"{own.nvme_read_bytes_per_s / 1e9:.2f} GB/s"
            output.text(f"--nvme {folder} lies on {own.filesystem}: {rate}")
            output.event("profile", own.to_dict())
    return 0


def render_grid(profile: Profile) -> Table:
    """Lay out the measured cells, the chosen one marked with a star."""
    depths = sorted({cell.queue_depth for cell in profile.grid})
    rates = {
        (cell.io_chunk_bytes, cell.queue_depth): cell.read_bytes_per_s for cell in profile.grid
    }
    chosen = (profile.io_chunk_bytes, profile.queue_depth)
    table = Table("chunk", *(str(depth) for depth in depths))
    for chunk in sorted({cell.io_chunk_bytes for cell in profile.grid}):
        cells = []
        for depth in depths:
            rate = rates.get((chunk, depth))
            mark = "*" if (chunk, depth) == chosen else ""
            cells.append("-" if rate is None else f"{rate / 1e9:.2f}{mark}")
        table.add_row(format_bytes(chunk), *cells)
    return table


def render_rates(profile: Profile) -> Table:
    """Lay out the chosen rate, the memory copy and the products."""
    table = Table("what", "rate")
    where = f"{format_bytes(profile.io_chunk_bytes)} chunks, {profile.queue_depth} in flight"
    table.add_row(f"nvme read, {where}", f"{profile.nvme_read_bytes_per_s / 1e9:.2f} GB/s")
    table.add_row("memory copy", f"{profile.dram_copy_bytes_per_s / 1e9:.1f} GB/s")
    for rate in profile.matmul_flops_per_s:
        name = f"products {rate.dtype} {rate.mode}, {rate.num_rows} rows"
        table.add_row(name, f"{rate.flops_per_s / 1e9:.0f} GFLOP/s")
    return table


command = make_command(ProfileOptions, run)
