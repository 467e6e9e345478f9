"""Which kind of data set a file is, told by what it holds rather than by its name."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path

from swiftcache_bench.errors import BenchmarkError
from swiftcache_bench.workload.rows import open_data


class DatasetKind(StrEnum):
    LEVAL = "L-Eval"
    MOONCAKE = "Mooncake"
    SHAREGPT = "ShareGPT"
    CONTEXTS = "contexts"


# Of a JSON Lines file the first row is looked at, of a JSON list the first element.
_BY_KEYS = (
    ({"hash_ids", "input_length"}, DatasetKind.MOONCAKE),
    ({"instructions", "outputs"}, DatasetKind.LEVAL),
    ({"conversations"}, DatasetKind.SHAREGPT),
    ({"contexts", "queries"}, DatasetKind.CONTEXTS),
)


def dataset_kind(path: Path) -> DatasetKind:
    """Raises BenchmarkError, naming the kinds there are, for a file that is none of them."""
    keys = _first_keys(path)
    for wanted, kind in _BY_KEYS:
        if wanted <= keys:
            return kind
    raise BenchmarkError(
        f"{path} is no data set known here: expected L-Eval rows or a Mooncake trace (JSON Lines), "
        "ShareGPT conversations or contexts with queries (JSON)"
    )


def _first_keys(path: Path) -> set[str]:
    with open_data(path) as file:
        first = next((line for line in file if line.strip()), b"")
        try:
            value = json.loads(first)
        except ValueError:
            file.seek(0)
            try:
                value = json.load(file)
            except ValueError:
                return set()
    if isinstance(value, list) and value:
        value = value[0]
    return set(value) if isinstance(value, dict) else set()
