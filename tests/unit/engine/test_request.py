import pytest

from zeroinfer.engine import FinishedRequest, FinishReason, SamplingParams, Workload
from zeroinfer.errors import RequestError


def test_workload_sums_up_requests():
    assert Workload.of([]) is None
    assert Workload.of([(3, 10), (5, 2)]) == Workload(
        num_requests=2, max_prompt_tokens=5, total_prompt_tokens=8, max_new_tokens=10
    )


def test_workload_covers_what_is_no_more_and_no_longer():
    planned = Workload.of([(3, 10), (5, 2)])
    for sizes in ([(3, 10), (5, 2)], [(1, 1)], [(5, 10)]):
        assert planned.covers(Workload.of(sizes))
    for sizes in ([(1, 1)] * 3, [(6, 1)], [(1, 11)], [(5, 1), (4, 1)]):
        assert not planned.covers(Workload.of(sizes))


def test_usage_counts_prompt_and_answer():
    finished = FinishedRequest(
        request_id=0, token_ids=(7, 8), text=None, finish_reason=FinishReason.STOP,
        num_prompt_tokens=5,
    )  # fmt: skip
    assert finished.usage == {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_tokens": "8"}, "max_tokens"),
        ({"max_tokens": 8.5}, "max_tokens"),
        ({"top_k": 2.5}, "top_k"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": None}, "top_p"),
        ({"seed": True}, "seed"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"stop": ["a", 3]}, r"stop\[1\]"),
        ({"stop": None}, "stop has the wrong type: got null, need a string or a list of strings"),
        ({"stop": {"a": 1}}, "stop has the wrong type: got an object"),
        ({"stop": 5}, "stop has the wrong type: got an integer"),
    ],
)
def test_a_sampling_of_the_wrong_type_is_refused_by_name(values, message):
    with pytest.raises(RequestError, match=message):
        SamplingParams(**values)
