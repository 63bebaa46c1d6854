"""``convert`` and ``generate`` with --copy and --stripe, and the line that offers a copy."""

import dataclasses
import io
import json
import os
import sys

import pytest
import torch

import zeroinfer.cli.copying
import zeroinfer.cli.profile
from tests.helpers.checkpoints import tiny_llama, tiny_model, write_bin
from tests.helpers.gguf_files import write_llama_gguf
from zeroinfer.checkpoint import read_manifest
from zeroinfer.cli import main
from zeroinfer.diskformat import open_checkpoint
from zeroinfer.planner import Profile


@pytest.fixture
def dirs(tmp_path):
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        folder.mkdir()
    return folders


def convert(capsys, *args):
    code = main(["convert", *map(str, args)])
    captured = capsys.readouterr()
    return code, captured.out.strip(), captured.err


def test_convert_a_folder_of_pickles(tmp_path, dirs, capsys):
    folder = write_bin(tmp_path / "m", tiny_model("llama"))
    code, store, err = convert(capsys, "--model", folder, "--nvme", dirs[0], "--dtype", "bf16")
    assert code == 0, err
    checkpoint = open_checkpoint(tmp_path / store)
    assert {e.spec.dtype.short_name for e in checkpoint.tensors.values()} == {"bf16"}
    assert main(["verify", "--model", store]) == 0


def test_convert_stripes_and_verify_finds_damage(tmp_path, dirs, capsys):
    folder = tiny_llama(tmp_path / "m")
    args = ["--model", folder, "--stripe", "--nvme", dirs[0], "--nvme", dirs[1]]
    code, store, err = convert(capsys, *args)
    assert code == 0, err
    assert main(["verify", "--model", store]) == 0
    path = next(dirs[1].rglob("*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert main(["verify", "--model", store]) == 4
    assert "is damaged" in capsys.readouterr().err


def test_convert_puts_a_copy_into_the_order_of_use(tmp_path, dirs, capsys):
    folder = tiny_llama(tmp_path / "m", tie_word_embeddings=False)
    code, store, err = convert(capsys, "--model", folder, "--copy", "--nvme", dirs[0])
    assert code == 0, err
    index = json.loads((tmp_path / store / "model.safetensors.index.json").read_text())
    extents = open_checkpoint(tmp_path / store).tensors
    assert set(index["weight_map"]) == set(extents)
    aligned = [n for n, e in extents.items() if e.spec.nbytes % 4096 == 0]
    by_offset = sorted(aligned, key=lambda name: extents[name].offset)
    layers = [name.split(".")[2] for name in by_offset if ".layers." in name]
    assert layers == sorted(layers)
    assert "self_attn" in by_offset[0]
    assert "mlp" in by_offset[4]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--stripe", "--nvme", "a"], "got 1 --nvme with --stripe, need two --nvme or more"),
        (["--nvme", "a", "--nvme", "b"], "got 2 --nvme without --stripe, need one --nvme, or --st"),
        (["--nvme", "a"], "holds safetensors, which are streamed where they lie: got neither"),
    ],
)
def test_convert_refuses_what_makes_no_sense(tmp_path, monkeypatch, capsys, flags, message):
    monkeypatch.chdir(tmp_path)
    folder = tiny_llama(tmp_path / "m")
    code, _, err = convert(capsys, "--model", folder, *flags)
    assert code == 2
    assert message in err


def test_a_missing_folder_of_a_stripe_is_named_and_not_made(tmp_path, dirs, capsys):
    folder = tiny_llama(tmp_path / "m")
    args = ["--model", folder, "--stripe", "--nvme", dirs[0], "--nvme", tmp_path / "none"]
    code, _, err = convert(capsys, *args)
    assert code == 4
    assert f"folder {tmp_path / 'none'} of a striped store does not exist" in err
    code = main(["--copy", *map(str, args), "--output", str(tmp_path / "out.jsonl")])
    assert code == 4
    assert f"--nvme folder {tmp_path / 'none'} does not exist" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("flags", [["--stripe"], ["--stripe", "--copy"]])
