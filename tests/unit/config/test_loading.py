import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeroinfer.config import EngineConfig, describe_config, load_config, make_config
from zeroinfer.errors import ConfigError
from zeroinfer.units import GIB, MIB


@pytest.fixture
def write(tmp_path):
    def write_config(text: str) -> Path:
        path = tmp_path / "x.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write_config


def refusal(path=None, overrides=()):
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return str(caught.value)


def test_nothing_given_is_all_defaults():
    assert load_config(None) == EngineConfig()


@pytest.mark.parametrize("text", ["", "# nothing\n", "offload:\nio:\n  # nvme: /x\n", "{}"])
def test_empty_files_and_sections_are_defaults(write, text):
    assert load_config(write(text)) == EngineConfig()


def test_file_is_read(write):
    text = "offload:\n  dram: 5.5GiB\n  weights: nvme\nio:\n  nvme: [/a, /b]\nmodel: {path: m}\n"
    config = load_config(write(text))
    assert config.offload.dram == 11 * GIB // 2
    assert config.offload.weights == "nvme"
    assert config.io.nvme == (Path("/a"), Path("/b"))
    assert config.model.path == "m"
    assert config.offload.prefetch_depth == "auto"


def test_overrides_win_and_the_last_of_them(write):
    path = write("offload:\n  dram: 1GiB\n  prefetch_depth: 1\n")
    config = load_config(path, ["offload.dram=2GiB", "offload.dram=3GiB", "kv.block_size=7"])
    assert config.offload.dram == 3 * GIB
    assert config.offload.prefetch_depth == 1
    assert config.kv.block_size == 7


def test_override_mends_a_wrong_value_of_the_file(write):
    path = write("offload:\n  dram: much\n")
    assert load_config(path, ["offload.dram=null"]).offload.dram is None


def test_override_takes_text_as_it_is_typed():
    overrides = ["model.path=123", "io.nvme=/a: b#c"]
    config = load_config(None, overrides)
    assert config.model.path == "123"
    assert config.io.nvme == (Path("/a: b#c"),)
    assert load_config(None, ["model.path=a=b"]).model.path == "a=b"
    assert load_config(None, ["io.nvme=[/a, /b]"]).io.nvme == (Path("/a"), Path("/b"))


def test_unknown_key_names_file_line_and_nearest(write):
    path = write("model:\n  path: m\noffload:\n  dram: 1GiB\n  prefetch_dept: 2\n")
    expected = f"unknown key offload.prefetch_dept in {path}:5; did you mean prefetch_depth?"
    assert refusal(path) == expected


@pytest.mark.parametrize(
    ("override", "advice"),
    [
        ("offload.prefetch_dept=2", "did you mean prefetch_depth?"),
        ("ofload.dram=2", "did you mean offload.dram?"),
        ("weights=nvme", "did you mean offload.weights?"),
        ("model.queue_depth=2", "did you mean io.queue_depth?"),
        ("kv.zzzz=2", "need one of tier, block_size"),
        ("zzzz=2", "need one of model, offload, kv, scheduler, io, compute"),
    ],
)
def test_unknown_override_names_the_nearest(override, advice):
    assert refusal(None, [override]) == f"unknown key {override.partition('=')[0]}; {advice}"


@pytest.mark.parametrize("key", ["ofload", "dram"])
def test_unknown_section_of_a_file(write, key):
    path = write(f"{key}: 1\n")
    near = {"ofload": "offload", "dram": "offload.dram"}[key]
    assert refusal(path) == f"unknown key {key} in {path}:1; did you mean {near}?"


def test_wrong_value_names_key_and_line(write):
    path = write("kv:\n  block_size: 0\n")
    expected = f"kv.block_size in {path}:2: got 0, need auto or a whole number, 1 or more"
    assert refusal(path) == expected
    assert refusal(None, ["kv.block_size=0"]) == (
        "kv.block_size: got 0, need auto or a whole number, 1 or more"
    )


def test_key_set_twice(write):
    path = write("kv:\n  block_size: 1\n  block_size: 2\n")
    assert refusal(path) == f"key kv.block_size is set twice: {path}:2 and {path}:3; keep one"


def test_section_with_a_value(write):
    path = write("io: fast\n")
    assert refusal(path) == f"io in {path}:1: got 'fast', need keys under it, such as io.nvme"
    assert refusal(path, ["io.queue_depth=2"]).startswith(f"io in {path}:1: got 'fast'")
    expected = "io is a section: got '3', need a key such as io.nvme"
    assert refusal(None, ["io=3"]) == expected


def test_file_that_is_no_mapping(write):
    path = write("- a\n- b\n")
    expected = f"{path}:1 holds a list or mapping, need keys with values, such as model:"
    assert refusal(path) == expected


@pytest.mark.parametrize(
    "text", ["io: [1\n", "io:\n\treader: auto\n", "!!python/name:os.system x\n---\ny\n", "a: *b\n"]
)
def test_broken_yaml(write, text):
    path = write(text)
    message = refusal(path)
    assert message.startswith(f"{path}:")
    assert "is not valid YAML" in message


