from zeroinfer.config import EngineConfig, describe_config, render_reference


def test_every_field_is_listed_in_order():
    expected = [
        f"{section}.{name}"
        for section, info in EngineConfig.model_fields.items()
        for name in info.annotation.model_fields
    ]
    assert [entry.key for entry in describe_config()] == expected


def test_entries_speak_the_users_language():
    entries = {entry.key: entry for entry in describe_config()}
    unit = entries["offload.fetch_unit_bytes"]
    assert (unit.values, unit.default) == ("a size such as 5.5GiB", "32MiB")
    assert entries["offload.weights"].values == "auto, gpu, dram or nvme"
    assert entries["offload.debug_poison"].default == "false"
    assert entries["offload.dram"].default == "none"
    assert entries["model.path"].default == '""'
    assert entries["io.nvme"].default == "none"
    assert "\n" not in unit.help
    assert unit.help.startswith("Largest part of a matrix")


def test_page_holds_every_key_with_its_help():
    page = render_reference()
    for entry in describe_config():
        assert f"- `{entry.key}`: {entry.values}; default {entry.default}.\n" in page
        assert entry.help in page
    for section in EngineConfig.model_fields:
        assert f"\n## {section}\n" in page
