import json

import pytest

import zeroinfer.cli.env
import zeroinfer.cli.profile
from tests.helpers.gguf_files import write_llama_gguf
from zeroinfer.cli import main
from zeroinfer.errors import CapacityError, RequestError
from zeroinfer.native import extension_error, resolve_reader, uring_error
from zeroinfer.planner import DiskCell, MatmulRate, Profile


@pytest.fixture
def base(tmp_path, scripted_folder, facade):
    return ["--nvme", str(tmp_path / "nvme"), "--model", str(scripted_folder)]


def test_plan_prints_the_table_only(base, capsys, facade):
    assert main(["plan", *base]) == 0
    assert capsys.readouterr().out == "the plan's table\n"
    assert facade.opened == []


def test_plan_as_json(base, capsys):
    assert main(["plan", *base, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"event": "plan", "max_num_seqs": 4}


PROFILE = Profile(
    nvme_read_bytes_per_s=2e9,
    io_chunk_bytes=1 << 20,
    queue_depth=4,
    dram_copy_bytes_per_s=9e9,
    matmul_flops_per_s=(MatmulRate("bf16", "native", 16, 5e10),),
    grid=(DiskCell(1 << 20, 2, 1e9), DiskCell(1 << 20, 4, 2e9), DiskCell(4 << 20, 2, 1.5e9)),
    filesystem="ext4 on a disk",
)


def test_profile_prints_grid_and_rates(base, capsys, monkeypatch, scripted_folder):
    calls = []

    def measure(nvme, files, *, reader, is_forced):
        calls.append((reader, files, is_forced))
        return PROFILE

    monkeypatch.setattr(zeroinfer.cli.profile, "load_or_measure", measure)
    assert main(["profile", *base, "--reader", "threads"]) == 0
    out = capsys.readouterr().out
    assert "ext4 on a disk: direct reads in GB/s" in out
    rows = [line.replace("\u2502", " ").split() for line in out.splitlines()]
    assert ["1.0", "MiB", "1.00", "2.00*"] in rows
    assert ["4.0", "MiB", "1.50", "-"] in rows
    assert "2.00 GB/s" in out
    assert "50 GFLOP/s" in out
    assert calls == [("threads", (scripted_folder / "model.safetensors",), True)]


def test_convert_then_verify_then_damage(tmp_path, capsys):
    source = tmp_path / "m.gguf"
    write_llama_gguf(source)
    nvme = tmp_path / "nvme"
    assert main(["convert", "--model", str(source), "--nvme", str(nvme)]) == 0
    folder = capsys.readouterr().out.strip()
    assert folder.startswith(str(nvme))
    assert main(["verify", "--model", folder]) == 0
    assert "is whole" in capsys.readouterr().out
    weights = next(path for path in (nvme).rglob("*.safetensors"))
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert main(["verify", "--model", folder]) == 4
    assert "is damaged: sha256 is" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["convert", "--nvme", "x"], "convert needs --model and --nvme DIR: got no --model"),
        (["convert", "--model", "x"], "got no --nvme"),
        (["verify"], "verify needs --model with the folder of a store: got none"),
        (["bench", "--batch-sizes", "1,x"], "--batch-sizes is not understood: got '1,x'"),
    ],
)  # fmt: skip
def test_missing_options_are_named(args, message, capsys):
    assert main(args) == 2
    assert message in capsys.readouterr().err


def test_gguf_as_a_model_points_to_convert(tmp_path, capsys, facade):
    source = tmp_path / "m.gguf"
    write_llama_gguf(source)
    assert main(["--model", str(source), "--nvme", str(tmp_path)]) == 4
    err = capsys.readouterr().err
    assert "is a GGUF file, whose packed values cannot be streamed" in err
    assert f"zeroinfer convert --model {source} --nvme {tmp_path}" in err


def bench_rows(out):
    return [line.replace("\u2502", " ").split() for line in out.splitlines()]


