"""Convert date columns in data frames to numbers of days and back to their original format."""

from __future__ import annotations

from typing import Any

import numpy as np

from mvrbm.estimators.batches import Array
from mvrbm.extras import require

#: Format of a column whose dtype is a date type. Other formats are those of `strftime`.
NATIVE = ""


def date_formats(column: Any) -> list[str]:
    """Return the formats shared by all dates in a data frame column. For other columns, return an empty list.

    There are two formats if the dates can be read month first and day first, in this order.
    """
    if getattr(column.dtype, "kind", "O") == "M":
        return [NATIVE]
    known = column.dropna()
    if not len(known) or not all(isinstance(value, str) for value in known):
        return []
    pandas = _pandas()
    found: list[str] = []
    for dayfirst in (False, True):
        guess = pandas.tseries.api.guess_datetime_format(known.iloc[0], dayfirst=dayfirst)
        if guess is not None and guess not in found and not _parsed(known, guess).isna().any():
            found.append(str(guess))
    # Dates that start with the year continue with the month.
    return found[:1] if found and found[0].startswith("%Y") else found


def days_of(column: Any, date_format: str) -> Array:
    """Convert dates to days since 1970-01-01. Missing dates become NaN."""
    known = column.notna()
    parsed = _parsed(column, date_format)
    if (bad := known & parsed.isna()).any():
        raise ValueError(
            f"column {column.name!r} must contain dates in the format {date_format!r}, as in the training data, got "
            f"{str(column[bad].iloc[0])!r}"
        )
    days = (parsed - _pandas().Timestamp(0, tz="UTC")) / _pandas().Timedelta(days=1)
    return np.asarray(days, dtype=np.float64)


def fill_dates(column: Any, date_format: str, days: Array) -> Any:
    """Fill in the missing dates in a column, using its date format. `days` contains days since 1970-01-01."""
    missing = np.asarray(column.isna())
    found = _pandas().to_datetime(days[missing], unit="D", utc=True)
    if date_format == NATIVE:
        known = column.dropna()
        found = found.tz_convert(column.dt.tz) if column.dt.tz is not None else found.tz_localize(None)
        filled = column.copy()
        filled[missing] = found.round("D" if (known == known.dt.normalize()).all() else "s")
        return filled
    filled = column.astype(object)
    filled[missing] = found.round("s" if "%S" in date_format or "%H" in date_format else "D").strftime(date_format)
    return filled


def _parsed(column: Any, date_format: str) -> Any:
    """Convert dates to UTC timestamps. Values that are not dates in the given format become NaT."""
    return _pandas().to_datetime(column, format=date_format or None, errors="coerce", utc=True)


def _pandas() -> Any:
    return require("pandas", "reading dates", "tables")
