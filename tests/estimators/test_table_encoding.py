"""Tables: dates, categories, and columns that are copied."""

import numpy as np
import pandas as pd
import pytest
from sklearn.base import clone

from mvrbm import RBM, MVRBMImputer, MVRBMOutlierDetector
from mvrbm.io.dates import date_formats, days_of, fill_dates

DAYS = pd.date_range("2021-03-05", periods=40)
FORMATS = ["%Y-%m-%d", "%d.%m.%Y", "%m/%d/%Y", "%d %B %Y", "%Y-%m-%d %H:%M:%S"]


@pytest.mark.parametrize("form", FORMATS)
def test_dates_that_can_be_read_in_one_order_give_no_warning(form, recwarn):
    assert date_formats(pd.Series(DAYS[15:].strftime(form))) == [form]  # starts on the 20th
    assert len(recwarn) == 0


@pytest.mark.parametrize("form", FORMATS)
def test_text_in_one_format_is_read_as_dates(form):
    column = pd.Series(DAYS.strftime(form))
    assert date_formats(column) == [form]
    np.testing.assert_array_equal(np.diff(days_of(column, form)), 1)
    holes = column.mask(np.arange(40) == 7)
    assert fill_dates(holes, form, days_of(column, form)).tolist() == column.tolist()


@pytest.mark.parametrize("zone", [None, "Europe/Berlin"])
def test_dates_keep_their_type(zone):
    column = pd.Series(DAYS.tz_localize(zone))
    holes = column.mask(np.arange(40) == 7)
    filled = fill_dates(holes, *date_formats(holes), days_of(column, *date_formats(column)))
    pd.testing.assert_series_equal(filled, column)


@pytest.mark.parametrize(
    "values",
    [
        ["a", "b"],
        ["2020-01-01", "soon"],
        [None, None],
        [1.5, "2020-01-01"],
        ["1750", "1990", "2100"],
        ["1001", "2002", "5003"],
        ["10001", "94105"],
        ["12:30", "13:45"],
        ["1001-01-01", "5003-02-03"],
    ],
)
def test_other_columns_are_no_dates(values):
    assert date_formats(pd.Series(values, dtype=object)) == []


@pytest.mark.parametrize("codes", [["1750", "1990", "2100"], ["1001", "2002", "5003"]])
def test_codes_of_four_digits_are_categories(codes):
    rng = np.random.default_rng(0)
    x = rng.normal(size=200)
    frame = pd.DataFrame({"code": np.array(codes)[np.digitize(x, [-0.5, 0.5])], "x": x})
    frame.loc[:20, "code"] = None
    imputer = MVRBMImputer("none", random_state=0).fit(frame)
    assert imputer.encoding_.dates == {}
    assert set(imputer.transform(frame)["code"]) <= set(codes)


def test_dates_beyond_nanoseconds_raise_and_are_never_filled_in():
    column = pd.Series(["1700-01-01", "2200-01-01", None])
    assert fill_dates(column, "%Y-%m-%d", np.array([0, 0, 1e7]))[2] == "2262-04-11"
    for dtype in (object, "datetime64[s]"):
        with pytest.raises(ValueError, match=r"must contain dates from 1678 to 2262.*got '1001-01-01"):
            days_of(pd.Series(["1001-01-01"]).astype(dtype), "%Y-%m-%d" if dtype is object else "")


AMBIGUOUS = [f"0{1 + k % 9}/0{1 + k % 7}/2021" for k in range(40)]


@pytest.mark.parametrize(("dayfirst", "form"), [(None, "%m/%d/%Y"), (False, "%m/%d/%Y"), (True, "%d/%m/%Y")])
@pytest.mark.parametrize("estimator", [MVRBMImputer("none"), MVRBMOutlierDetector(n_epochs=1)])
def test_ambiguous_dates_are_read_month_first_with_a_warning_unless_told(estimator, dayfirst, form, recwarn):
    """ISO dates and dates with a day after the 12th are never ambiguous."""
    frame = pd.DataFrame(
        {
            "day": AMBIGUOUS,
            "iso": DAYS[:5].repeat(8).strftime("%Y-%m-%d"),
            "clear": DAYS.strftime("%m/%d/%Y"),
            "german": DAYS.strftime("%d.%m.%Y"),
        }
    )
    fitted = clone(estimator).set_params(random_state=0, device="cpu", dayfirst=dayfirst).fit(frame)
    assert fitted._encoding.dates == {0: form, 1: "%Y-%m-%d", 2: "%m/%d/%Y", 3: "%d.%m.%Y"}
    messages = [str(warning.message) for warning in recwarn]
    message = "dates in columns ['day'] are read month first, but could also be read day first; pass dayfirst=True or"
    assert [text.startswith(message) for text in messages] == ([True] if dayfirst is None else [])


