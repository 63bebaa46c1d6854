"""The setting `io.reader` as the engine takes it."""

import pytest

from tests.helpers.checkpoints import tiny_llama
from tests.helpers.engines import assert_same_bits, greedy_requests, open_engine, run_requests
from zeroinfer.errors import BackendUnavailableError
from zeroinfer.native import ThreadReader, UringReader, uring_error, uring_reader

REQUESTS = greedy_requests([(5, 6, 7, 8), (11, 12)], max_tokens=3)
STREAMED = {"offload.weights": "nvme", "offload.fetch_unit_bytes": "8KiB"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("model") / "llama")


@pytest.mark.io_uring
@pytest.mark.skipif(uring_error() is not None, reason=f"no io_uring: {uring_error()}")
def test_the_reader_changes_no_bit_and_the_plan_names_it(folder):
    runs = {}
    for name, reader_class in (("threads", ThreadReader), ("io_uring", UringReader)):
        settings = {**STREAMED, "io.reader": name}
        with open_engine(folder, REQUESTS, settings) as engine:
            assert isinstance(engine._streaming.reader, reader_class)
        runs[name] = run_requests(folder, REQUESTS, settings)
        assert any(f"in flight by {name}" in note for note in runs[name].plan.notes)
    assert_same_bits(runs["io_uring"], runs["threads"])
    assert runs["io_uring"].report["io"]["nvme"]["bytes_read"] > 0


def test_io_uring_that_cannot_be_had_is_refused_by_name(folder, monkeypatch):
    # Source: DeepSpeed#1037.
    monkeypatch.setattr(uring_reader, "extension", None)
    monkeypatch.setattr(uring_reader, "extension_error", "zeroinfer._C is missing")
    message = "the reader io_uring is not available: zeroinfer._C is missing; or use --reader"
    with (
        pytest.raises(BackendUnavailableError, match=message),
        open_engine(folder, REQUESTS, {**STREAMED, "io.reader": "io_uring"}),
    ):
        raise AssertionError("the engine opened without its reader")
