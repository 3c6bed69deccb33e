"""Convert date columns in data frames to numbers of days and back to their original format."""

from __future__ import annotations

import re
import warnings
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mvrbm.extras import require

Array = NDArray[Any]

#: Format of a column whose dtype is a date type. Other formats are those of `strftime`.
NATIVE = ""
# First and last day that pandas can represent in nanoseconds, in days since 1970-01-01.
_LIMITS = (-106_751, 106_751)


def date_formats(column: Any) -> list[str]:
    """Return the formats shared by all dates in a data frame column. For other columns, return an empty list.

    A date has a year and a month, so that numbers such as "1990" are not dates, and lies between 1678 and 2262. There
    are two formats if the dates can be read month first and day first, in this order.
    """
    if getattr(column.dtype, "kind", "O") == "M":
        return [NATIVE]
    known = column.dropna()
    if not len(known) or not all(isinstance(value, str) for value in known):
        return []
    pandas = _pandas()
    found: list[str] = []
    for dayfirst in (False, True):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # if the date can only be read in the other order
            guess = pandas.tseries.api.guess_datetime_format(known.iloc[0], dayfirst=dayfirst)
        if guess is not None and guess not in found and _has_month(guess) and not _parsed(known, guess).isna().any():
            found.append(str(guess))
    # Dates that start with the year continue with the month.
    return found[:1] if found and found[0].startswith("%Y") else found


def _has_month(date_format: str) -> bool:
    return bool({"%m", "%b", "%B"} & set(re.findall("%.", date_format)))


def days_of(column: Any, date_format: str) -> Array:
    """Convert dates to days since 1970-01-01. Missing dates become NaN."""
    known = column.notna()
    parsed = _parsed(column, date_format)
    if (bad := known & parsed.isna()).any():
        form = f" in the format {date_format!r}, as in the training data" if date_format else ""
        raise ValueError(
            f"column {column.name!r} must contain dates from 1678 to 2262{form}, got {str(column[bad].iloc[0])!r}"
        )
    days = (parsed - _pandas().Timestamp(0, tz="UTC")) / _pandas().Timedelta(days=1)
    return np.asarray(days, dtype=np.float64)


def fill_dates(column: Any, date_format: str, days: Array) -> Any:
    """Fill in the missing dates in a column, using its date format. `days` contains days since 1970-01-01."""
    missing = np.asarray(column.isna())
    found = _pandas().to_datetime(days[missing].clip(*_LIMITS), unit="D", utc=True)
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
    """Convert dates to UTC timestamps. Other values and extreme dates become NaT."""
    found = _pandas().to_datetime(column, format=date_format or None, errors="coerce", utc=True)
    first, last = (_pandas().Timestamp(day, unit="D", tz="UTC") for day in _LIMITS)
    return found.where((found >= first) & (found <= last))


def _pandas() -> Any:
    return require("pandas", "reading dates", "tables")