def test_dayfirst_is_checked():
    with pytest.raises(ValueError, match="dayfirst must be True, False or None, got 'yes'"):
        MVRBMImputer(dayfirst="yes").fit(pd.DataFrame({"day": AMBIGUOUS}))


def test_an_imputer_names_a_date_in_another_format():
    frame = pd.DataFrame({"day": DAYS.strftime("%Y-%m-%d"), "size": np.arange(40.0)})
    imputer = MVRBMImputer("none", random_state=0).fit(frame)
    pd.testing.assert_frame_equal(imputer.transform(frame), frame, check_dtype=False)
    with pytest.raises(ValueError, match=r"'day' must contain dates from 1678 .*format '%Y-%m-%d'.*got '5\.3\.2021'"):
        imputer.transform(frame.assign(day="5.3.2021"))


@pytest.mark.parametrize("other", [["x", "y"], [1.0, 2.0]])
def test_repeated_column_names_raise(other):
    frame = pd.DataFrame({"a": [1.0, None], "b": other}).rename(columns={"b": "a"})
    with pytest.raises(ValueError, match="X has several columns named 'a'; rename them"):
        MVRBMImputer("none").fit(frame)


def test_text_with_as_many_values_as_rows_is_copied():
    frame = pd.DataFrame({"name": [f"n{k}" for k in range(40)], "kind": ["x", "y"] * 20, "size": [1.0, 2.0] * 20})
    frame.loc[3, ["name", "size"]] = None
    with pytest.warns(UserWarning, match=r"columns \['name'\] are excluded from the model"):
        filled = MVRBMImputer("none", random_state=0).fit_transform(frame)
    assert list(filled.columns) == ["name", "kind", "size"]
    pd.testing.assert_series_equal(filled["name"], frame["name"], check_dtype=False)
    assert filled["size"].notna().all()
    chosen = MVRBMImputer("none", n_factors=1, random_state=0).fit(frame.astype({"name": "category"}))
    assert len(chosen.encoding_.categories) == 2


def test_standard_deviations_have_the_columns_of_the_result():
    """Copied columns are at the beginning, in the middle and at the end; a category has one column per value."""
    names = np.array([f"name {i}" for i in range(40)], dtype=object)
    names[3] = None
    numbers = np.random.default_rng(0).normal(size=(40, 2))
    numbers[5, 0] = np.nan
    colors = ["red", "blue"] * 19 + ["red", None]
    empty = np.full(40, np.nan)
    values = [names, numbers[:, 0], names, empty, colors, names[::-1], numbers[:, 1], names]
    table = pd.DataFrame(dict(zip("abcdefgh", values, strict=True)))
    with pytest.warns(UserWarning, match="excluded|dropped"):
        imputer = MVRBMImputer(random_state=0, correction="none").fit(table)
    assert list(imputer.transform(table)) == list("abcefgh")
    found = imputer.standard_deviation(table)
    alone = MVRBMImputer(random_state=0, correction="none").fit(table[["b", "e", "g"]])
    expected = np.zeros((40, 8))
    expected[3, [0, 2, 7]] = np.nan
    expected[36, 5] = np.nan
    expected[:, [1, 3, 4, 6]] = alone.standard_deviation(table[["b", "e", "g"]])
    np.testing.assert_array_equal(found, expected)
    assert expected[5, 1] > 0


def test_boolean_columns_are_categories_in_tables_and_numbers_elsewhere():
    frame = pd.DataFrame({"flag": [True, False] * 20, "number": [1.0, 0.0] * 20})
    frame["flag"] = frame["flag"].astype("boolean").mask(np.arange(40) == 4)
    filled = MVRBMImputer("none", random_state=0).fit_transform(frame)
    assert filled["flag"].tolist() == [True, False] * 20
    flags = frame[["number"]].astype(bool)
    numbers = [RBM(1, n_epochs=2, random_state=0).fit(rows).score_samples(rows) for rows in (flags, flags * 1.0)]
    np.testing.assert_allclose(*numbers, rtol=1e-4)
