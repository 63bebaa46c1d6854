"""The plan's figures agree with each other, in the table and in the report."""

import pytest

from tests.helpers.plan_inputs import make_inputs
from zeroinfer.planner import PLAN_VERSION, Prediction, make_plan
from zeroinfer.units import MIB, format_bytes

REPORTED = {
    "weights", "kv", "landing_bytes", "workspace_bytes", "base_bytes", "prefetch_depth",
    "max_num_seqs", "max_num_batched_tokens", "predicted_step_s", "bound_by", "batch_invariant",
}  # fmt: skip


@pytest.fixture
def plan():
    return make_plan(make_inputs(dram_weights_bytes=40 * MIB))


def test_report_has_the_keys_of_schema_1(plan):
    data = plan.to_dict()
    assert data.keys() >= REPORTED
    assert data["version"] == PLAN_VERSION
    assert set(data["weights"]) == set(data["kv"]) == {"gpu", "dram", "nvme"}


def test_weights_of_all_tiers_are_the_model(plan):
    data = plan.to_dict()
    resident = sum(plan.units[idx].num_bytes for idx in plan.resident)
    assert resident + data["weights"]["nvme"] == sum(unit.num_bytes for unit in plan.units)
    assert data["weights"]["dram"] == sum(plan.footprints[idx] for idx in plan.resident)
    assert data["weights"]["gpu"] == 0


def test_total_is_the_sum_of_its_parts(plan):
    data = plan.to_dict()
    parts = ("landing_bytes", "workspace_bytes", "base_bytes")
    total = data["weights"]["dram"] + data["kv"]["dram"] + sum(data[key] for key in parts)
    assert data["total_dram_bytes"] == total <= data["dram_budget_bytes"]


def test_gathered_table_on_disk_is_counted_as_nvme_but_not_as_streamed(plan):
    assert plan.gathered_bytes == 8 * MIB
    data = plan.to_dict()
    assert data["weights"]["nvme"] == data["streamed_bytes_per_step"] + 8 * MIB


def test_table_names_tiers_columns_and_what_binds(plan):
    lines = plan.render().splitlines()
    columns = ["tier", "weights", "landing", "kv", "workspace", "base", "total", "budget"]
    assert lines[0].split() == columns
    assert lines[1].split()[0] == "dram"
    assert format_bytes(plan.total_dram_bytes) in lines[1]
    assert lines[2].split()[0] == "nvme"
    assert f"bound by {plan.prediction.bound_by}" in lines[3]
    assert f"prefetch depth {plan.prefetch_depth}" in lines[4]
    assert tuple(lines[5:]) == plan.notes
    assert len({len(line) for line in lines[:3]}) == 1


@pytest.mark.parametrize(
    ("io_s", "compute_s", "step_s", "bound_by"),
    [(2.0, 1.0, 2.0, "nvme"), (1.0, 2.0, 2.0, "compute")],
)
def test_step_takes_the_slower_of_both(io_s, compute_s, step_s, bound_by):
    prediction = Prediction(io_s=io_s, compute_s=compute_s)
    assert prediction.step_s == step_s
    assert prediction.bound_by == bound_by


def test_prediction_is_bytes_over_rate_and_flops_over_rate(plan):
    inputs = make_inputs(dram_weights_bytes=40 * MIB)
    rate = inputs.profile.nvme_read_bytes_per_s
    assert plan.prediction.io_s == pytest.approx(plan.streamed_bytes / rate)
    assert plan.predicted_tokens_per_s == pytest.approx(
        plan.max_num_seqs / max(plan.prediction.io_s, plan.prediction.compute_s)
    )
