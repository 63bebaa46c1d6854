"""``plan``: the table that every run prints first, and nothing else."""

from zeroinfer.cli.command import make_command
from zeroinfer.cli.console import Output
from zeroinfer.cli.copying import show_offer
from zeroinfer.cli.generate import prepare_job
from zeroinfer.cli.job_options import InputOptions

__all__ = ["command", "run"]


def run(options: InputOptions) -> int:
    """Plan the job of these options and print the plan; reads no weights."""
    output = Output(is_json=options.json_output)
    job = prepare_job(options)
    from zeroinfer.engine import Workload, make_plan

    # An input without a good row still shows what its model would need.
    workload = job.job_input.workload() or Workload()
    plan = make_plan(job.opened.config, job.opened.checkpoint, workload)
    output.text(plan.render())
    output.event("plan", plan.to_dict())
    show_offer(job.opened, output)
    return 0


command = make_command(InputOptions, run)
