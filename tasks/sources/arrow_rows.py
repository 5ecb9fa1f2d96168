"""Files that PyArrow reads, opened: Arrow's own, JSON lines, and CSV (https://arrow.apache.org/docs/python)."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.json
from etils import epath

from anystep.errors import AnystepError, ExitCode, find_nearest, one_line
from anystep.features.feature import Feature
from anystep.features.ragged import Batch
from anystep.files import storage
from anystep.records.arrow_columns import (
  check_same_columns,
  column_features,
  column_missing,
  columns_of,
  small_batches,
)

# What is read at a time; a line of JSON may be longer, a row of CSV may not.
_READ_BYTES = 1 << 22
_CSV_READ_BYTES = 1 << 24
_ARROW_MAGIC = b"ARROW1"
COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".lz4": "lz4"}
# What stands behind the ending of files of several shards.
_SHARD_NUMBER = re.compile(r"-\d+-of-\d+\Z")
_TYPES = ("string", "bool", "int8", "int16", "int32", "int64", "uint8", "float32", "float64")
# Where PyArrow says which row of what it was given it failed at.
_ROW = re.compile(r"[Rr]ow #?(\d+)")


def find_compression(path: str) -> str:
  """Return the ending of a compressed file's name, `.gz`, `.bz2`, `.zst` or `.lz4`; `""` for other names.

  >>> find_compression("a.jsonl.gz"), find_compression("a.txt.gz-00000-of-00064"), find_compression("a.txt")
  ('.gz', '.gz', '')
  """
  ending = os.path.splitext(_SHARD_NUMBER.sub("", path))[1]
  return ending if ending in COMPRESSIONS else ""


def open_input(path: str) -> Any:
  """A file's bytes as an Arrow stream, decompressed where its name says how."""
  codec = COMPRESSIONS.get(find_compression(path))
  return pa.input_stream(epath.Path(path).open("rb") if storage.is_remote(path) else path, codec)


def column_type(column: str, kind: str | pa.DataType) -> pa.DataType:
  """Arrow's type of a name.

  Raises:
    AnystepError: 78 `column_type` for a name of none.
  """
  if isinstance(kind, pa.DataType):
    return kind
  try:
    return pa.type_for_alias(kind)
  except ValueError as error:
    raise AnystepError(
      ExitCode.CONFIG,
      "column_type",
      feature=column,
      expected=f"one of {', '.join(_TYPES)}, or a pyarrow.DataType",
      got=kind,
      fix=f"name a type, such as {find_nearest(kind, _TYPES)}",
    ) from error


class ArrowRows:
  """An Arrow file (feather) or stream: of a file, record batches are groups that are found."""

  def __init__(self, path: str, *, columns: Sequence[str] | None):
    self._path = path
    self.group_rows = None
    with self._open_reader() as reader:
      schema = reader.schema
      self.features = column_features(schema, path, columns)
      is_file = hasattr(reader, "num_record_batches")
    if is_file:
      # To know how many rows a batch has, some of it has to be read.
      with self._open_reader(
        sorted(schema.names, key=lambda name: _is_costly(schema.field(name)))[:1]
      ) as reader:
        rows = [reader.get_batch(k).num_rows for k in range(reader.num_record_batches)]
      self.group_rows = np.array(rows, np.int64)

  def batches(self, groups: Iterable[int] | None = None) -> Iterator[Batch]:
    with self._open_reader(list(self.features)) as reader:
      if self.group_rows is None:
        yield from _decode(reader, self.features, self._path, first_row=0)
        return
      selected_groups = list(range(len(self.group_rows)) if groups is None else groups)
      start = int(self.group_rows[: selected_groups[0]].sum()) if selected_groups else 0
      yield from _decode(map(reader.get_batch, selected_groups), self.features, self._path, first_row=start)

  @contextlib.contextmanager
  def _open_reader(self, columns: Sequence[str] | None = None) -> Iterator[Any]:
    """A reader of some columns, or all."""
    with _report_file_errors(self._path), _open_seekable(self._path) as source:
      is_file = source.read(len(_ARROW_MAGIC)) == _ARROW_MAGIC
      open_reader = pa.ipc.open_file if is_file else pa.ipc.open_stream
      source.seek(0)
      reader = open_reader(source)
      if columns is not None:
        indices = [reader.schema.get_field_index(name) for name in columns]
        source.seek(0)
        options = pa.ipc.IpcReadOptions(included_fields=indices, use_threads=False)
        reader = open_reader(source, options=options)
      yield reader


