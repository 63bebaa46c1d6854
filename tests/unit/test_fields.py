import pytest

from zeroinfer.errors import RequestError
from zeroinfer.fields import (
    json_type,
    read_bool,
    read_int,
    read_number,
    read_text,
    refuse_unknown_keys,
)


@pytest.mark.parametrize(
    ("value", "name"),
    [("a", "a string"), (True, "a boolean"), (3, "an integer"), (0.5, "a number"), ([], "a list"),
     ({}, "an object"), (None, "null"), ((), "tuple")],
)  # fmt: skip
def test_types_have_the_names_of_json(value, name):
    assert json_type(value) == name


@pytest.mark.parametrize(
    ("read", "value", "message"),
    [
        (read_int, True, "n has the wrong type: got a boolean, need an integer"),
        (read_int, 2.0, "n has the wrong type: got a number, need an integer"),
        (read_number, "1", "n has the wrong type: got a string, need a number"),
        (read_number, 10**400, "n is out of range: an integer of 401 digits"),
        (read_bool, 1, "n has the wrong type: got an integer, need true or false"),
        (read_text, 1, "n has the wrong type: got an integer, need a string"),
        (read_text, "a\ud800", "n holds half of a surrogate pair at character 1"),
    ],
)
def test_wrong_values_are_refused(read, value, message):
    with pytest.raises(RequestError, match=message):
        read("n", value)


def test_values_come_in_their_type():
    assert (read_int("n", 2), read_number("n", 2), read_number("n", 0.5)) == (2, 2.0, 0.5)
    assert (read_bool("n", False), read_text("n", "\u00e9")) == (False, "\u00e9")


def test_unknown_keys_name_the_nearest():
    refuse_unknown_keys({"seed": 1}, ("seed", "stop"), where="the line")
    with pytest.raises(RequestError, match="unknown field 'sed' in the line; did you mean seed"):
        refuse_unknown_keys({"sed": 1}, ("seed", "stop"), where="the line")
    with pytest.raises(RequestError, match="unknown field 'x' in the line; known are seed, stop"):
        refuse_unknown_keys({"x": 1}, ("stop", "seed"), where="the line")
