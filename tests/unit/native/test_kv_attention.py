"""Attention over blocks of the KV cache, against one softmax per head in double precision."""

import itertools
from dataclasses import dataclass, replace

import pytest
import torch

from zeroinfer.native import RowKernels
from zeroinfer.native import kernels as kernels_module

FUSED = RowKernels(is_fused=True)
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 2**-7}
dtypes = pytest.mark.parametrize("dtype", TOLERANCES, ids=str)


@pytest.fixture(params=["scalar", "fast"])
def each_variant(request, monkeypatch):
    """Run a test with the scalar reference, which runs on no thread, and with the fast variant."""
    count = int(request.param == "fast")
    monkeypatch.setattr(kernels_module.torch, "get_num_threads", lambda: count)


@dataclass(frozen=True, kw_only=True)
class Case:
    """Sequences of some lengths, of which the last rows are asked for."""

    lengths: tuple[int, ...] = (1, 8, 70, 13)
    num_rows: tuple[int, ...] = (1, 8, 1, 5)
    heads: tuple[int, int] = (4, 2)
    head_dim: int = 16
    block_size: int = 8
    window: int | None = None
    has_bias: bool = False
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype = torch.float32


class World:
    """Keys, values and queries of a case, stored in blocks that lie in no order."""

    def __init__(self, case):
        generator = torch.Generator().manual_seed(0)
        num_heads, num_kv_heads = case.heads

        def random(*shape):
            return torch.randn(shape, generator=generator)

        self.case = case
        self.queries = [random(n, num_heads, case.head_dim).to(case.dtype) for n in case.lengths]
        self.keys, self.values = (
            [random(n, num_kv_heads, case.head_dim) for n in case.lengths] for _ in "kv"
        )
        self.bias = random(num_heads, max(case.lengths)) if case.has_bias else None
        per_sequence = -(-max(case.lengths) // case.block_size)
        num_blocks = per_sequence * len(case.lengths)
        shape = (num_blocks, num_kv_heads, case.block_size, case.head_dim)
        # What was never written must not matter.
        self.planes = tuple(torch.full(shape, float("nan"), dtype=case.kv_dtype) for _ in "kv")
        order = torch.randperm(num_blocks, generator=generator)
        self.tables = order.view(len(case.lengths), per_sequence)
        for idx, length in enumerate(case.lengths):
            positions = torch.arange(length)
            slots = self.tables[idx][positions // case.block_size] * case.block_size
            slots += positions % case.block_size
            FUSED.write_kv(self.keys[idx], slots, self.planes[0])
            FUSED.write_kv(self.values[idx], slots, self.planes[1])

    def attend(self, pieces=None):
        """Attend rows [start, stop) of the sequences named, the case's own last rows by default."""
        case = self.case
        pieces = pieces or [
            (idx, length - rows, length)
            for idx, (length, rows) in enumerate(zip(case.lengths, case.num_rows, strict=True))
        ]
        query = torch.cat([self.queries[idx][start:stop] for idx, start, stop in pieces])
        sequences, row = [], 0
        for _, start, stop in pieces:
            sequences.append((row, stop - start, start))
            row += stop - start
        out = torch.zeros_like(query)
        FUSED.attend(
            query, out, planes=self.planes, sequences=torch.tensor(sequences),
            tables=self.tables[[idx for idx, _, _ in pieces]], scale=0.3, window=case.window,
            bias_HL=self.bias,
        )  # fmt: skip
        return out.split([stop - start for _, start, stop in pieces])

    def by_definition(self, idx, position):
        """One row, head by head."""
        case, group = self.case, self.case.heads[0] // self.case.heads[1]
        oldest = 0 if case.window is None else max(0, position + 1 - case.window)
        seen = slice(oldest, position + 1)
        rows = []
        for head in range(case.heads[0]):
            keys, values = (
                stored[idx][seen, head // group].to(case.kv_dtype).double()
                for stored in (self.keys, self.values)
            )
            scores = keys @ self.queries[idx][position, head].double() * 0.3
            if self.bias is not None:
                scores += self.bias[head, seen].double()
            rows.append(scores.softmax(0) @ values)
        return torch.stack(rows)


CASES = {
    "plain": Case(),
    "multi-head": Case(heads=(3, 3)),
    "multi-query": Case(heads=(5, 1)),
    "many-heads-of-one": Case(heads=(37, 1), head_dim=8),
    "bias": Case(has_bias=True),
    "window": Case(window=7),
    "window-over-tiles": Case(window=65, lengths=(70, 130, 200), num_rows=(1, 3, 130)),
    "window-and-bias": Case(window=5, has_bias=True),
    "long-prompts": Case(lengths=(150, 67), num_rows=(150, 40)),
    "odd-head": Case(head_dim=12),
    "tiny-head": Case(head_dim=3),
    "large-head": Case(head_dim=256, lengths=(5, 9), num_rows=(1, 9)),
    "one-block": Case(block_size=128),
    "tiny-blocks": Case(block_size=3),
    "no-rows": Case(num_rows=(1, 0, 1, 0)),
}


@pytest.mark.usefixtures("each_variant")
@dtypes
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kv_dtype", TOLERANCES, ids=str)
def test_attention(name, dtype, kv_dtype):
    case = replace(CASES[name], dtype=dtype, kv_dtype=kv_dtype)
    world = World(case)
    outs = world.attend()
    for idx, (out, length) in enumerate(zip(outs, case.lengths, strict=True)):
        for row, position in enumerate(range(length - len(out), length)):
            want, tolerance = world.by_definition(idx, position), TOLERANCES[dtype]
            torch.testing.assert_close(out[row].double(), want, atol=2 * tolerance, rtol=tolerance)


@pytest.mark.parametrize("name", ["plain", "window", "bias", "many-heads-of-one"])
def test_cuts_and_mates_change_no_bit(name):
    """A prompt at once, in pieces and token by token, alone and beside others."""
    world = World(
        replace(CASES[name], lengths=(90, 41), num_rows=(90, 41), kv_dtype=torch.bfloat16)
    )
    whole = world.attend([(0, 0, 90)])[0]
    for cuts in ([0, 64, 90], [0, 1, 5, 23, 90], list(range(91))):
        pieces = [(0, start, stop) for start, stop in itertools.pairwise(cuts)]
        assert torch.equal(torch.cat(world.attend(pieces)), whole)
    mixed = world.attend([(1, 40, 41), (0, 80, 90), (1, 0, 40)])
    assert torch.equal(mixed[1], whole[80:])


@pytest.mark.parametrize("name", ["plain", "window", "odd-head"])
def test_block_size_and_threads_change_no_bit(name, monkeypatch):
    lengths, num_rows = (300, 129, 2), (300, 1, 2)
    case = replace(CASES[name], lengths=lengths, num_rows=num_rows, heads=(8, 4))
    want = World(case).attend()
    for block_size in (1, 5, 64, 1000):
        for num_threads in (1, 2, 3):
            monkeypatch.setattr(kernels_module.torch, "get_num_threads", lambda n=num_threads: n)
            got = World(replace(case, block_size=block_size)).attend()
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_rows_of_no_sequence_are_left_alone():
    world = World(Case())
    query, out = torch.ones(9, 4, 16), torch.full((9, 4, 16), 7.0)
    FUSED.attend(
        query, out, planes=world.planes, sequences=torch.tensor([[2, 1, 0], [5, 3, 5]]),
        tables=world.tables[1:3], scale=1.0,
    )  # fmt: skip
    is_left = (out == 7).all(-1).all(-1)
    assert is_left.tolist() == [True, True, False, True, True, False, False, False, True]


def test_a_bad_key_spoils_the_rows_that_see_it():
    world = World(Case(lengths=(100,), num_rows=(100,)))
    block, offset = int(world.tables[0][50 // 8]), 50 % 8
    world.planes[0][block, :, offset] = float("nan")
    (out,) = world.attend()
    assert out[:50].isfinite().all()
    assert out[50:].isnan().any(-1).all()


@pytest.mark.parametrize(
    ("sequences", "tables"),
    [
        ([[0, 9, 0]], [[0, 1]]),
        ([[-1, 1, 0]], [[0, 1]]),
        ([[0, 1, -1]], [[0, 1]]),
        ([[0, 1, 16]], [[0, 1]]),
        ([[0, 1, 8]], [[0, 99]]),
        ([[0, 1, 0]], [[-1, 0]]),
    ],
)
def test_rows_and_blocks_outside_are_refused(sequences, tables):
    world = World(Case())
    query = torch.ones(4, 4, 16)
    with pytest.raises(ValueError, match="the kernel refused sizes, slots or block tables"):
        FUSED.attend(
            query, query.clone(), planes=world.planes, sequences=torch.tensor(sequences),
            tables=torch.tensor(tables), scale=1.0,
        )  # fmt: skip


def test_heads_too_large_are_left_to_torch():
    assert FUSED.can_attend(torch.ones(1, 1, 512))
    assert not FUSED.can_attend(torch.ones(1, 1, 520))
    assert not FUSED.can_attend(torch.ones(1, 1, 8, dtype=torch.float16))
    assert not RowKernels(is_fused=False).can_attend(torch.ones(1, 1, 8))
