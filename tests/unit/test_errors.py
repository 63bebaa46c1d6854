import inspect
import re

import pytest

from zeroinfer import errors
from zeroinfer.errors import (
    BackendUnavailableError,
    CapacityError,
    CheckpointError,
    ConfigError,
    RequestError,
    StorageError,
    UnsupportedModelError,
    ZeroInferError,
)


@pytest.mark.parametrize(
    ("kind", "builtin", "exit_code"),
    [
        (ZeroInferError, Exception, 1),
        (ConfigError, ValueError, 2),
        (BackendUnavailableError, ZeroInferError, 2),
        (CapacityError, ZeroInferError, 3),
        (CheckpointError, ValueError, 4),
        (UnsupportedModelError, CheckpointError, 4),
        (StorageError, OSError, 4),
        (RequestError, ValueError, 5),
    ],
)
def test_family_and_exit_code(kind, builtin, exit_code):
    assert issubclass(kind, ZeroInferError)
    assert issubclass(kind, builtin)
    assert kind.exit_code == exit_code
    assert str(kind("read failed: got 1, need 2")) == "read failed: got 1, need 2"


def test_every_error_is_listed_and_drawn():
    defined = {name for name, value in vars(errors).items() if inspect.isclass(value)}
    assert defined == set(errors.__all__)
    assert defined == set(re.findall(r"\w+Error", errors.__doc__)) - {"ValueError", "OSError"}