class JsonRows:
  """JSON lines: an object a line. Empty lines are no rows."""

  group_rows = None

  def __init__(
    self,
    path: str,
    *,
    columns: Sequence[str] | None,
    types: Mapping[str, Any],
    features: Mapping[str, Feature] | None,
  ):
    self._path = path
    self._drops_others = columns is not None
    if features is not None:
      self.features = features
      return
    first = next(self._read_pieces(), None)
    if first is None:
      self.features = {}
      return
    with _report_row_errors(path, first_row=0, expected="JSON objects"):
      found = pa.json.read_json(pa.BufferReader(first), **_make_json_options(first)).schema
    self.features = column_features(_simplify_schema(found, path, types), path, columns)

  def batches(self, groups: Iterable[int] | None = None) -> Iterator[Batch]:
    assert groups is None, "rows are not found"
    schema = _make_schema(self.features)
    start = 0
    for piece in self._read_pieces():
      options = _make_json_options(piece, schema=schema, drops_others=self._drops_others)
      with _report_row_errors(self._path, first_row=start, expected=_format_features(self.features)):
        table = pa.json.read_json(pa.BufferReader(piece), **options)
      yield from _decode([table], self.features, self._path, first_row=start)
      start += len(table)

  def _read_pieces(self) -> Iterator[bytes]:
    """The file's bytes in whole lines, some that are not empty at a time."""
    with _report_file_errors(self._path), open_input(self._path) as file:
      rest: list[bytes] = []
      for content in itertools.chain(iter(lambda: file.read(_READ_BYTES), b""), [None]):
        lines, end = (b"", b"") if content is None else _split_parts(content)
        if content is None or lines:
          piece = b"".join([*rest, lines])
          rest = [end]
          if piece.strip():
            yield piece
        else:
          rest.append(end)


class CsvRows:
  """Comma or otherwise separated values, the first line the columns' names unless those are given."""

  group_rows = None

  def __init__(
    self,
    path: str,
    *,
    columns: Sequence[str] | None,
    types: Mapping[str, Any],
    features: Mapping[str, Feature] | None,
    column_names: Sequence[str] | None,
    delimiter: str,
    quoted: bool,
  ):
    self._path = path
    self._read_options = pa.csv.ReadOptions(
      use_threads=False, block_size=_CSV_READ_BYTES, column_names=column_names
    )
    self._parse_options = pa.csv.ParseOptions(
      delimiter=delimiter, quote_char='"' if quoted else False, newlines_in_values=quoted
    )
    self._is_empty = _is_blank(path)
    if self._is_empty:
      self.features = features or {}
      return
    with self._open_reader(None) as reader:
      names = reader.schema.names
      schema = _simplify_schema(reader.schema, path, types)
      has_rows = features is not None or bool(next(reader, ()))
    self.features = column_features(schema, path, columns)
    if not has_rows:
      # A head alone does not say what its columns hold.
      self.features = {}
    if features is not None:
      # Types are the first file's: values show whether they hold here.
      self.features = {name: features.get(name, found) for name, found in self.features.items()}
      check_same_columns(path, self.features, expected=features)
    self._names = [name for name in names if name in self.features]

  def batches(self, groups: Iterable[int] | None = None) -> Iterator[Batch]:
    assert groups is None, "rows are not found"
    start = 0
    if self._is_empty:
      return
    with self._open_reader(_make_schema(self.features)) as reader:
      while True:
        with _report_row_errors(self._path, first_row=start, expected=_format_features(self.features)):
          batch = next(reader, None)
        if batch is None:
          return
        yield from _decode([batch], self.features, self._path, first_row=start)
        start += len(batch)

  @contextlib.contextmanager
  def _open_reader(self, schema: pa.Schema | None) -> Iterator[Any]:
    options = pa.csv.ConvertOptions(timestamp_parsers=[])
    if schema is not None:
      options = pa.csv.ConvertOptions(
        column_types=schema, include_columns=self._names, strings_can_be_null=False
      )
    expected = "as many values in each row" if schema is None else _format_features(self.features)
    with (
      _report_file_errors(self._path),
      _report_row_errors(self._path, first_row=0, expected=expected),
      open_input(self._path) as file,
      pa.csv.open_csv(
        file,
        read_options=self._read_options,
        parse_options=self._parse_options,
        convert_options=options,
      ) as reader,
    ):
      yield reader