def test_stripe_needs_a_copy_and_two_folders(scripted_folder, dirs, capsys, flags):
    assert main([*flags, "--model", str(scripted_folder), "--nvme", str(dirs[0])]) == 2
    assert "--stripe spreads a copy over several folders: need --copy" in capsys.readouterr().err


@pytest.fixture
def job(tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt_token_ids": [5, 6, 7]}\n')
    output = ["--output", str(tmp_path / "out.jsonl"), "--overwrite"]
    return ["--input", str(source), "--max-tokens", "2", *output]


@pytest.mark.parametrize("is_striped", [False, True])
def test_generate_copies_and_streams_from_the_copy(tmp_path, dirs, capsys, facade, job, is_striped):
    folder = tiny_llama(tmp_path / "m")
    args = ["--model", str(folder), "--nvme", str(dirs[0]), "--copy", *job]
    if is_striped:
        args += ["--nvme", str(dirs[1]), "--stripe"]
    for _ in range(2):
        assert main(args) == 0, capsys.readouterr().err
    stores = {engine.checkpoint.root for engine in facade.opened}
    (store,) = stores
    assert store.is_relative_to(dirs[0] / "models")
    assert bool(read_manifest(store).stripes) is is_striped
    assert len(list((dirs[0] / "models").glob("[!.]*"))) == 1
    assert main([*args, "--model", str(store)]) == 0
    assert len(list((dirs[0] / "models").glob("[!.]*"))) == 1


@pytest.mark.parametrize("kind", ["gguf", "pickles"])
def test_generate_finds_an_earlier_store_or_says_how_to_make_one(
    tmp_path, dirs, capsys, facade, job, kind
):
    source = tmp_path / "my m.gguf"
    if kind == "gguf":
        write_llama_gguf(source)
    else:
        source = write_bin(tmp_path / "my m", tiny_model("llama"))
    args = ["--model", str(source), "--nvme", str(dirs[0]), *job]
    assert main(args) == 4
    err = capsys.readouterr().err
    assert f"run: zeroinfer convert --model '{source}' --nvme {dirs[0]}" in err
    assert facade.opened == []
    code, store, err = convert(capsys, "--model", source, "--nvme", dirs[0], "--dtype", "bf16")
    assert code == 0, err
    assert main(args) == 0
    assert str(facade.opened[0].checkpoint.root) == store
    assert main([*args, "--copy"]) == 0
    assert str(facade.opened[1].checkpoint.root) != store
    assert main([*args, "--copy", "--dtype", "bf16"]) == 0
    assert str(facade.opened[2].checkpoint.root) == store


def test_generate_checks_a_store_before_it_runs(tmp_path, dirs, capsys, facade, job):
    write_llama_gguf(tmp_path / "m.gguf", tokenizer="smollm")
    _, store, _ = convert(capsys, "--model", tmp_path / "m.gguf", "--nvme", dirs[0])
    path = tmp_path / store / "tokenizer.json"
    path.write_bytes(path.read_bytes().replace(b"hello", b"hallo", 1))
    assert main(["--model", store, "--nvme", str(dirs[0]), *job]) == 4
    assert "tokenizer.json is damaged: sha256 is" in capsys.readouterr().err
    assert facade.opened == []


class Marker:
    """Unpickling it makes a folder."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (str(self.path),))


def test_a_code_running_pickle_is_refused_by_generate_and_convert(tmp_path, dirs, capsys, job):
    # Source: lyogavin/airllm#296
    marker = tmp_path / "marker"

    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    torch.save({"w": Marker(marker)}, folder / "pytorch_model.bin")
    assert main(["--model", str(folder), "--nvme", str(dirs[0]), *job]) == 4
    assert main(["--copy", "--model", str(folder), "--nvme", str(dirs[0]), *job]) == 4
    code, _, err = convert(capsys, "--model", folder, "--nvme", dirs[0])
    assert code == 4
    assert "cannot be loaded as tensors alone" in err
    assert not marker.exists()


RATES = {"slow": 1e9, "fast": 4e9}


@pytest.fixture
def measured(monkeypatch, dirs):
    """Pretend that the model's disk and the folder's were measured."""

    def give(here, there, *, is_elsewhere=True):
        def find(folder, paths, *, reader):
            name = there if list(paths) == [folder] else here
            if name is None:
                return None
            rate = RATES[name]
            profile = Profile.assumed()
            return dataclasses.replace(profile, nvme_read_bytes_per_s=rate, filesystem=name)

        monkeypatch.setattr(zeroinfer.cli.copying, "find_profile", find)
        monkeypatch.setattr(zeroinfer.cli.copying, "lies_elsewhere", lambda *a: is_elsewhere)

    return give


@pytest.mark.parametrize("verb", [[], ["plan"]])
def test_a_copy_is_offered_where_the_folder_is_much_faster(
    verb, measured, scripted_folder, dirs, capsys, facade
):
    measured("slow", "fast")
    args = [*verb, "--model", str(scripted_folder), "--nvme", str(dirs[0])]
    assert main(args) == 0
    out = capsys.readouterr().out
    assert "the model lies on slow (1.00 GB/s)" in out
    assert f"--nvme {dirs[0]} on fast (4.00 GB/s); --copy makes a verified copy of" in out
    assert not (dirs[0] / "models").exists()


def test_the_offer_as_json(measured, scripted_folder, dirs, capsys, facade):
    measured("slow", "fast")
    args = ["plan", "--json", "--model", str(scripted_folder), "--nvme", str(dirs[0])]
    assert main(args) == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [event["event"] for event in events] == ["plan", "note"]
    assert "--copy makes" in events[1]["text"]


@pytest.mark.parametrize(
    ("here", "there", "is_elsewhere"),
    [("fast", "fast", True), ("fast", "slow", True), (None, "fast", True), ("slow", None, True),
     ("slow", "fast", False)],
)  # fmt: skip
def test_no_copy_is_offered_without_measured_gain(
    measured, scripted_folder, dirs, capsys, facade, here, there, is_elsewhere
):
    measured(here, there, is_elsewhere=is_elsewhere)
    assert main(["plan", "--model", str(scripted_folder), "--nvme", str(dirs[0])]) == 0
    assert "--copy" not in capsys.readouterr().out


def test_profile_measures_the_folders_disk_too(monkeypatch, scripted_folder, dirs, capsys):
    assumed = dataclasses.replace(Profile.assumed(), filesystem="a disk of its own")
    monkeypatch.setattr(zeroinfer.cli.profile, "load_or_measure", lambda *a, **k: assumed)
    monkeypatch.setattr(zeroinfer.cli.profile, "measure_folder", lambda folder, *, reader: assumed)
    args = ["profile", "--model", str(scripted_folder), "--nvme", str(dirs[0])]
    for is_elsewhere in (False, True):
        monkeypatch.setattr(zeroinfer.cli.profile, "lies_elsewhere", lambda *a, e=is_elsewhere: e)
        assert main(args) == 0
        line = f"--nvme {dirs[0]} lies on a disk of its own: 0.50 GB/s"
        assert (line in capsys.readouterr().out) is is_elsewhere


def test_a_folder_whose_name_is_no_text_is_printed_as_it_is(tmp_path, monkeypatch):
    printed = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, "utf-8", write_through=True))
    folder = tiny_llama(tmp_path / "\udcff")
    nvme = tmp_path / "nvme\udcff"
    assert main(["convert", "--copy", "--model", str(folder), "--nvme", str(nvme)]) == 0
    (store,) = (nvme / "models").glob("[!.]*")
    assert printed.getvalue() == os.fsencode(store) + b"\n"


@pytest.mark.parametrize("verb", [[], ["convert", "--copy"]])
def test_a_path_that_cannot_be_looked_at_is_a_storage_error(tmp_path, capsys, verb):
    name = "x" * 300 + ".gguf"
    assert main([*verb, "--model", name, "--nvme", str(tmp_path)]) == 4
    assert "File name too long" in capsys.readouterr().err
