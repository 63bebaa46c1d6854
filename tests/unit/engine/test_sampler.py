import pytest
import torch

from zeroinfer.engine import SamplingParams
from zeroinfer.engine.sampler import sample


@pytest.mark.parametrize("temperature", [1e-320, 1e-300, 1e-38, 1e-6])
@pytest.mark.parametrize("options", [{}, {"top_k": 2}, {"top_p": 0.5}])
def test_tiny_temperatures_choose_the_likeliest(temperature, options):
    logits = torch.tensor([-30.0, 4.0, 5.0, -2.0])
    params = SamplingParams(temperature=temperature, **options)
    generator = torch.Generator()
    assert sample(logits, params, position=3, generator=generator) == 2
