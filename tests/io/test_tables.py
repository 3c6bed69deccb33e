"""Tests of tables, stored arrays and folders of classes."""

import gzip

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from mvrbm.errors import InputError, MissingPackageError
from mvrbm.io import arrays, tables
from mvrbm.io.arrays import read_array, read_labels, read_samples
from mvrbm.io.shards import StoredRows

NUMBERS = np.array([[0.5, 1.0, np.nan], [2.0, 3.5, 4.0]])
FRAME = pd.DataFrame({"a": [0.5, 2.0], "name": ["x", "y"], "b": [1.0, 3.5], "c": [np.nan, 4.0]})


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("t.csv", "a,b,c\n0.5,1,\n2,3.5,4\n"),
        ("t.csv", "a;b;c\n0.5;1;NA\n2;3.5;4\n"),
        ("t.tsv", "a\tb\tc\n0.5\t1\t\n2\t3.5\t4\n"),
        ("t.csv", "0.5,1,\n2,3.5,4\n"),
        ("t.csv", '"a","b, the second",c\n0.5,1,\n2,3.5,4\n'),
        ("t.csv.gz", "a,b,c\n0.5,1,\n2,3.5,4\n"),
    ],
)
def test_missing_values_of_csv_files_are_nan(tmp_path, name, text):
    (tmp_path / name).write_bytes(gzip.compress(text.encode()) if name.endswith("gz") else text.encode())
    found = read_samples(tmp_path / name)
    assert found.dtype == np.float64
    np.testing.assert_array_equal(found, NUMBERS)


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_columns_are_chosen_by_name(tmp_path, suffix):
    if suffix == ".parquet":
        pytest.importorskip("pyarrow")
    path = tmp_path / f"table{suffix}"
    FRAME.to_csv(path, index=False) if suffix == ".csv" else FRAME.to_parquet(path)
    np.testing.assert_array_equal(read_array(f"{path}:-name"), NUMBERS)
    np.testing.assert_array_equal(read_array(f"{path}:c,a"), NUMBERS[:, [2, 0]])
    assert read_labels(f"{path}:name").tolist() == ["x", "y"]
    np.save(tmp_path / "names.npy", np.array(["Zoë", "y"]))
    assert read_labels(tmp_path / "names.npy").tolist() == ["Zoë", "y"]
    np.save(tmp_path / "square.npy", np.array([["x", "y"]]))
    with pytest.raises(InputError, match="expected one label or one-hot vector per sample"):
        read_labels(tmp_path / "square.npy")
    with pytest.raises(InputError, match="booleans, integers or floats are required"):
        read_array(tmp_path / "names.npy")
    for columns, message in [
        ("", "column 'name' has type .*, which is not numeric: select columns with table"),
        (":z", "has no column 'z', only a, name, b, c"),
    ]:
        with pytest.raises(InputError, match=message):
            read_array(f"{path}{columns}")
    for columns, message in [
        (":a,b", "has 2 columns: select the label column"),
        (":c", "1 labels are missing in column 'c'"),
    ]:
        with pytest.raises(InputError, match=message):
            read_labels(f"{path}{columns}")


def test_small_files_that_take_much_memory_raise(tmp_path, monkeypatch):
    (tmp_path / "wide.csv").write_text("1" + ",1" * 100_000 + "\n")
    message = r"wide\.csv: a table of 100,001 columns requires 100,001,000 bytes, which exceeds the"
    with pytest.raises(InputError, match=message):
        read_array(tmp_path / "wide.csv")
    (tmp_path / "bomb.csv.gz").write_bytes(gzip.compress(b"1,2\n" * 10**6))
    with pytest.raises(InputError, match=r"bomb\.csv\.gz has 2,097,152 bytes, more than the limit of 1,500,000"):
        read_array(tmp_path / "bomb.csv.gz", largest=1_500_000)
    pytest.importorskip("pyarrow")
    path = tmp_path / "constant.parquet"
    pd.DataFrame({"a": np.zeros(2 * 10**5)}).to_parquet(path)
    monkeypatch.setattr(tables, "ALLOWANCE", 1000)
    monkeypatch.setattr(tables, "BEST_COMPRESSION", 10)
    with pytest.raises(InputError, match=r"constant\.parquet has 1,600,000 bytes, more than the limit of"):
        read_array(path)