def test_bench_measures_each_batch(base, capsys, facade):
    args = ["bench", *base, "--batch-sizes", "1,3", "--tokens", "5", "--prompt-tokens", "4"]
    assert main(args) == 0
    assert [engine.config.scheduler.max_num_seqs for engine in facade.opened] == [1, 3]
    assert [len(engine.added) for engine in facade.opened] == [1, 3]
    request = facade.opened[1].added[0]
    assert len(request.prompt_token_ids) == 4
    assert (request.sampling.max_tokens, request.sampling.ignore_eos) == (5, True)
    rows = bench_rows(capsys.readouterr().out)
    assert {row[0] for row in rows if row and row[0].isdecimal()} >= {"1", "3"}


def test_bench_shows_oom_where_a_batch_does_not_fit(base, capsys, facade, monkeypatch):
    def refuse_large(engine):
        if engine.workload.num_requests > 1:
            raise CapacityError("kv needs 9.0 GiB, but 1.0 GiB is free\ntable")

    monkeypatch.setattr(facade, "on_open", refuse_large)
    assert main(["bench", *base, "--batch-sizes", "1,512", "--tokens", "2"]) == 0
    assert ["512", "-", "OOM", "-", "-"] in bench_rows(capsys.readouterr().out)
    assert main(["bench", *base, "--batch-sizes", "1,512", "--tokens", "2", "--json"]) == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert events[1]["oom"] == "kv needs 9.0 GiB, but 1.0 GiB is free"
    num_tokens = events[0]["batch_size"] * 2
    assert events[0]["ms_per_token"] == pytest.approx(events[0]["wall_s"] / num_tokens * 1e3)


def test_bench_beyond_the_window_is_refused(base, capsys, facade, monkeypatch):
    def refuse(request):
        raise RequestError("prompt of 99 tokens, window 64")

    monkeypatch.setattr(facade, "on_open", lambda engine: setattr(engine, "add_request", refuse))
    assert main(["bench", *base, "--batch-sizes", "1"]) == 2
    assert "--prompt-tokens and --tokens do not fit the model" in capsys.readouterr().err


def test_bench_that_would_end_at_the_window_is_refused(base, capsys, facade, monkeypatch):
    monkeypatch.setattr(facade, "on_open", lambda engine: setattr(engine, "max_model_len", 64))
    shape = ["--batch-sizes", "1", "--prompt-tokens", "4", "--tokens"]
    assert main(["bench", *base, *shape, "61"]) == 2
    assert "do not fit the model: got 65, need at most the 64" in capsys.readouterr().err
    assert main(["bench", *base, *shape, "60"]) == 0


def test_env_as_json(tmp_path, capsys):
    assert main(["env", "--nvme", str(tmp_path / "not" / "made"), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["readers"]["threads"] == "available"
    assert facts["packages"]["torch"][0].isdecimal()
    assert "free" in facts[f"disk of {tmp_path / 'not' / 'made'}"]
    assert not (tmp_path / "not").exists()


def test_env_says_what_is_compiled_and_what_auto_reads_with(capsys):
    assert main(["env", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["native"]["extension"] == (extension_error or "available")
    assert facts["readers"]["auto"] == resolve_reader("auto")
    assert facts["readers"]["io_uring"].startswith(
        "not available" if uring_error() else "available"
    )


def test_env_names_what_io_uring_lacks(capsys, monkeypatch):
    monkeypatch.setattr(zeroinfer.cli.env, "uring_error", lambda: "the kernel forbids it")
    monkeypatch.setattr(zeroinfer.cli.env, "extension_error", "it was not built")
    assert main(["env"]) == 0
    out = capsys.readouterr().out
    assert "  extension: it was not built\n" in out
    assert "  io_uring: not available: the kernel forbids it\n" in out


def test_env_for_people(capsys):
    assert main(["env"]) == 0
    assert "usable CPUs: " in capsys.readouterr().out
