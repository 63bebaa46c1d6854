"""What a closed engine held is free as soon as nobody refers to it, however it ended."""

import weakref

import pytest

from tests.helpers.checkpoints import tiny_llama
from tests.helpers.collector import without_collector
from tests.helpers.engines import engine_config, greedy_requests, workload_of
from tests.helpers.io_shim import PreadvShim
from zeroinfer.diskformat import open_checkpoint
from zeroinfer.engine import Engine, StepInterrupted
from zeroinfer.errors import StorageError
from zeroinfer.memory import DoubleDevice
from zeroinfer.native import ThreadReader

MOST_ROW_BYTES = 8192
"""A row of the embedding is read in fewer bytes, a unit in more."""

ENDINGS = {
    "end": None,
    "stop": StepInterrupted,
    "failed row": StorageError,
    "failed unit": StorageError,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("release") / "llama")


def _open(folder, requests, weights, shim, *, has_device):
    return Engine.open(
        engine_config({"offload.weights": weights}),
        checkpoint=open_checkpoint(folder),
        tokenizer=None,
        workload=workload_of(requests),
        reader=ThreadReader.open(io_chunk_bytes=1 << 20, queue_depth=2, preadv=shim),
        device=DoubleDevice.open() if has_device else None,
    )


def _bring_about(ending, engine, shim):
    """Make the run end in its way; reads come from threads that know the engine weakly."""
    known = weakref.ref(engine)
    if ending == "stop":
        shim.fails_at = lambda call: known().request_stop()
    if ending == "failed row":
        shim.fails_at = lambda call: call.num_bytes <= MOST_ROW_BYTES
    if ending == "failed unit":
        shim.fails_at = lambda call: call.num_bytes > MOST_ROW_BYTES


def _run(engine, requests):
    """Run as far as it goes and return the class of what ended it."""
    for request in requests:
        engine.add_request(request)
    try:
        while engine.has_unfinished_requests():
            engine.step()
    except (StepInterrupted, StorageError) as error:
        return type(error)
    return None


def _held(engine):
    """Weak references to the engine and to the memory it holds."""
    homes = engine._streaming._store.homes.values()
    arenas = {home.arena.name: home.arena for home in homes}
    assert arenas
    planes = {f"{name} of layer 0": plane for name, plane in engine._kv._planes[0].items()}
    mappings = {name: arena._mapping for name, arena in arenas.items()}
    held = {"engine": engine, **planes, **mappings}
    return {name: weakref.ref(thing) for name, thing in held.items()}


@pytest.mark.parametrize("has_device", [False, True], ids=["cpu", "device"])
@pytest.mark.parametrize(
    ("weights", "ending"), [("dram", "end"), *(("nvme", ending) for ending in ENDINGS)]
)
def test_closed_engine_is_free_at_once(folder, weights, ending, has_device):
    requests = greedy_requests([[1, 2, 3], [4]], max_tokens=3)
    shim = PreadvShim()
    with without_collector():
        engine = _open(folder, requests, weights, shim, has_device=has_device)
        held = _held(engine)
        _bring_about(ending, engine, shim)
        assert _run(engine, requests) is ENDINGS[ending]
        engine.close()
        del engine
        assert [name for name, thing in held.items() if thing() is not None] == []
