"""Entries of a YAML file, read so that an error names them as whoever wrote the file does."""

from __future__ import annotations

import reprlib
from typing import Any, TypeVar

import msgspec
import yaml

from swiftcache_tier.errors import SwiftCacheError

Entry = TypeVar("Entry", bound=msgspec.Struct)


def load_yaml(text: bytes) -> Any:
    """What a YAML or JSON text says. Raises SwiftCacheError for one that is neither, with the line.

    A key that is there twice is an error: YAML would drop the first without a word.
    """
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = "" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: "
        raise SwiftCacheError(f"{place}{error.problem}: correct the YAML there") from None
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise SwiftCacheError(f"is not YAML ({reason}): name a text file of YAML") from None
    except (ValueError, OverflowError):  # of chr(): nothing else that scans text raises them
        raise SwiftCacheError(
            r"an escape in a quoted text (\U...) is no character: correct it"
        ) from None
    except RecursionError:
        raise SwiftCacheError(
            "nested too deep to be read: expected entries a few levels deep, take out the rest"
        ) from None


def read_entry(kind: type[Entry], value: Any, where: str = "") -> Entry:
    """`value` as a `kind`, whose fields say what they expect in `Meta(description=...)`.

    `where` is what the entry is called in errors. Raises SwiftCacheError for a key that is not
    known, is missing or has a value that does not fit.
    """
    prefix = where and f"{where}: "
    fields = msgspec.structs.fields(kind)
    names = [field.name for field in fields]
    keys = f"{', '.join(names[:-1])} or {names[-1]}"
    if not isinstance(value, dict):
        raise SwiftCacheError(f"{prefix}expected keys ({keys}) with values, got {_shown(value)}")
    for key in value:
        if key not in names:
            raise SwiftCacheError(f"{prefix}key {key!r} is not known: expected {keys}")
    found = {}
    for field in fields:
        if field.name not in value and not field.required:
            continue
        given = value.get(field.name)
        try:
            found[field.name] = msgspec.convert(given, field.type)
        except msgspec.ValidationError:
            expected = next(m.description for m in field.type.__metadata__ if m.description)
            raise SwiftCacheError(
                f"{prefix}{field.name}: expected {expected}, got {_shown(given)}"
            ) from None
    return kind(**found)


def _shown(value: Any) -> str:
    return "nothing" if value is None else reprlib.repr(value)


class _Loader(yaml.SafeLoader):
    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        first: dict[str, int] = {}
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            line = key.start_mark.line + 1
            if key.value in first:
                raise SwiftCacheError(
                    f"line {line}: {key.value!r} is there twice, first in line {first[key.value]}: "
                    "rename one or drop it"
                )
            first[key.value] = line
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        # What looks like a date or a number and is none, or is not what its tag says.
        except (ValueError, KeyError, AttributeError) as error:
            mark = node.start_mark
            raise SwiftCacheError(
                f"line {mark.line + 1}, column {mark.column + 1}: {_shown(node.value)} is no "
                f"{node.tag.rpartition(':')[2]} ({error}): correct it, or quote it if it is a text"
            ) from None
