"""The offline API: order, streaming, errors, and the ids of the command line."""

import json
import logging
import re
import subprocess
import sys
import weakref
from pathlib import Path

import pytest

import zeroinfer.engine
import zeroinfer.llm
from tests.helpers.collector import without_collector
from tests.helpers.fake_engine import FakeFacade, expected_tokens
from tests.helpers.scripted_model import write_scripted_model
from zeroinfer import LLM, SamplingParams
from zeroinfer.cli import main
from zeroinfer.cli.options import EngineOptions
from zeroinfer.config import FLAG_KEYS, load_config
from zeroinfer.errors import CapacityError, CheckpointError, ConfigError, StorageError

TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
CHAT = [{"role": "user", "content": "hi"}]
SHORT_AND_LONG = [SamplingParams(max_tokens=count, ignore_eos=True) for count in (1, 50)]


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """A llama of 264 tokens that reads text and conversations."""
    return write_scripted_model(tmp_path_factory.mktemp("llm") / "tiny", chat_template=TEMPLATE)


@pytest.fixture
def settings(tmp_path):
    """What a test's LLM needs not to follow the machine."""
    return {"nvme": tmp_path / "nvme", "dram": "8GiB"}


@pytest.fixture
def llm(model, settings):
    with LLM(model, **settings) as llm:
        yield llm


@pytest.fixture
def facade(monkeypatch):
    """The fake engine in the real one's place; its class, which remembers what was opened."""
    monkeypatch.setattr(zeroinfer.engine, "Engine", FakeFacade, raising=False)
    monkeypatch.setattr(FakeFacade, "opened", [])
    monkeypatch.setattr(FakeFacade, "on_open", None)
    return FakeFacade


def test_answers_are_those_of_the_command_line(model, settings, tmp_path):
    texts, ids = ["Q", "ab"], [5, 6, 7]
    lines = [{"prompt": text} for text in texts]
    lines += [{"prompt_token_ids": ids}, {"messages": CHAT}, {"prompt": ""}]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, lines)))
    out = tmp_path / "out.jsonl"
    flags = ["--temperature", "0.8", "--seed", "3", "--max-tokens", "9", "--weights", "nvme"]
    folders = ["--model", str(model), "--nvme", str(tmp_path / "nvme"), "--dram", "8GiB"]
    files = ["--input", str(tmp_path / "in.jsonl"), "--output", str(out), "--ordered"]
    assert main([*folders, *files, *flags]) == 5
    records = [json.loads(line) for line in out.read_text().splitlines()]
    with LLM(model, weights="nvme", **settings) as llm:
        sampling = SamplingParams(temperature=0.8, seed=3, max_tokens=9)
        answers = llm.generate([*texts, ids, CHAT, ""], sampling)
    for answer, record in zip(answers[:4], records[:4], strict=True):
        assert answer.error is None
        assert record == {
            "index": answer.index, "text": answer.text, "token_ids": list(answer.token_ids),
            "finish_reason": answer.finish_reason, "usage": answer.usage,
        }  # fmt: skip
    assert answers[4].error == records[4]["error"]["message"]


def test_greedy_text_of_the_scripted_model(llm):
    (answer,) = llm.generate(["Q"], SamplingParams(max_tokens=30))
    assert answer.text == ">ab\N{GRINNING FACE}cd\N{LATIN SMALL LETTER E WITH ACUTE}!"
    assert (answer.prompt, answer.finish_reason) == ("Q", "stop")
    assert answer.usage["total_tokens"] == 1 + len(answer.token_ids)


def test_one_stop_string(llm):
    (answer,) = llm.generate(["Q"], SamplingParams(stop="b"))
    assert (answer.text, answer.finish_reason) == (">a", "stop")


def test_generate_keeps_the_order_and_stream_does_not_wait(llm):
    """Source: vllm-project/vllm#394."""
    prompts = [[5, 6], [7], [8, 9], [10]]
    samplings = [SamplingParams(max_tokens=count, ignore_eos=True) for count in (7, 1, 4, 2)]
    assert [answer.index for answer in llm.stream(prompts, samplings)] == [1, 3, 2, 0]
    answers = llm.generate(prompts, samplings)
    assert [answer.index for answer in answers] == [0, 1, 2, 3]
    assert [answer.prompt for answer in answers] == prompts
    assert [len(answer.token_ids) for answer in answers] == [7, 1, 4, 2]
    assert {answer.finish_reason for answer in answers} == {"length"}