@pytest.mark.parametrize("compression", ["none", "snappy", "zstd", "gzip"])
@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("use_dictionary", [True, False])
def test_parquet_files_of_every_layout_are_read(tmp_path, compression, version, use_dictionary):
    pytest.importorskip("pyarrow")
    path, rng = tmp_path / "table.parquet", np.random.default_rng(0)
    frame = pd.DataFrame({"a": rng.random(3000), "b": rng.integers(0, 9, 3000), "c": [None, "word"] * 1500})
    options = {"data_page_version": version, "data_page_size": 2000, "write_page_checksum": True, "row_group_size": 900}
    frame.to_parquet(path, compression=compression, use_dictionary=use_dictionary, **options)
    pd.testing.assert_frame_equal(tables.read_table(path), frame)


def test_the_size_of_texts_in_a_parquet_file_counts(tmp_path):
    """The table has three entries of 40,000 bytes each."""
    pytest.importorskip("pyarrow")
    path = tmp_path / "table.parquet"
    pd.DataFrame({"a": ["x" * 40_000, "y" * 40_000, "z" * 40_000]}).to_parquet(path, compression="zstd")
    with pytest.raises(InputError, match=r"table\.parquet has 1\d\d,\d+ bytes, more than the limit of 100,000"):
        tables.read_table(path, largest=100_000)


@pytest.mark.parametrize("claim", [b"\x8c\x82\x83\xe1\x05", b"\xff" * 12], ids=["772,825,222 values", "too long"])
def test_a_parquet_dictionary_that_claims_gigabytes_raises(tmp_path, claim):
    pq = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "table.parquet"
    pd.DataFrame({"a": [1, 2, 1]}).to_parquet(path, compression="none")
    content = path.read_bytes()
    at = content.index(b"\x4c\x15", pq.read_metadata(path).row_group(0).column(0).dictionary_page_offset) + 2
    path.write_bytes(content[:at] + claim + content[at + 1 :])
    with pytest.raises(InputError, match=r"table\.parquet is corrupted or truncated"):
        read_array(path)


@pytest.mark.parametrize("largest", [254, 255, 256])
def test_the_largest_value_does_not_change_the_type(tmp_path, largest):
    """If it did, the same values would be divided by 255 in one file and not in another."""
    rows = pd.DataFrame([[0, largest], [7, 9]], columns=["a", "b"])
    rows.to_csv(tmp_path / "numbers.csv", index=False)
    found = read_samples(tmp_path / "numbers.csv")
    assert found.dtype == np.float64
    np.testing.assert_array_equal(found, rows)
    pd.DataFrame(np.eye(3, dtype=int)).to_csv(tmp_path / "one-hot.csv", index=False)
    np.testing.assert_array_equal(read_labels(tmp_path / "one-hot.csv"), np.eye(3))


@pytest.mark.parametrize("marker", sorted(tables.MISSING))
def test_a_first_row_with_missing_entries_is_no_header(tmp_path, marker):
    path = tmp_path / "t.csv"
    path.write_text(f"1,{marker},3\n4,5,6\n")
    frame = tables.read_table(path)
    np.testing.assert_array_equal(frame, [[1, np.nan, 3], [4, 5, 6]])
    path.write_text(f"1,{marker},x\n4,5,6\n")
    assert list(tables.read_table(path).columns)[::2] == ["1", "x"]


def test_markers_are_those_of_pandas():
    from pandas._libs.parsers import STR_NA_VALUES

    assert STR_NA_VALUES == tables.MISSING


