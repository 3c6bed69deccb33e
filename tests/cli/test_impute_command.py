"""mvrbm impute: arrays and tables are filled in, and bad input gives one line."""

import json

import numpy as np
import pytest

from mvrbm import MVRBMImputer
from mvrbm.cli import main


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, 2)) @ rng.normal(size=(2, 6))
    x[::5, 2] = np.nan
    np.save("holes.npy", x)
    np.save("infinite.npy", np.where(np.arange(x.size).reshape(x.shape) == 19, np.inf, x))
    rows = [f"{n % 2 if n % 5 != 2 else ''},{('red', 'blue')[n % 2] if n % 5 else ''}" for n in range(60)]
    (tmp_path / "table.csv").write_text("\n".join(["size,color", *rows]))
    return tmp_path


def test_arrays_are_filled_in_by_a_new_and_by_a_saved_imputer(place, capsys):
    assert main(["impute", "holes.npy", "a.npy", "--deviations", "d.npy", "--save", "model", "--quiet", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["missing"] == 8
    assert main(["impute", "holes.npy", "b.npy", "--model", "model"]) == 0
    holes, filled, deviations = np.load("holes.npy"), np.load("a.npy"), np.load("d.npy")
    np.testing.assert_array_equal((deviations > 0), np.isnan(holes))
    np.testing.assert_array_equal(filled[~np.isnan(holes)], holes[~np.isnan(holes)])
    np.testing.assert_allclose(np.load("b.npy"), filled)
    assert main(["impute", "holes.npy", "c.npy", "--model", "model", "-n", "10:20"]) == 0
    np.testing.assert_allclose(np.load("c.npy"), filled[10:20])


def test_options_are_those_of_the_imputer(place):
    train = np.random.default_rng(1).normal(size=(50, 6))
    train[::3, 4] = np.nan
    np.save(place / "train.npy", train)
    options = "--train train.npy --epochs 2 --seed 5 --device cpu --quiet --deviations d.npy -n 10:30"
    assert main(["impute", "holes.npy", "a.npy", *options.split()]) == 0
    imputer, holes = MVRBMImputer(n_epochs=2, random_state=5, device="cpu").fit(train), np.load("holes.npy")[10:30]
    np.testing.assert_array_equal(np.load("a.npy"), imputer.transform(holes))
    np.testing.assert_array_equal(np.load("d.npy"), imputer.standard_deviation(holes))


def test_tables_keep_their_columns(place):
    pandas = pytest.importorskip("pandas")
    assert main(["impute", "table.csv", "filled.csv", "--quiet"]) == 0
    filled = pandas.read_csv("filled.csv")
    assert filled["color"].tolist() == [("red", "blue")[n % 2] for n in range(60)]
    assert np.abs(filled["size"] - np.arange(60) % 2).max() < 0.3


def test_numbers_can_be_categories(place):
    pandas = pytest.importorskip("pandas")
    # Each grade has its own width and height.
    lines = [f"{n % 3 == 0:d},{n % 3 == 1:d},{(7, 9, 5)[n % 3] if n % 4 else ''}" for n in range(60)]
    (place / "grades.csv").write_text("\n".join(["width,height,grade", *lines]))
    assert main(["impute", "grades.csv", "filled.csv", "--categorical", "grade", "--save", "model", "--quiet"]) == 0
    assert pandas.read_csv("filled.csv", dtype=str)["grade"].tolist() == [("7", "9", "5")[n % 3] for n in range(60)]
    assert main(["impute", "grades.csv", "again.csv", "--model", "model"]) == 0
    assert (place / "again.csv").read_text() == (place / "filled.csv").read_text()


def test_tables_of_numbers_stay_tables(place):
    pandas = pytest.importorskip("pandas")
    (place / "numbers.csv").write_text("\n".join(["a,b", *[f"{n},{2 * n if n % 4 else ''}" for n in range(40)]]))
    assert main(["impute", "numbers.csv", "filled.csv", "--quiet"]) == 0
    filled = pandas.read_csv("filled.csv")
    assert list(filled.columns) == ["a", "b"]
    assert np.abs(filled["b"] - 2 * filled["a"]).max() < 8


def test_what_was_made_of_columns_is_said(place, capsys):
    pytest.importorskip("pandas")
    lines = [f"{n / 7},{n % 3},,{'?' if n == 3 else n}" for n in range(40)]
    lines[5] = "1,2,,"
    (place / "mixed.csv").write_text("\n".join(["a,code,empty,text", *lines]))
    assert main(["impute", "mixed.csv:-a", "filled.csv", "--quiet"]) == 0
    shown, notes = capsys.readouterr()
    assert notes == "note: column 'text' is text because of '?' in line 5; leave a field empty to mark it as missing\n"
    assert "41 of 120 entries were missing: 0 filled in, 41 left empty in columns empty, text\n" in shown
    assert "columns without known entries: empty\n" in shown
    assert "columns not used because their texts differ in most rows (see --categorical): text\n" in shown
    assert "treated as numeric (see --categorical): code\n" in shown
    assert (place / "filled.csv").read_text() == "\n".join(
        ["code,empty,text", *[line.split(",", 1)[1] for line in lines]]
    )
    assert main(["impute", "mixed.csv", "b.csv", "--categorical", "text", "--quiet"]) == 0
    assert "40 left empty in columns empty\n" in capsys.readouterr().out


EXACT = {
    "separators": ("a;b;note\n", "1;{};x,y\n"),
    "line endings": ("a,b\r\n", "1,{}\r\n"),
    "byte order mark": ('\ufeff"a",b\n', "1,{}\n"),
    "blank lines": ("\na,b\n\n", "1,{}\n  \n\n"),
    "quotation marks": ('"a","b"\n', '"1",{}\n'),
    "several lines": ('a,b,"c\nd"\n', '1,{},"x\n""y"""\n'),
    "names": ("a,a,,a\n", "1,{},5,6\n"),
    "no header": ("", "1,{}\n"),
    "numbers": ("a,b\n", "01e0,{}\n"),
    "separators at the end of rows": ("a,b\n", "1,{},\n"),
    "no end of the last line": ("a,b", "\n1,{}"),
}


@pytest.mark.parametrize("name", EXACT)
def test_only_missing_fields_change(place, name):
    pytest.importorskip("pandas")
    head, row = EXACT[name]
    parts = [(head + 9 * row.format("2.50") + row).partition("{}")[0], row.partition("{}")[2] + 9 * row.format("2.50")]
    (place / "t.csv").write_bytes("".join(parts).encode())
    assert main(["impute", "t.csv", "filled.csv", "--quiet"]) == 0
    filled = (place / "filled.csv").read_bytes().decode()
    assert filled.startswith(parts[0])
    assert filled.endswith(parts[1])
    assert float(filled[len(parts[0]) : -len(parts[1])]) == pytest.approx(2.5)


@pytest.mark.parametrize("separator", [";", "\t"])
def test_decimal_commas(place, separator):
    pytest.importorskip("pandas")
    rows = [f"{n / 7:.3f};{n / 9 + 0.1:.3f};{n}" for n in range(40)]
    rows[5] = "0.714;;"
    rows = [row.replace(".", ",").replace(";", separator) for row in rows]
    (place / "t.tsv").write_text("\n".join(rows))
    assert main(["impute", "t.tsv", "filled.csv", "--quiet"]) == 0  # with semicolons instead of tabs
    filled = (place / "filled.csv").read_text().split("\n")
    assert [row.replace(separator, ";") for row in rows[:5] + rows[6:]] == filled[:5] + filled[6:]
    values = filled[5].split(";")
    assert all("," in value for value in values)
    assert [float(value.replace(",", ".")) for value in values] == pytest.approx([0.714, 5 / 9 + 0.1, 5], abs=0.3)


def test_the_suffix_determines_the_separator(place):
    pytest.importorskip("pandas")
    lines = ["a\tb\tc, d", *[f'{n}\t"{n}"\tx,y' for n in range(30)], "\t3\tz"]
    (place / "t.tsv").write_text("\n".join(lines))
    assert main(["impute", "t.tsv", "t.csv", "--quiet"]) == 0
    assert (place / "t.csv").read_text().startswith('a,b,"c, d"\n0,"0","x,y"\n')
    assert main(["impute", "t.csv", "again.tsv", "--quiet"]) == 0
    assert (place / "again.tsv").read_text().startswith('a\tb\t"c, d"\n0\t"0"\t"x,y"\n')


def test_categories_are_written_as_in_the_file(place):
    pytest.importorskip("pandas")
    lines = [f"{n % 2},{('false', 'true')[n % 2] if n % 5 else ''},0{n % 2 if n % 7 else ''}" for n in range(60)]
    lines = [
        line.removesuffix(",0") + "," if line.endswith(",0") and n % 7 == 0 else line for n, line in enumerate(lines)
    ]
    (place / "t.csv").write_text("\n".join(["x,flag,code", *lines]))
    assert main(["impute", "t.csv", "filled.csv", "--categorical", "code", "--quiet"]) == 0
    expected = [f"{n % 2},{('false', 'true')[n % 2]},0{n % 2}" for n in range(60)]
    assert (place / "filled.csv").read_text().split("\n")[1:] == expected


@pytest.mark.parametrize("value", ["12345678901234567890123", "abc"])
def test_the_value_that_makes_a_column_text_is_named(place, capsys, value):
    pytest.importorskip("pandas")
    rows = [f"{n},{10**15 + n}" for n in range(30)]
    (place / "t.csv").write_text("\n".join(["a,b", *rows, f"3,{value}", "4,"]))
    assert main(["impute", "t.csv", "filled.csv", "--quiet"]) == 0
    shown, notes = capsys.readouterr()
    assert "1 of 64 entries were missing: 0 filled in, 1 left empty in columns b\n" in shown
    assert f"column 'b' is text because of '{value}' in line 32;" in notes


def test_arrays_keep_their_empty_columns(place, capsys):
    holes = np.load("holes.npy")
    holes[:, 3] = np.nan
    np.save("holes.npy", holes)
    assert main(["impute", "holes.npy", "a.npy", "--deviations", "d.npy", "--quiet"]) == 0
    shown, notes = capsys.readouterr()
    assert "48 of 240 entries were missing: 8 filled in, 40 left empty in columns 3 without known entries" in shown
    assert notes == ""
    for name in ("a.npy", "d.npy"):
        assert np.isnan(np.load(name)).sum(0).tolist() == [0, 0, 0, 40, 0, 0]


def test_dates_are_numbers_and_come_back_in_their_format(place, capsys):
    pandas = pytest.importorskip("pandas")
    days = pandas.date_range("2020-01-20", periods=60).strftime("%d %B %Y")
    lines = [f"{'' if n == 30 else day},{n}" for n, day in enumerate(days)]
    (place / "dated.csv").write_text("\n".join(["day,number", *lines]))
    assert main(["impute", "dated.csv", "filled.csv", "--quiet", "--save", "model"]) == 0
    assert "columns of dates: day\n" in capsys.readouterr().out
    filled = pandas.read_csv("filled.csv")
    assert filled["day"].drop(30).tolist() == days.delete(30).tolist()
    assert abs(pandas.to_datetime(filled["day"], format="%d %B %Y")[30] - pandas.Timestamp("2020-02-19")).days <= 3
    assert main(["impute", "dated.csv", "again.csv", "--model", "model"]) == 0
    assert (place / "again.csv").read_text() == (place / "filled.csv").read_text()


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_known_entries_are_written_as_they_are(place, capsys, kind):
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    rng = np.random.default_rng(0)
    lines = [
        f'{1234567 + n},{f"0{n + 10}" if n != 5 else ""},{n % 2 == 0},{x:.3f}0,{"NA" if n % 3 else "DE"},"a, b"'
        for n, x in enumerate(rng.normal(size=40))
    ]
    lines[7] = "1234574,017,,NA,,"
    text = "\n".join(["id,zip,flag,x,country,words", *lines])
    (place / "ids.csv").write_text(text)
    if kind == "parquet":
        frame = pandas.read_csv("ids.csv", keep_default_na=False, na_values=[""])
        frame["x"] = pandas.to_numeric(frame["x"], errors="coerce")
        frame.to_parquet("ids.parquet")
    assert main(["impute", f"ids.{kind}", "filled.csv", "--quiet"]) == 0
    shown, notes = capsys.readouterr()
    assert "5 of 240 entries were missing" in shown
    assert "columns country contain text such as NA or None, which is treated as a category" in notes
    given = pandas.read_csv("ids.csv", dtype=str, keep_default_na=False)
    filled = pandas.read_csv("filled.csv", dtype=str, keep_default_na=False)
    holes = (given == "") | (given["x"] == "NA").to_numpy()[:, None] & (given.columns == "x")
    assert (filled != "").all(axis=None)
    if kind == "csv":
        pandas.testing.assert_frame_equal(filled.mask(holes), given.mask(holes))
    else:  # numbers in a Parquet file have no leading or trailing zeros
        names = ["id", "flag", "country", "words"]
        pandas.testing.assert_frame_equal(filled[names].mask(holes[names]), given[names].mask(holes[names]))
        assert filled["zip"][3] == "13"


@pytest.mark.parametrize(
    ("options", "day", "note"),
    [
        ([], "2021-01-02", "read month first, but could also be read day first; pass --day-first or --month-first\n"),
        (["--month-first"], "2021-01-02", ""),
        (["--day-first"], "2021-02-01", ""),
    ],
)
def test_ambiguous_dates(place, capsys, options, day, note):
    """The second column is the number of days since the first date, so the missing date is known."""
    pandas = pytest.importorskip("pandas")
    days = pandas.to_datetime([f"2021-{month:02}-{number:02}" for month in range(1, 13) for number in range(1, 13)])
    form = "%d/%m/%Y" if "--day-first" in options else "%m/%d/%Y"
    numbers = (days - days[0]).days
    hole = list(days).index(pandas.Timestamp(day))
    lines = [f"{'' if n == hole else date.strftime(form)},{numbers[n]}" for n, date in enumerate(days)]
    (place / "dated.csv").write_text("\n".join(["day,number", *lines]))
    assert main(["impute", "dated.csv", "filled.csv", "--quiet", *options]) == 0
    notes = capsys.readouterr().err
    assert notes.endswith(note)
    assert ("read month first" in notes) == bool(note)
    filled = pandas.to_datetime(pandas.read_csv("filled.csv")["day"], format=form)
    assert abs((filled[hole] - pandas.Timestamp(day)).days) <= 6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["holes.npy", "a.npy", "--day-first"], "requires a table as INPUT and a .csv or .tsv file as OUT; omit it"),
        (
            ["holes.npy", "filled.csv"],
            "a .csv or .tsv file as OUT requires a table as INPUT (.csv, .csv.gz, .tsv, .tsv.gz, .parquet), got holes",
        ),
        (["table.csv", "filled.npy"], "column 'color' has type str, which is not numeric"),
        (["holes.npy", "holes.npy"], "holes.npy already exists; use --force to replace it"),
        (
            ["table.csv", "a.csv", "--categorical", "size,hue"],
            "names the column 'hue', but table.csv has only ['size',",
        ),
        (
            ["holes.npy", "a.npy", "--categorical", "a"],
            "--categorical requires a table as INPUT and a .csv or .tsv file as OUT, got a.npy",
        ),
        (["table.csv", "a.parquet"], "a.parquet must end in .npy, .csv, .tsv, .png"),
        (
            ["holes.npy", "a.npy", "--deviations", "./a.npy"],
            "OUT and --deviations must be different files, got a.npy for both",
        ),
        (["infinite.npy", "a.npy"], "infinite.npy contains an infinite entry at index (3, 1); replace it"),
        (["nowhere.npy", "a.npy"], "nowhere.npy: no such file"),
        (
            ["holes.npy", "a.npy", "--model", "m", "--epochs", "3"],
            "--model cannot be combined with --epochs because the model in m is already trained",
        ),
        (["holes.npy", "a.npy", "-n", "50:60"], "-n selects none of the 40 samples in holes.npy"),
        (["holes.npy", "a.npy", "--sample-axes", "2", "--quiet"], "sample_axes must be at most 1"),
    ],
)
def test_bad_input_gives_one_line(place, capsys, arguments, message):
    assert main(["impute", *arguments]) != 0
    errors = capsys.readouterr().err.strip()
    assert message in errors
    assert errors.count("\n") == 0


def test_columns_have_the_same_types_as_in_the_training_data(place, capsys):
    pytest.importorskip("pandas")
    kinds = [("1", "2", "A")[n % 3] for n in range(60)]
    rows = [f"{kind if n % 7 else ''},{5 * '1A2'.index(kind) + n % 4 / 10}" for n, kind in enumerate(kinds)]
    (place / "all.csv").write_text("\n".join(["kind,x", *rows]))
    (place / "some.csv").write_text("kind,x\n1,0.1\n,0.2\n2,10.2\n,10.1\n")
    assert main(["impute", "some.csv", "a.csv", "--train", "all.csv", "--save", "model", "--quiet"]) == 0
    assert main(["impute", "some.csv", "b.csv", "--model", "model"]) == 0
    expected = "kind,x\n1,0.1\n1,0.2\n2,10.2\n2,10.1\n"
    assert (place / "a.csv").read_text() == expected
    assert (place / "b.csv").read_text() == expected
    (place / "other.csv").write_text("kind,x\nB,5.1\n")
    assert main(["impute", "other.csv", "c.csv", "--model", "model"]) == 1
    assert "such as 'B'; replace them with missing values, or train on data" in capsys.readouterr().err
