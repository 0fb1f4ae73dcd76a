"""Assertions about errors by their code and values, so that the wording may change."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from attnscope.errors import AttnscopeError


@contextmanager
def raises(kind: type[AttnscopeError], code: str, **values: object) -> Iterator[None]:
    """Expect an error of this class with this code; `values` are those it must carry."""
    with pytest.raises(kind) as caught:
        yield
    error = caught.value
    assert error.code == code, f"code {error.code!r}: {error}"
    carried = {name: error.values.get(name) for name in values}
    assert carried == values, f"{error.values}: {error}"