def test_markers_are_missing_numbers_and_dates_but_not_missing_text(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("x,day,country,flag\n1,2020-01-01,NA,True\nNA,None,,NA\n3,2020-01-03,DE,False\n")
    frame = tables.read_table(path)
    assert frame["x"].isna().tolist() == [False, True, False]
    assert frame["x"].dtype == np.float64
    assert frame["day"].isna().tolist() == [False, True, False]
    assert frame["flag"].isna().tolist() == [False, True, False]
    assert frame["country"].isna().tolist() == [False, True, False]
    assert frame["country"].dropna().tolist() == ["NA", "DE"]
    text = tables.read_table_text(path, "x,flag")
    assert [text.column(0), text.column(1)] == [["1", "NA", "3"], ["True", "NA", "False"]]


@pytest.mark.parametrize(
    ("text", "warns"),
    [
        ("5.1,3.5,setosa\n4.9,,virginica\n", True),
        ("name,2019,2020\nAnn,1,2\n", True),
        ("id,name\n1,Ann\n", False),
        ("a,b\nx,y\n", False),
        ("0,1,2\n5,6,7\n", False),
        ("1,2\n3,4\n", False),
    ],
)
def test_a_header_that_looks_like_data_warns(tmp_path, recwarn, text, warns):
    (tmp_path / "t.csv").write_text(text)
    tables.read_table(tmp_path / "t.csv")
    assert ["read as column names, but looks like" in str(warning.message) for warning in recwarn] == [True] * warns


def test_invalid_tables_raise(tmp_path):
    for text, message in [
        (b"a,b\n", "no entries"),
        (b"", "bad.csv is empty"),
        (b"\xef\xbb\xbf\n", "bad.csv is empty"),
        (b"name,x\nJos\xe9,1\n", "bad.csv is not a UTF-8 file; convert it to UTF-8"),
        (b"a,b\n1,2\n\n1,2,3\n", "bad.csv, line 4: 3 fields, but the header has 2"),
        (b'a,b\n"1\n1",2\n3\n', "bad.csv, line 4: 1 field, but the header has 2"),
        (b"1,2\n1,2,3\n", "bad.csv, line 2: 3 fields, but the first line has 2"),
        (b"a,b\n1,2\n\n-inf,2\n", "bad.csv, line 4: column 'a' is infinite; leave the field empty if"),
    ]:
        (tmp_path / "bad.csv").write_bytes(text)
        with pytest.raises(InputError, match=message):
            read_array(tmp_path / "bad.csv")
    (tmp_path / "large.csv").write_bytes(b"a\n" + b"1\n" * 100)
    with pytest.raises(InputError, match="more than the limit of 50"):
        read_array(tmp_path / "large.csv", largest=50)


def test_the_error_for_a_missing_package_names_the_command(tmp_path, monkeypatch):
    (tmp_path / "x.h5").write_bytes(b"x")
    monkeypatch.setitem(__import__("sys").modules, "h5py", None)
    with pytest.raises(
        MissingPackageError, match=r"^reading x.h5 requires the package h5py.*pip install 'mvrbm\[hdf5\]'$"
    ):
        read_array(tmp_path / "x.h5")


def stored(kind, path, content):
    """Write arrays by name into an HDF5 file or a zarr store."""
    if kind == "h5":
        h5py = pytest.importorskip("h5py")
        with h5py.File(path, "w") as file:
            for name, array in content.items():
                file[name] = array
    else:
        zarr = pytest.importorskip("zarr")
        group = zarr.open_group(str(path), mode="w")
        for name, array in content.items():
            group.create_array(name, data=array)


@pytest.mark.parametrize("kind", ["h5", "zarr"])
def test_stored_arrays(tmp_path, monkeypatch, kind):
    digits = np.arange(60, dtype=np.float32).reshape(5, 4, 3)
    one, two = tmp_path / f"one.{kind}", tmp_path / f"two.{kind}"
    stored(kind, one, {"digits": digits})
    stored(kind, two, {"train/digits": digits, "y": np.arange(5)})
    for source in (one, f"{two}:train/digits"):
        np.testing.assert_array_equal(read_samples(source), digits)
    assert read_labels(f"{two}:y").tolist() == [0, 1, 2, 3, 4]
    monkeypatch.setattr(arrays, "_IN_MEMORY", 10)
    rows = read_samples(one)
    assert isinstance(rows, StoredRows)
    np.testing.assert_array_equal(rows[[4, 0, 0, 2]], digits[[4, 0, 0, 2]])
    np.testing.assert_array_equal(rows.reshape(5, 12)[1:3], digits.reshape(5, 12)[1:3])
    with pytest.raises(InputError, match=r"contains 2 arrays \(.*\): select one with two"):
        read_array(two)
    with pytest.raises(InputError, match="contains no array 'x', only"):
        read_array(f"{two}:x")
    with pytest.raises(InputError, match="exceeds the limit of 100 bytes"):
        read_array(one, largest=100)
    (tmp_path / "bad.h5").write_bytes(b"no HDF5")
    (tmp_path / "bad.zarr").mkdir()
    with pytest.raises(InputError, match=rf"bad.{kind} is (corrupted|not a readable zarr store)"):
        read_array(tmp_path / f"bad.{kind}")


def test_each_subfolder_of_images_is_a_class(tmp_path):
    for name, values in {"cat": [10, 20], "dog": [30]}.items():
        (tmp_path / name).mkdir()
        for value in values:
            Image.new("L", (3, 2), value).save(tmp_path / name / f"{value}.png")
    assert read_array(tmp_path)[:, 0, 0].tolist() == [10, 20, 30]
    assert read_array(tmp_path).shape == (3, 2, 3)
    assert read_labels(tmp_path).tolist() == ["cat", "cat", "dog"]
    with pytest.raises(InputError, match="labels require one subfolder of images per class"):
        read_labels(tmp_path / "cat")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="empty contains no images"):
        read_array(tmp_path)


