"""What a receiver is told to take its memory from: the SPECs of `--swiftcache-donors`."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from swiftcache_tier.errors import SwiftCacheError
from swiftcache_tier.sizes import format_size, parse_size

SpecKind = Literal["auto", "host", "cuda", "ipc"]

LEGAL_FORMS = "auto, host=8GiB, cuda:1=40GiB or ipc:///path/of/a/donor"

_OWNED = re.compile(r"(host|cuda:(?:0|[1-9][0-9]{0,3}))=(.*)")
_IPC_PREFIX = "ipc://"

DOOR_SUFFIX = ".fds"
CONTROL_SUFFIX = ".ctl"


@dataclass(frozen=True)
class DonorSpec:
    """One SPEC.

    `auto`: every donor in the runtime directory, else host memory sized from what is free.
    `host` and `cuda`: a donor that the receiver starts and owns, of `size_bytes` on `device`
    ("host" or "cuda:N"). `ipc`: the running donor at `path`, absolute and normalised, without the
    suffix of either of its sockets.
    """

    kind: SpecKind
    device: str | None = None
    size_bytes: int | None = None
    path: Path | None = None

    @classmethod
    def parse(cls, text: str) -> DonorSpec:
        """The SPEC that `text` spells. Raises SwiftCacheError naming `text` and the legal forms."""
        stripped = text.strip()
        if stripped == "auto":
            return cls("auto")
        if stripped.startswith(_IPC_PREFIX):
            return cls("ipc", path=_donor_path(text, stripped.removeprefix(_IPC_PREFIX)))
        match = _OWNED.fullmatch(stripped)
        if match is None:
            raise SwiftCacheError(f"donor SPEC {text!r} is not known: write {LEGAL_FORMS}")
        device, size_text = match.groups()
        try:
            size_bytes = parse_size(size_text)
        except SwiftCacheError as error:
            raise SwiftCacheError(f"donor SPEC {text!r}: {error}") from None
        if size_bytes == 0:
            raise SwiftCacheError(f"donor SPEC {text!r} asks for no memory: give it a size over 0")
        return cls("host" if device == "host" else "cuda", device=device, size_bytes=size_bytes)

    @property
    def source(self) -> str:
        """What the memory comes from; two SPECs of one source would be the same donor twice."""
        if self.kind == "ipc":
            return f"{_IPC_PREFIX}{self.path}"
        return self.device or self.kind

    def __str__(self) -> str:
        if self.size_bytes is None:
            return self.source
        size = format_size(self.size_bytes).replace(" ", "")
        # format_size rounds; what is printed here can be given to `parse` again.
        return f"{self.source}={size if parse_size(size) == self.size_bytes else self.size_bytes}"


def parse_specs(texts: Sequence[str] | str | None) -> list[DonorSpec]:
    """The SPECs of a command line, a config file or a keyword argument, in the order given.

    None (the flag is absent) gives no SPEC, hence no tier; an empty list (the flag without a
    value) gives `auto`; a bare string counts as a list of one. Raises SwiftCacheError for a SPEC
    that is not known, for two that name one source, and for `auto` beside any other.
    """
    if texts is None:
        return []
    if isinstance(texts, str):
        texts = [texts]
    if not texts:
        return [DonorSpec("auto")]
    specs: list[DonorSpec] = []
    text_of: dict[str, str] = {}
    for text in texts:
        if not isinstance(text, str):
            raise SwiftCacheError(f"donor SPEC {text!r} is not a string: write {LEGAL_FORMS}")
        spec = DonorSpec.parse(text)
        if spec.source in text_of:
            raise SwiftCacheError(
                f"donor SPECs {text_of[spec.source]!r} and {text!r} both name {spec.source}: "
                f"give each source once ({LEGAL_FORMS})"
            )
        text_of[spec.source] = text
        specs.append(spec)
    if len(specs) > 1 and "auto" in text_of:
        other = next(text for source, text in text_of.items() if source != "auto")
        raise SwiftCacheError(
            f"donor SPEC 'auto' takes every donor there is and cannot stand beside {other!r}: "
            f"give auto alone, or only the others ({LEGAL_FORMS})"
        )
    return specs


def _donor_path(text: str, path: str) -> Path:
    if not path.startswith("/") or path.strip("/") == "" or "\0" in path:
        raise SwiftCacheError(
            f"donor SPEC {text!r} has no absolute path: write it as ipc:///path/of/a/donor"
        )
    donor = Path(os.path.normpath("/" + path.lstrip("/")))
    # A user may name the donor, or either of its sockets as a folder lists them.
    return donor.with_suffix("") if donor.suffix in (DOOR_SUFFIX, CONTROL_SUFFIX) else donor
