import pytest

from zeroinfer.engine import SamplingParams, describe_sampling, resolve_sampling
from zeroinfer.errors import ConfigError, RequestError

MODEL = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 50}


def test_without_do_sample_a_model_is_greedy():
    config = {**MODEL, "do_sample": False}
    assert resolve_sampling(config, user={}) == SamplingParams()
    assert resolve_sampling({}, user={}) == SamplingParams()


def test_with_do_sample_the_model_decides():
    sampling = resolve_sampling(MODEL, user={"temperature": None, "max_tokens": 5}, stop=["x"])
    assert sampling == SamplingParams(
        max_tokens=5, temperature=0.6, top_p=0.9, top_k=50, stop=("x",)
    )
    assert resolve_sampling({"do_sample": True}, user={}).temperature == 1.0


def test_the_user_beats_the_model():
    sampling = resolve_sampling(MODEL, user={"temperature": 0, "top_k": 3, "seed": 4})
    assert (sampling.temperature, sampling.top_k, sampling.seed) == (0, 3, 4)


@pytest.mark.parametrize(
    ("config", "user", "message"),
    [
        ({"do_sample": True, "top_p": "x"}, {}, "top_p of generation_config.json has the wrong"),
        ({"do_sample": True, "top_k": -1}, {}, "top_k is out of range: got -1"),
        ({}, {"max_tokens": 0}, "max_tokens is out of range: got 0, need at least 1"),
    ],
)
def test_bad_values_are_refused(config, user, message):
    with pytest.raises(ConfigError, match=message):
        resolve_sampling(config, user=user)


def test_description_is_plain_data():
    assert describe_sampling(SamplingParams(stop=("a",)))["stop"] == ["a"]


@pytest.mark.parametrize("stop", ["ab", ["ab"], ("ab",)])
def test_one_stop_string_is_no_list_of_letters(stop):
    assert SamplingParams(stop=stop).stop == ("ab",)


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_seed_has_a_range(seed):
    with pytest.raises(RequestError, match=f"seed is out of range: got {seed}, need 0 to"):
        SamplingParams(seed=seed)
