import pickle

import numpy
import pytest

from attnscope import errors


def test_unknown_has_a_code_and_the_offending_values() -> None:
    error = errors.unknown("way to insert", "sideways", ["ids", "text"])
    assert error.code == "unknown-way-to-insert"
    assert error.values == {"value": "sideways", "known": ["ids", "text"]}
    assert str(error) == "unknown way to insert 'sideways'; known: ids, text"


@pytest.mark.parametrize(
    "kind", [errors.InputError, errors.ModelError, errors.ScopeError, errors.ConservationError]
)
def test_every_class_has_a_code_of_its_own(kind: type[errors.AttnscopeError]) -> None:
    assert kind("x").code == kind.code != errors.AttnscopeError.code
    assert kind("x", code="special", layer=3).values == {"layer": 3}


def test_code_and_values_survive_pickling() -> None:
    """Ray and worker processes send errors as pickles."""
    error = pickle.loads(pickle.dumps(errors.InputError("bad", code="unknown-layer", layer=7)))
    assert (error.code, error.layer, str(error)) == ("unknown-layer", 7, "bad")


@pytest.mark.parametrize("value", [True, 2.0, "2", None, 1])
def test_check_int_refuses(value: object) -> None:
    with pytest.raises(errors.InputError) as caught:
        errors.check_int("bin", value, "positions of a bin", 2)
    assert caught.value.code == "bad-number"
    assert caught.value.values == {"argument": "bin", "value": value}
    errors.check_int("bin", 2, "positions of a bin", 2)


def test_wrong_shape_describes_the_tensor() -> None:
    error = errors.wrong_shape("keys", "a bool tensor [batch, keys]", numpy.zeros((2, 3)))
    assert error.values == {"argument": "keys", "got": "float64 [2, 3]"}