def test_stream_yields_while_others_run(model, settings, facade):
    with LLM(model, **settings) as llm:
        stream = llm.stream([[5], [6]], SHORT_AND_LONG)
        assert next(stream).index == 0
        assert facade.opened[0].num_steps == 1
        assert next(stream).index == 1
        assert next(stream, None) is None


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "the prompt is empty; need at least one token"),
        ([], "the prompt is empty; need at least one token"),
        ([5, 264], "prompt[1] is not in the vocabulary: got 264, need 0 to 263"),
        ([5, "a"], "prompt[1] has the wrong type: got a string, need an integer"),
        ([5] * 300, "the prompt is too long: got 300 tokens, and the model's window of 256"),
        ([{"role": "user"}], "messages[0] has no content; need role and content"),
        ("\ud800", "prompt holds half of a surrogate pair at character 0"),
        (None, "prompt has the wrong type: got null, need a string, token ids or messages"),
        (b"hi", "prompt has the wrong type: got bytes, need a string, token ids or messages"),
        ([{5: "x"}], "unknown field 5 in messages[0]; known are content, name, role"),
    ],
    ids=range(10),
)
def test_a_bad_prompt_is_one_answer(model, settings, facade, prompt, message):
    """Source: ray-project/ray#59194."""
    with LLM(model, **settings) as llm:
        bad, good = llm.generate([prompt, [5, 6]])
    assert message in bad.error
    assert (bad.index, bad.prompt, bad.finish_reason) == (0, prompt, "error")
    assert (bad.text, bad.token_ids) == (None, ())
    assert bad.usage == {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
    assert good.error is None
    assert list(good.token_ids) == expected_tokens(facade.opened[0].added[0])


def test_text_without_a_tokenizer_is_refused_and_ids_serve(model, settings, tmp_path, facade):
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        (bare / name).symlink_to(model / name)
    with LLM(bare, **settings) as llm:
        bad, good = llm.generate(["hi", (5, 6)])
    assert "the model folder has no tokenizer" in bad.error
    assert good.error is None


def test_only_bad_prompts_need_no_engine(model, settings, facade):
    with LLM(model, **settings) as llm:
        assert [answer.finish_reason for answer in llm.generate(["", ""])] == ["error"] * 2
        assert llm.generate([]) == []
        assert llm.report() == {}
    assert facade.opened == []


def test_what_the_engine_refuses_or_gives_up_is_one_answer(model, settings, facade, monkeypatch):
    def on_open(engine):
        engine.max_model_len, engine._failing_ids = 9, {2}

    monkeypatch.setattr(facade, "on_open", on_open)
    with LLM(model, **settings) as llm:
        good, refused, failed = llm.generate([[5], [5] * 9, [6]])
    assert good.error is None
    assert refused.error == "prompt of 9 tokens, window 9"
    assert (failed.error, failed.finish_reason) == ("logits of layer 0 are not finite", "error")


def test_sampling_of_each_prompt(model, settings, facade):
    with LLM(model, **settings) as llm:
        own = [SamplingParams(seed=8), SamplingParams(seed=8, max_tokens=2)]
        llm.generate([[5], [6]], own)
        llm.generate([[5], [6]], SamplingParams(seed=8))
        llm.generate([[5], [6]])
    seeds = [request.sampling.seed for engine in facade.opened for request in engine.added]
    assert seeds == [8, 8, 8, 9, 0, 1]


def test_without_sampling_the_model_decides(model, settings, tmp_path, facade):
    folder = tmp_path / "own"
    folder.mkdir()
    for path in model.iterdir():
        (folder / path.name).symlink_to(path)
    (folder / "generation_config.json").unlink()
    defaults = {"do_sample": True, "temperature": 0.6, "top_k": 5}
    (folder / "generation_config.json").write_text(json.dumps(defaults))
    with LLM(folder, **settings) as llm:
        assert llm.default_sampling == SamplingParams(temperature=0.6, top_k=5)
        llm.generate([[5]])
    used = facade.opened[0].added[0].sampling
    assert (used.temperature, used.top_k, used.seed) == (0.6, 5, 0)


@pytest.mark.parametrize(
    ("prompts", "sampling", "message"),
    [
        ("hi", None, "prompts has the wrong type: got a string, need a list of prompts"),
        (None, None, "prompts has the wrong type: got null, need a list of prompts"),
        (5, None, "prompts has the wrong type: got an integer, need a list of prompts"),
        ([[5]], [], "sampling_params does not match prompts: got 0 for 1, need one for each"),
        ([[5]], {"seed": 1}, "sampling_params has the wrong type: got an object, need Sampl"),
        ([[5]], [None], "sampling_params has the wrong type: got null, need SamplingParams"),
    ],
)
def test_arguments_that_do_not_belong_together(model, settings, prompts, sampling, message):
    with LLM(model, **settings) as llm, pytest.raises(ConfigError, match=re.escape(message)):
        llm.stream(prompts, sampling)


def test_engine_stays_for_work_that_its_plan_covers(model, settings, facade):
    few = SamplingParams(max_tokens=4)
    with LLM(model, **settings) as llm:
        llm.generate([[5, 6], [7]], few)
        llm.generate([[8]], few)
        assert len(facade.opened) == 1
        llm.generate([[5, 6, 7]], few)
        assert [engine.workload.max_prompt_tokens for engine in facade.opened] == [2, 3]
        assert facade.opened[0].is_closed
        llm.generate([[5]] * 2, few)
        assert facade.opened[2].workload.num_requests == 2
    assert all(engine.is_closed for engine in facade.opened)


def test_a_stream_that_is_dropped_gives_everything_back(model, settings, facade):
    with LLM(model, **settings) as llm:
        for answer in llm.stream([[5], [6]], SHORT_AND_LONG):
            assert answer.error is None
            break
        assert facade.opened[0].is_closed
        assert len(llm.generate([[5]])) == 1
        assert len(facade.opened) == 2


def test_one_call_at_a_time(model, settings, facade):
    with LLM(model, **settings) as llm:
        stream = llm.stream([[5], [6]], SHORT_AND_LONG)
        next(stream)
        with pytest.raises(ConfigError, match="is in use: got a call while a stream"):
            llm.generate([[7]])
        stream.close()
        assert len(llm.generate([[7]])) == 1


def test_after_the_end_nothing_runs(model, settings, facade):
    with LLM(model, **settings) as llm:
        stream = llm.stream([[5], [6]], SHORT_AND_LONG)
        next(stream)
    assert facade.opened[0].is_closed
    with pytest.raises(ConfigError, match=r"LLM of .*tiny is closed; open another"):
        next(stream)
    with pytest.raises(ConfigError, match="is closed"):
        llm.generate([[5]])
    llm.close()


def test_a_failing_disk_ends_the_call_and_not_the_llm(model, settings, facade, monkeypatch):
    def on_open(engine):
        def fail(num_steps):
            raise StorageError("read of 4096 bytes failed: Input/output error (EIO)")

        engine._on_step = fail if len(facade.opened) == 1 else None

    monkeypatch.setattr(facade, "on_open", on_open)
    with LLM(model, **settings) as llm:
        with pytest.raises(StorageError, match="EIO"):
            llm.generate([[5]])
        assert facade.opened[0].is_closed
        assert llm.generate([[5]])[0].error is None


@pytest.mark.parametrize(
    ("extra", "error_class"),
    [
        ({"weights": "disk"}, ConfigError),
        ({"dram": "10MiB"}, CapacityError),
        ({"model": "/none/such"}, CheckpointError),
        ({"nvme": "/proc/none"}, StorageError),
    ],
)
def test_errors_are_those_of_the_command_line(model, tmp_path, capsys, extra, error_class):
    given = {"model": str(model), "nvme": str(tmp_path), **extra}
    (tmp_path / "in.jsonl").write_text('{"prompt_token_ids": [5, 6]}\n')
    words = [word for name, value in given.items() for word in (f"--{name}", value)]
    code = main([*words, "--input", str(tmp_path / "in.jsonl")])
    line = capsys.readouterr().err.splitlines()[-1]
    with pytest.raises(error_class) as caught, LLM(**given) as llm:
        llm.generate([[5, 6]])
    assert code == caught.value.exit_code
    # The numbers of a plan follow what the process holds at the moment.
    said, raised = (re.sub(r"[0-9.]+", "#", text) for text in (line, f"error: {caught.value}"))
    assert said == " ".join(raised.splitlines())


@pytest.mark.parametrize("kind", ["config", "tree", "file", "text"])
def test_settings_to_start_from(model, tmp_path, facade, kind):
    text = f"model: {{path: {model}}}\nio: {{nvme: {tmp_path}}}\noffload: {{prefetch_depth: 1}}\n"
    path = tmp_path / "c.yaml"
    path.write_text(text)
    tree = {
        "model": {"path": str(model)},
        "io": {"nvme": str(tmp_path)},
        "offload": {"prefetch_depth": 1},
    }
    start = {"config": load_config(path), "tree": tree, "file": path, "text": str(path)}[kind]
    with LLM(config=start, max_num_seqs=3, dram="8GiB", reader=None) as llm:
        llm.generate([[5]])
    config = facade.opened[0].config
    assert (config.offload.prefetch_depth, config.scheduler.max_num_seqs) == (1, 3)
    assert config.offload.dram == 8 << 30
    assert "dram" not in tree["offload"]
    with LLM(model, config=start, prefetch_depth=2) as llm:
        llm.generate([[5]])
    assert facade.opened[1].config.offload.prefetch_depth == 2


def test_every_flag_reaches_the_config(model, tmp_path, facade):
    given = {
        "nvme": [tmp_path], "dtype": "bf16", "dram": 9 << 30, "dram_weights": "1GiB",
        "weights": "nvme", "prefetch_depth": 0, "kv": "dram", "max_num_seqs": 7, "admit": "fifo",
        "batch_invariant": False, "reader": "threads",
    }  # fmt: skip
    assert given.keys() <= zeroinfer.llm.Flags.__annotations__.keys()
    with LLM(model, **given) as llm:
        llm.generate([[5]])
    config = facade.opened[0].config
    assert (config.offload.dram, config.offload.dram_weights) == (9 << 30, 1 << 30)
    assert (config.offload.weights, config.kv.tier) == ("nvme", "dram")
    assert (config.offload.prefetch_depth, config.scheduler.max_num_seqs) == (0, 7)
    assert (config.compute.batch_invariant, config.io.reader) == ("off", "threads")
    assert (config.scheduler.admit, config.model.dtype) == ("fifo", "bf16")
    assert config.io.nvme == (tmp_path,)


def test_api_and_command_line_have_the_same_names():
    names = set(FLAG_KEYS)
    assert {*zeroinfer.llm.Flags.__annotations__, "model"} == names
    assert names <= set(EngineOptions.__dataclass_fields__)


def test_unknown_flag_names_the_nearest(model):
    with pytest.raises(ConfigError, match="unknown field 'dramm' in the settings of LLM; did you"):
        LLM(model, dramm="1GiB")


def test_default_model_needs_a_folder():
    with pytest.raises(ConfigError, match="the default model needs a folder for its weights"):
        LLM()
    with pytest.raises(ConfigError, match="the default model needs a folder for its weights"):
        LLM(None)


def test_plan_is_logged_and_the_report_is_that_of_the_run(llm, caplog):
    with caplog.at_level(logging.INFO, logger="zeroinfer.llm"):
        llm.generate([[5, 6]], SamplingParams(max_tokens=3, ignore_eos=True))
    assert "tier  weights" in caplog.text
    assert llm.report()["totals"]["num_generated_tokens"] == 3


def test_importing_the_names_loads_no_torch():
    code = (
        "import sys; from zeroinfer import LLM, Answer, SamplingParams; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def examples():
    """Every example of the API in the texts: the module's own, and those of the README."""
    readme = Path(zeroinfer.__file__).parents[1] / "README.md"
    texts = [zeroinfer.llm.__doc__, readme.read_text(encoding="utf-8")]
    blocks = [
        block for text in texts for block in re.findall(r"(?:^(?: {4}.*)?\n)+", text, re.MULTILINE)
    ]
    return [block for block in blocks if "import LLM" in block]


@pytest.mark.parametrize("example", examples(), ids=range(len(examples())))
def test_examples_run(model, tmp_path, example, capsys):
    code = "\n".join(line.removeprefix("    ") for line in example.strip("\n").splitlines())
    code = re.sub(
        r'LLM\("[^"]*", nvme="[^"]*"', f"LLM({str(model)!r}, nvme={str(tmp_path)!r}", code
    )
    assert str(model) in code
    exec(compile(code.replace('dram="6GiB"', 'dram="8GiB"'), "example", "exec"), {})
    assert capsys.readouterr().out


def test_closed_after_the_last_answer_a_stream_just_ends(model, settings):
    with LLM(model, **settings) as llm:
        for answer in llm.stream(["Q"], SamplingParams(max_tokens=2, ignore_eos=True)):
            assert answer.error is None
            llm.close()


def test_engine_and_llm_are_free_as_soon_as_they_are_not_needed(model, settings):
    few = SamplingParams(max_tokens=4)
    with without_collector():
        llm = LLM(model, **settings)
        llm.generate([[5, 6]], few)
        first = weakref.ref(llm._engine)
        llm.generate([[5, 6, 7]], few)
        assert first() is None
        last, itself = weakref.ref(llm._engine), weakref.ref(llm)
        llm.close()
        assert last() is None
        del llm
        assert itself() is None
