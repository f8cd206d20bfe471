"""Where text comes from: documents, one at a time, from the standard library, local files or a `datasets` name."""

from __future__ import annotations

import json
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peerloom.protocol.errors import DataError
from peerloom.protocol.runspec import DataSpec

PLAIN = (".txt", ".md", ".py")
SUFFIXES = (*PLAIN, ".jsonl", ".parquet")
_ACCEPTED = ", ".join(SUFFIXES)
DATASETS = "datasets:"
_INSTALL = 'install it with: pip install "peerloom[datasets]"'
# tests, bundled programs and generated tables: large, and unlike the rest
_LEFT_OUT = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "encodings", "pydoc_data", "ensurepip"}
    | {"turtledemo", "__pycache__", "msilib"}
)


@dataclass(frozen=True, slots=True)
class Document:
    """One text; `done` is the share of the source read when it ends."""

    text: bytes
    done: float


def description(spec: DataSpec) -> dict[str, object]:
    """What identifies the source's content: files by name, size and time of change. Raises DataError."""
    if spec.source.startswith(DATASETS):
        return {"source": spec.source, "text_field": spec.text_field}
    root, files = _files(spec)
    try:
        stats = [(str(path.relative_to(root)), path.stat()) for path in files]
    except OSError as error:
        raise DataError(f"the data file {error.filename} cannot be read: {error.strerror}") from error
    listed = [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]
    return {"source": spec.source, "root": str(root), "text_field": spec.text_field, "files": listed}


def documents(spec: DataSpec) -> Iterator[Document]:
    """All documents in a fixed order, empty ones left out. Raises DataError, naming file and line."""
    if spec.source.startswith(DATASETS):
        yield from _from_datasets(spec)
        return
    _, files = _files(spec)
    total = sum(path.stat().st_size for path in files) or 1
    seen = 0
    for path in files:
        size = path.stat().st_size
        for text, share in _of_file(path, spec.text_field):
            if text.strip():
                yield Document(text, (seen + share * size) / total)
        seen += size


def _files(spec: DataSpec) -> tuple[Path, list[Path]]:
    if spec.source == "stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        found = list(_library(root))
        if not found:
            raise DataError(f"no standard library sources are in {root}; set data.source to a text folder")
        return root, sorted(found)
    root = Path(spec.source).expanduser().resolve()
    try:
        if root.is_dir():
            paths = sorted(path for path in root.rglob("*") if path.suffix in SUFFIXES and path.is_file())
            if not paths:
                raise DataError(f"the data folder {root} holds no {_ACCEPTED} file; point data.source at text")
            return root, paths
        if root.is_file():
            if root.suffix not in SUFFIXES:
                raise DataError(f"the data file {root} is none of {_ACCEPTED}; point data.source at text")
            return root.parent, [root]
    except OSError as error:
        raise DataError(f"the data path {root} cannot be read: {error.strerror}") from error
    raise DataError(f"the data path {root} does not exist; correct data.source or --data, or create it")


def _library(root: Path) -> Iterator[Path]:
    """The standard library's sources; what is left out, which is most of what is there, is not entered."""
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _LEFT_OUT]
        yield from (Path(folder, name) for name in names if name.endswith(".py"))


def _of_file(path: Path, field: str) -> Iterator[tuple[bytes, float]]:
    """(text, share of the file read) of each document in a file."""
    try:
        if path.suffix in PLAIN:
            yield path.read_bytes(), 1.0
        elif path.suffix == ".jsonl":
            yield from _of_jsonl(path, field)
        else:
            yield from _of_parquet(path, field)
    except OSError as error:
        raise DataError(f"the data file {path} cannot be read: {error.strerror or error}") from error


def _of_jsonl(path: Path, field: str) -> Iterator[tuple[bytes, float]]:
    size, read = path.stat().st_size or 1, 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            read += len(line)
            if line.strip():
                yield _row(line, field, f"{path}, line {number}"), read / size


def _row(line: bytes, field: str, where: str) -> bytes:
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not UTF-8 (byte {error.start + 1}); save the file as UTF-8") from error
    except ValueError as error:
        raise DataError(f"{where}: not JSON ({error}); JSONL holds one object a line") from error
    return _field_of(row, field, where)


def _field_of(row: object, field: str, where: str) -> bytes:
    if not isinstance(row, dict) or field not in row:
        names = ", ".join(sorted(map(str, row))) if isinstance(row, dict) else type(row).__name__
        raise DataError(f'{where}: no field "{field}" (found: {names}); set data.text_field')
    if not isinstance(row[field], str):
        raise DataError(f'{where}: field "{field}" is {type(row[field]).__name__}, not text; set data.text_field')
    return str(row[field]).encode("utf-8", "replace")


def _of_parquet(path: Path, field: str) -> Iterator[tuple[bytes, float]]:
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise DataError(f"reading {path} needs pyarrow; {_INSTALL}") from error
    try:
        with parquet.ParquetFile(path) as file:
            if field not in file.schema_arrow.names:
                raise DataError(f'{path}: no column "{field}" (found: {", ".join(file.schema_arrow.names)})')
            rows, read = file.metadata.num_rows or 1, 0
            for batch in file.iter_batches(columns=[field]):
                yield from _texts(batch.column(0).to_pylist(), field, str(path), read, rows)
                read += batch.num_rows
    except pyarrow.ArrowException as error:
        raise DataError(f"{path}: not a readable Parquet file ({error})") from error


def _texts(values: Iterable[Any], field: str, where: str, read: int, rows: int) -> Iterator[tuple[bytes, float]]:
    for number, value in enumerate(values, read + 1):
        if value is not None:
            yield _field_of({field: value}, field, f"{where}, row {number}"), number / rows


def _from_datasets(spec: DataSpec) -> Iterator[Document]:
    name = spec.source.removeprefix(DATASETS)
    try:
        import datasets
    except ImportError as error:
        raise DataError(f"the data source {spec.source} needs the datasets library; {_INSTALL}") from error
    try:
        rows = datasets.load_dataset(name, split="train")
    except Exception as error:  # any of its many errors means the same to a user
        raise DataError(f"the data set {name} could not be loaded: {error}") from error
    for number, row in enumerate(rows, 1):
        text = _field_of(row, spec.text_field, f"{name}, row {number}")
        if text.strip():
            yield Document(text, number / len(rows))


def python_version() -> str:
    """What the standard library's content depends on."""
    return ".".join(map(str, sys.version_info[:3]))
