"""A polars frame with a `to_pandas` that does not need pyarrow."""

from importlib import import_module
from typing import Any

import polars as pl

from attnscope.errors import InputError


class LabelledFrame(pl.DataFrame):
    """A polars frame; `to_pandas` needs pandas and nothing else."""

    def to_pandas(self, *args: Any, **kwargs: Any) -> Any:
        """Convert to pandas by column; with arguments, as polars does (needs pyarrow)."""
        try:
            pandas = import_module("pandas")
        except ImportError:
            raise InputError(
                "to_pandas() needs the pandas package: pip install pandas; or use the polars frame",
                code="package-missing",
                package="pandas",
            ) from None
        if args or kwargs:
            return super().to_pandas(*args, **kwargs)
        columns = {}
        for column in self.iter_columns():
            plain = column.dtype.is_numeric() and not column.null_count()
            columns[column.name] = column.to_numpy() if plain else column.to_list()
        return pandas.DataFrame(columns)