def test_yaml_cannot_make_objects(write):
    path = write("model:\n  path: !!python/object/apply:os.getcwd []\n")
    assert "is not valid YAML: could not determine a constructor" in refusal(path)


def test_yaml_that_refers_to_itself_ends(write):
    path = write("io: &io\n  nvme: {again: *io}\n")
    assert "is not valid YAML" in refusal(path)


def test_file_that_is_missing_or_no_text(tmp_path):
    missing = tmp_path / "none.yaml"
    expected = f"config file {missing} cannot be read: No such file or directory; check --config"
    assert refusal(missing) == expected
    assert "Is a directory" in refusal(tmp_path)
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    assert "not UTF-8 text" in refusal(binary)


def test_override_without_equals_sign():
    assert refusal(None, ["offload.dram"]) == (
        "override 'offload.dram' has no '=': need section.key=value"
    )


def test_override_that_is_no_yaml():
    message = refusal(None, ["io.queue_depth=["])
    assert "is not valid YAML" in message
    assert "io.queue_depth=[" in message


def test_resident_share_above_the_budget(write):
    path = write("offload:\n  dram: 1GiB\n  dram_weights: 2GiB\n")
    assert refusal(path) == (
        f"offload in {path}:1: dram_weights is above dram: got 2.0 GiB, need at most 1.0 GiB; "
        "lower dram_weights or raise dram"
    )
    assert load_config(path, ["offload.dram=2GiB"]).offload.dram_weights == 2 * GIB


@given(st.integers(1, 1 << 20))
def test_every_size_is_read_exactly(num_mib):
    config = load_config(None, [f"offload.dram={num_mib}MiB"])
    assert config.offload.dram == num_mib * MIB


@pytest.mark.parametrize("entry", describe_config(), ids=lambda entry: entry.key)
def test_printed_default_is_accepted_and_is_the_default(entry):
    if entry.default in {"none", '""'}:
        assert load_config(None) == EngineConfig()
    else:
        assert load_config(None, [f"{entry.key}={entry.default}"]) == EngineConfig()


STARTS = {"config": EngineConfig(), "tree": {}, "nothing": None}


@pytest.mark.parametrize("start", STARTS.values(), ids=STARTS)
def test_keys_are_set_in_their_own_types(start):
    values = {"offload.dram": 3 * GIB, "io.nvme": Path("/a"), "compute.batch_invariant": True}
    config = make_config(start, values)
    assert config.offload.dram == 3 * GIB
    assert config.io.nvme == (Path("/a"),)
    assert config.compute.batch_invariant == "on"
    assert make_config(config) == config
    assert make_config(config, {"offload.dram": None}).offload.dram is None


def test_setting_keys_leaves_the_callers_tree_alone(write):
    tree = {"offload": {"dram": "1GiB"}}
    assert make_config(tree, {"offload.dram": "2GiB"}).offload.dram == 2 * GIB
    assert tree == {"offload": {"dram": "1GiB"}}
    path = write("offload:\n  dram: 1GiB\n")
    assert make_config(str(path), {"offload.weights": "nvme"}).offload.dram == GIB


@pytest.mark.parametrize(
    ("start", "values", "message"),
    [
        ({"offload": {"dramm": 1}}, {}, "unknown key offload.dramm; did you mean dram?"),
        ({"offload": 3}, {"offload.dram": 1}, "offload: got 3, need keys under it, such as"),
        ({}, {"offload.dramm": 1}, "unknown key offload.dramm; did you mean dram?"),
        ({}, {"offload": 1}, "unknown key offload; "),
        ({}, {"offload.dram": "much"}, "offload.dram: "),
        ({}, {"io.nvme": "a\0b"}, "io.nvme: got 'a\\x00b', need a folder or a list of folders"),
        ({}, {"scheduler.max_num_seqs": 0}, "scheduler.max_num_seqs: got 0, need auto or a whole"),
        ("none.yaml", {}, "config file none.yaml cannot be read: No such file"),
        (5, {}, "config has the wrong type: got int, need an EngineConfig, sections with their"),
        ([], {}, "config has the wrong type: got list, need an EngineConfig"),
    ],
)
def test_wrong_keys_and_values_are_refused(start, values, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        make_config(start, values)


@pytest.mark.parametrize(
    "value",
    ["2001-99-99", "!!int x", "!!float x", "!!bool x", "!!timestamp x", "9" * 5000],
    ids=range(6),
)
def test_values_that_yaml_cannot_make_are_refused(write, value):
    path = write(f"offload:\n  dram: {value}\n")
    assert f"{path}:2 holds a value that cannot be read: " in refusal(path)
    assert "offload.dram: " in refusal(None, [f"offload.dram={value}"])


def test_nesting_beyond_reason_is_refused(write):
    path = write("offload: {dram: " + "[" * 20_000)
    need = "need sections with their keys; mend it"
    assert refusal(path) == f"{path} is nested beyond reason: {need}"
    message = refusal(None, ["offload.dram=" + "[" * 20_000])
    assert message.startswith("offload.dram: got '[[[[")
    assert "which YAML cannot read" in message
