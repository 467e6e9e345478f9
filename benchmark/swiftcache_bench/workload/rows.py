"""Reads data files: JSON Lines row by row, JSON documents whole, with one-line errors."""

from __future__ import annotations

from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import TypeVar

import msgspec

from swiftcache_bench.errors import BenchmarkError

T = TypeVar("T")


def read_lines(path: Path, row_type: type[T], limit: int | None = None) -> Iterator[tuple[int, T]]:
    """(line number from 1, row) of a JSON Lines file, the first ``limit`` rows of it.

    Fields that ``row_type`` does not name are passed over. Raises BenchmarkError naming the line.
    """
    decoder = msgspec.json.Decoder(row_type)
    count = 0
    with open_data(path) as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            if limit is not None and count == limit:
                return
            count += 1
            try:
                row = decoder.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise BenchmarkError(f"{path}, line {number}: {error}") from None
            yield number, row


def read_document(path: Path, document_type: type[T]) -> T:
    """A JSON file as ``document_type``. Raises BenchmarkError."""
    with open_data(path) as file:
        try:
            return msgspec.json.decode(file.read(), type=document_type)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise BenchmarkError(f"{path}: {error}") from None


def open_data(path: Path) -> BufferedReader:
    """The file, opened for reading bytes. Raises BenchmarkError."""
    try:
        return path.open("rb")
    except OSError as error:
        raise BenchmarkError(
            f"cannot open {path} ({error.strerror}): give --dataset-path a data file"
        ) from None