def test_suffixes_of_tables_and_stores():
    assert {".csv", ".parquet"} < set(tables.TABLES)
    assert {".h5", ".zarr"} < set(tables.STORES)


def test_the_first_column_is_never_an_index(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("a,b,c\n1,2,3,\n4,,6,\n7,8,9,\n")
    frame = tables.read_table(path)
    assert list(frame.columns) == ["a", "b", "c"]
    assert frame["a"].tolist() == [1, 4, 7]
    path.write_text("a,b\n1,2,3\n4,5,6\n")
    with pytest.raises(InputError, match=r"t\.csv, line 2: 3 fields, but the header has 2"):
        tables.read_table(path)


def test_a_long_field_in_the_second_line_is_read(tmp_path):
    """The csv module of Python would limit the length of fields."""
    path = tmp_path / "t.csv"
    path.write_text(f"id,text\n1,{'word ' * 60_000}\n2,x\n")
    assert tables.read_table(path)["text"].str.len().tolist() == [300_000, 1]


def test_numbers_can_be_read_as_text(tmp_path):
    pytest.importorskip("pyarrow")
    path = tmp_path / "t.csv"
    path.write_text("x,code,flag\n1,01,True\n2,,False\n3,NA,True\n")
    frame = tables.read_table(path, text=["code", "flag", "other"])
    assert frame["x"].tolist() == [1, 2, 3]
    assert frame["code"].isna().tolist() == [False, True, False]
    assert frame["code"].dropna().tolist() == ["01", "NA"]
    assert frame["flag"].tolist() == ["True", "False", "True"]
    path.write_text("5,1\n6,2\n")
    assert tables.read_table(path, text=["1"])["1"].tolist() == ["1", "2"]
    pd.DataFrame({"x": [1, 2], "code": [7, np.nan]}).to_parquet(tmp_path / "t.parquet")
    frame = tables.read_table(tmp_path / "t.parquet", text=["code"])
    assert frame["code"].dropna().tolist() == ["7"]
    assert frame["code"].isna().tolist() == [False, True]


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1,5;2\n2,5;3\n", [1.5, 2.5]),
        ('"length\n(m, cm)";b\n1,5;2\nNA;3\n', [1.5, np.nan]),
        ("a\tb\n1\t2\n-2,5e1\t3\n", [1.0, -25.0]),
        ("a;b\n1,5;2\n2.5;3\n", ["1,5", "2.5"]),
        ('a,b\n"1,500",2\n"2,500",3\n', ["1,500", "2,500"]),
    ],
)
def test_decimal_commas(tmp_path, text, values):
    (tmp_path / "t.csv").write_text(text)
    frame = tables.read_table(tmp_path / "t.csv")
    assert frame.shape == (2, 2)
    assert list(frame.iloc[:, 0]) == pytest.approx(values, nan_ok=True)


def test_a_column_of_a_large_file_has_one_type(tmp_path):
    """Without low_memory=False, pandas would read the first 524,288 fields as numbers, and "01" as 1."""
    (tmp_path / "t.csv").write_text("code\n" + "01\n" * 600_000 + "A\n")
    assert tables.read_table(tmp_path / "t.csv")["code"].unique().tolist() == ["01", "A"]