def _decode(
  tables: Iterable[Any], features: Mapping[str, Feature], path: str, *, first_row: int
) -> Iterator[Batch]:
  for table in tables:
    for batch in small_batches(table):
      yield columns_of(batch, features, path, rows=range(first_row, first_row + len(batch)))
      first_row += len(batch)


def _is_blank(path: str) -> bool:
  """Return whether a file has only line breaks and spaces."""
  with _report_file_errors(path), open_input(path) as file:
    return not any(content.strip() for content in iter(lambda: file.read(_READ_BYTES), b""))


def _open_seekable(path: str) -> Any:
  return pa.PythonFile(epath.Path(path).open("rb"), "r") if storage.is_remote(path) else pa.memory_map(path)


def _is_costly(field: pa.Field) -> bool:
  """Return whether counting a column's values requires looking at them."""
  return not pa.types.is_primitive(field.type)


def _split_parts(content: bytes) -> tuple[bytes, bytes]:
  """The whole lines, and what follows them."""
  end = content.rfind(b"\n") + 1
  return content[:end], content[end:]


def _make_json_options(piece: bytes, *, schema: Any = None, drops_others: bool = False) -> dict[str, Any]:
  others = "infer" if schema is None else "ignore" if drops_others else "error"
  return {
    "read_options": pa.json.ReadOptions(use_threads=False, block_size=len(piece) + 1),
    "parse_options": pa.json.ParseOptions(explicit_schema=schema, unexpected_field_behavior=others),
  }


def _simplify_schema(schema: pa.Schema, path: str, types: Mapping[str, Any]) -> pa.Schema:
  """A guessed schema with the types that were given; what looks like a date or is always empty is a text.

  Raises:
    AnystepError: 78 `column_missing` for a type of a column that is not there.
  """
  for name in types:
    if name not in schema.names:
      raise column_missing(path, name, schema.names)
  return pa.schema([(field.name, types.get(field.name, _simplify_type(field.type))) for field in schema])


def _simplify_type(kind: pa.DataType) -> pa.DataType:
  if pa.types.is_list(kind):
    return pa.list_(_simplify_type(kind.value_type))
  return pa.string() if pa.types.is_temporal(kind) or pa.types.is_null(kind) else kind


def _make_schema(features: Mapping[str, Feature]) -> pa.Schema:
  """The schema of which these are the features."""

  def find_type(feature: Feature) -> pa.DataType:
    kind = pa.large_binary() if feature.dtype == "string" else pa.from_numpy_dtype(feature.numpy_dtype)
    return pa.list_(kind) if feature.shape else kind

  return pa.schema([(name, find_type(feature)) for name, feature in features.items()])


def _format_features(features: Mapping[str, Feature]) -> str:
  return ", ".join(f"{name}: {f.dtype}{list(f.shape) or ''}" for name, f in features.items())


@contextlib.contextmanager
def _report_row_errors(path: str, *, first_row: int, expected: str) -> Iterator[None]:
  """Tells of rows that are not of the columns' types, and where."""
  try:
    yield
  except pa.ArrowInvalid as error:
    match = _ROW.search(str(error))
    row = first_row + int(match[1]) if match else None
    raise AnystepError(
      ExitCode.DATA,
      "file_rows",
      path=path,
      **({"after_row": first_row} if row is None else {"row": row}),
      expected=expected,
      got=one_line(error, with_type=False),
      fix="mend the file, name the columns that are read with columns=, or what they hold with types=",
    ) from error


@contextlib.contextmanager
def _report_file_errors(path: str) -> Iterator[None]:
  """Tells of files that are not what their names say, or not all of it."""
  try:
    yield
  except (pa.ArrowInvalid, OSError) as error:
    if isinstance(error, FileNotFoundError):
      raise
    raise AnystepError(
      ExitCode.DATA,
      "file_container",
      path=path,
      expected="a whole file of the format that its name says",
      got=one_line(error, with_type=False),
      fix="fetch or write the file anew",
    ) from error
