import pytest
import torch

from zeroinfer.engine.batch import pack
from zeroinfer.engine.request import Request, SamplingParams
from zeroinfer.engine.scheduler import Scheduled
from zeroinfer.engine.sequence import Sequence
from zeroinfer.native import ProductKernel


def _scheduled(prompt, *, generated=(), computed=0, count, table=(0,)):
    request = Request(
        request_id=0, prompt_token_ids=prompt, generated_token_ids=generated,
        sampling=SamplingParams(max_tokens=20),
    )  # fmt: skip
    sequence = Sequence(request, tokenizer=None, eos_token_ids=frozenset(), max_model_len=100)
    sequence.num_computed_tokens, sequence.block_table = computed, table
    return Scheduled(sequence=sequence, num_scheduled_tokens=count)


@pytest.mark.parametrize("is_batch_invariant", [False, True])
def test_pack(is_batch_invariant):
    kernel = ProductKernel.resolve(
        torch.float32, num_threads=1, is_batch_invariant=is_batch_invariant
    )
    batch = pack(
        [
            _scheduled((11, 12, 13, 14), computed=2, count=1, table=(3, 1)),
            _scheduled((21, 22, 23), count=3),
            _scheduled((31, 32), generated=(33, 34), computed=3, count=1),
        ],
        kernel,
    )
    assert batch.num_rows == 5
    num_padded = kernel.row_tile if is_batch_invariant else 5
    for rows in (batch.input_ids, batch.positions, batch.rope_lengths):
        assert rows.shape == (num_padded,)
    assert batch.input_ids[:5].tolist() == [13, 21, 22, 23, 34]
    assert batch.positions[:5].tolist() == [2, 0, 1, 2, 3]
    # A prompt is scaled by its whole length, a generated token by its own position.
    assert batch.rope_lengths[:5].tolist() == [4, 3, 3, 3, 4]
    assert not batch.input_ids[5:].any()
    assert not batch.positions[5:].any()
    assert (batch.rope_lengths[5:] == 1).all()
    assert batch.logits_indices.tolist() == [3, 4], "the first prompt is not finished"
    starts = [(piece.row_start, piece.num_rows, piece.stop_position) for piece in batch.sequences]
    assert starts == [(0, 1, 3), (1, 3, 3), (4, 1, 4)]
    assert batch.sequences[0].block_table == (3, 1)
