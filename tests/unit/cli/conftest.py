import pytest

import zeroinfer.engine
from tests.helpers.fake_engine import FakeFacade, FakePlan
from tests.helpers.scripted_model import write_scripted_model


@pytest.fixture(scope="session")
def scripted_folder(tmp_path_factory):
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    return write_scripted_model(tmp_path_factory.mktemp("model") / "tiny", chat_template=template)


@pytest.fixture
def facade(monkeypatch):
    """The fake engine in the real one's place; its class, which remembers what was opened."""
    monkeypatch.setattr(zeroinfer.engine, "Engine", FakeFacade, raising=False)
    monkeypatch.setattr(
        zeroinfer.engine, "make_plan", lambda *args, **kwargs: FakePlan(), raising=False
    )
    monkeypatch.setattr(FakeFacade, "opened", [])
    monkeypatch.setattr(FakeFacade, "on_open", None)
    return FakeFacade
