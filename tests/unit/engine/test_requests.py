"""What the engine takes, refuses and reports."""

import json

import pytest

from tests.helpers.checkpoints import tiny_llama
from tests.helpers.engines import drive, engine_config, greedy_requests, open_engine, run_rows
from zeroinfer.diskformat import open_checkpoint
from zeroinfer.engine import Engine, FinishReason, Request, SamplingParams, Workload
from zeroinfer.errors import CapacityError, ConfigError, RequestError

STREAMED = {"offload.weights": "nvme"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("llama") / "llama", max_position_embeddings=64)


@pytest.fixture
def engine(folder):
    with open_engine(folder, greedy_requests([[1, 2, 3]], max_tokens=4), STREAMED) as engine:
        yield engine


def _request(ids, request_id=0, **sampling):
    return Request(
        request_id=request_id, prompt_token_ids=tuple(ids), sampling=SamplingParams(**sampling)
    )


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "the prompt is empty: got 0 tokens, need at least 1"),
        ([1] * 64, "the prompt is too long: got 64 tokens, need at most 63"),
        ([1, 97], "token id 97 is not in the vocabulary of 97"),
        ([-1], "token id -1 is not in the vocabulary"),
    ],
)
def test_bad_prompts_are_refused_and_leave_nothing_behind(engine, ids, message):
    with pytest.raises(RequestError) as caught:
        engine.add_request(_request(ids, max_tokens=1))
    assert message in str(caught.value)
    assert not engine.has_unfinished_requests()


def test_request_beyond_the_kv_space_is_refused_and_small_ones_run(engine):
    """Source: vllm-project/vllm#1534."""
    with pytest.raises(RequestError, match=r"needs KV for 50 tokens, the plan has 7; lower max"):
        engine.add_request(_request([1] * 10, max_tokens=40))
    run = drive(engine, greedy_requests([[1], [2], [3]], max_tokens=2))
    assert all(len(ids) == 2 for ids in run.ids)


def test_model_length_ends_a_row(folder):
    request = _request([5] * 60, max_tokens=30, ignore_eos=True)
    with open_engine(folder, [request], STREAMED) as engine:
        (row,) = drive(engine, [request]).finished
    assert len(row.token_ids) == 4
    assert row.finish_reason is FinishReason.LENGTH


def test_row_that_had_ended_before_its_resume_comes_back_at_once(engine):
    request = Request(
        request_id=3, prompt_token_ids=(1,), sampling=SamplingParams(max_tokens=2),
        generated_token_ids=(8, 9),
    )  # fmt: skip
    engine.add_request(request)
    output = engine.step()
    assert output.finished[0].token_ids == (8, 9)
    assert output.new_token_ids == {}
    assert not engine.has_unfinished_requests()
    assert engine.report()["totals"]["num_steps"] == 0


def test_report_adds_up(folder):
    run = run_rows(folder, [[1, 2, 3], [4], [5, 6]], STREAMED, max_tokens=5)
    report = json.loads(json.dumps(run.report))
    totals, io = report["totals"], report["io"]["nvme"]
    assert report["schema"] == 1
    assert totals["num_requests"] == 3
    assert totals["num_prompt_tokens"] == 6
    assert totals["num_generated_tokens"] == 15
    assert totals["num_computed_rows"] == 6 + 3 * 4
    assert totals["num_steps"] == len(report["steps"]) == 5
    assert totals["mean_running_seqs"] == 3
    assert totals["slot_occupancy"] == 3 / run.plan.max_num_seqs
    assert sum(step["nvme_bytes"] for step in report["steps"]) == io["bytes_read"]
    assert io["mean_read_bytes"] == pytest.approx(io["bytes_read"] / io["num_reads"])
    assert 0 < report["time"]["compute_s"] <= totals["wall_s"]
    assert report["time"]["other_s"] >= 0
    assert 0 < totals["load_s"] <= totals["wall_s"]
    assert totals["load_s"] < totals["first_layer_s"], "counted from the start of the process"
    assert report["plan"]["weights"]["dram"] == 0
    assert report["plan"]["weights"]["nvme"] == report["model"]["weight_bytes"]
    assert report["model"]["dtype"] == "fp32"
    assert 0 < report["roofline"]["efficiency"] <= 1
    assert report["roofline"]["io_s"] == pytest.approx(
        io["bytes_read"] / report["profile"]["nvme_read_bytes_per_s"]
    )


def test_queued_occupancy_counts_only_steps_with_a_queue(folder):
    settings = {**STREAMED, "scheduler.max_num_seqs": 2}
    run = run_rows(folder, [[1], [2], [3]], settings, max_tokens=3)
    totals = run.report["totals"]
    assert totals["num_steps"] == 6
    assert totals["num_steps_queued"] == 4
    # The fourth step begins with the last request waiting, and runs it alone.
    assert totals["slot_occupancy_queued"] == (2 + 2 + 2 + 1) / 4 / 2
    assert totals["slot_occupancy"] == pytest.approx(9 / 6 / 2)


def test_resumed_tokens_are_counted_apart(folder):
    request = Request(
        request_id=0, prompt_token_ids=(1, 2, 3), generated_token_ids=(7, 8, 9),
        sampling=SamplingParams(max_tokens=5, ignore_eos=True),
    )  # fmt: skip
    with open_engine(folder, [request], STREAMED) as engine:
        totals = drive(engine, [request]).report["totals"]
    assert totals["num_prompt_tokens"] == 3
    assert totals["num_generated_tokens"] == 2
    # The last generated token would have been computed by the next step anyway.
    assert totals["num_rebuilt_tokens"] == 2


def test_freed_places_are_filled_at_once(folder):
    settings = {**STREAMED, "scheduler.max_num_seqs": 2}
    requests = [_request([idx + 1], idx, max_tokens=n, ignore_eos=True)
                for idx, n in enumerate((1, 5, 4))]  # fmt: skip
    with open_engine(folder, requests, settings) as engine:
        run = drive(engine, requests)
    assert [step.num_seqs for step in run.steps] == [2] * 5
    assert [len(ids) for ids in run.ids] == [1, 5, 4]


def test_too_small_a_budget_is_refused_with_the_remedy(folder):
    config = engine_config({"offload.dram": "10MiB"})
    with pytest.raises(CapacityError, match=r"DRAM budget 10.* is too small: need .*set --dram"):
        Engine.open(config, checkpoint=open_checkpoint(folder), tokenizer=None, workload=Workload())


def test_longer_than_the_model_is_refused(folder):
    config = engine_config({"scheduler.max_model_len": 65})
    with pytest.raises(ConfigError, match=r"max_model_len is too large: got 65, .* end at 64"):
        Engine.open(config, checkpoint=open_checkpoint(folder), tokenizer=None, workload=Workload())


def test_close_is_idempotent(folder):
    with open_engine(folder, greedy_requests([[1]]), STREAMED) as engine:
        engine.close()
    engine.close()
