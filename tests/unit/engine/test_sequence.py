import pytest

from tests.helpers.scripted_model import write_scripted_model
from tests.helpers.tokenizers import EOS_ID, EOT_ID, byte_ids
from zeroinfer.engine.request import FinishReason, Request, SamplingParams
from zeroinfer.engine.sequence import Sequence
from zeroinfer.tokenization import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer.open(write_scripted_model(tmp_path_factory.mktemp("scripted")))


def _sequence(tokenizer=None, *, generated=(), max_model_len=100, **sampling):
    request = Request(
        request_id=4,
        prompt_token_ids=(10, 11),
        sampling=SamplingParams(**sampling),
        generated_token_ids=generated,
    )
    return Sequence(
        request,
        tokenizer=tokenizer,
        eos_token_ids=frozenset({EOS_ID, EOT_ID}),
        max_model_len=max_model_len,
    )


def _feed(sequence, ids):
    for token_id in ids:
        sequence.append(token_id)
    return sequence


def test_ends_at_max_tokens():
    sequence = _feed(_sequence(max_tokens=2), [50])
    assert not sequence.is_finished
    finished = _feed(sequence, [51]).to_finished()
    assert finished.finish_reason is FinishReason.LENGTH
    assert finished.token_ids == (50, 51)
    assert finished.num_prompt_tokens == 2
    assert finished.text is None
    assert finished.request_id == 4


def test_ends_at_the_longest_sequence():
    sequence = _feed(_sequence(max_tokens=50, max_model_len=4), [50, 51])
    assert sequence.finish_reason is FinishReason.LENGTH
    assert sequence.max_total_tokens == 4


@pytest.mark.parametrize("end", [EOS_ID, EOT_ID])
def test_ends_at_any_end_id(end, tokenizer):
    finished = _feed(_sequence(tokenizer), [*byte_ids("hi"), end]).to_finished()
    assert finished.finish_reason is FinishReason.STOP
    assert finished.text == "hi"
    assert finished.token_ids[-1] == end


def test_ignore_eos_goes_on():
    sequence = _feed(_sequence(ignore_eos=True, max_tokens=5), [EOS_ID, 50, EOT_ID])
    assert not sequence.is_finished
    assert sequence.num_generated_tokens == 3


def test_end_id_at_max_tokens_is_a_stop():
    assert _feed(_sequence(max_tokens=1), [EOS_ID]).finish_reason is FinishReason.STOP


def test_ends_at_a_stop_string_cut_exactly(tokenizer):
    sequence = _feed(_sequence(tokenizer, stop=("bc",)), byte_ids("abc"))
    finished = sequence.to_finished()
    assert finished.finish_reason is FinishReason.STOP
    assert finished.text == "a"


def test_start_of_a_stop_string_stays_in_the_text(tokenizer):
    finished = _feed(_sequence(tokenizer, stop=("bcd",), max_tokens=3), byte_ids("abc"))
    assert finished.to_finished().text == "abc"


def test_nothing_is_added_after_the_end():
    sequence = _feed(_sequence(max_tokens=1), [50, 51])
    assert sequence.token_ids == [10, 11, 50]


def test_fail_keeps_tokens_and_says_why():
    sequence = _feed(_sequence(max_tokens=9), [50])
    sequence.fail("values are not finite")
    finished = sequence.to_finished()
    assert finished.finish_reason is FinishReason.ERROR
    assert finished.error == "values are not finite"
    assert finished.token_ids == (50,)


def test_counts_of_a_resumed_sequence():
    sequence = _sequence(generated=(50, 51, 52), max_tokens=9)
    assert sequence.num_generated_tokens == 3
    assert sequence.num_rebuilt_tokens == 3
    assert sequence.num_uncomputed_tokens == 5
    sequence.num_computed_tokens = 5
    _feed(sequence, [53])
    assert sequence.num_uncomputed_tokens == 1
    assert sequence.num_prompt_tokens == 2


@pytest.mark.parametrize("generated", [(50, 51, 52), (EOS_ID,)])
def test_resumed_sequence_may_have_ended_already(generated):
    assert _sequence(generated=generated, max_tokens=3).is_finished


def test_resumed_text_is_whole(tokenizer):
    ids = byte_ids("hello")
    sequence = _feed(_sequence(tokenizer, generated=tuple(ids[:3]), max_tokens=5), ids[3:])
    assert sequence.to_finished().text == "hello"


def test_stop_string_across_a_resume(tokenizer):
    ids = byte_ids("hello")
    sequence = _sequence(tokenizer, generated=tuple(ids[:3]), stop=("ll",), max_tokens=9)
    assert _feed(sequence, ids[3:]).to_finished().text == "he"


def test_last_token_needs_no_further_step():
    sequence = _sequence(max_tokens=2)
    assert sequence.may_need_another_step
    _feed(sequence, [50])
    sequence.num_computed_tokens = 2
    assert not sequence.may_need_another_step


def test_running_sequence_has_no_result():
    with pytest.raises(AssertionError, match="request 4 still runs"):
        _sequence().to_finished()
