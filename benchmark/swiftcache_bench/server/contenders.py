"""What is compared: a name, the server flags behind it, the donors it needs."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

from swiftcache_bench.errors import BenchmarkError
from swiftcache_tier.errors import SwiftCacheError
from swiftcache_tier.spec import DonorSpec

Device = Literal["cuda", "cpu"]

DEVICE_FLAGS: dict[Device, tuple[str, ...]] = {
    "cuda": (),
    "cpu": ("--device", "cpu", "--attention-backend", "torch_native", "--disable-cuda-graph"),
}
DEFAULT_DONORS: dict[Device, tuple[str, ...]] = {"cuda": ("cuda:1=40GiB",), "cpu": ("host=256MiB",)}

BYTES_PER_HICACHE_GB = 10**9
RUNTIME_DIR = "{runtime_dir}"
TIER_GB = "{tier_gb}"

_HICACHE = f"--enable-hierarchical-cache --hicache-size {TIER_GB}"
_SWIFTCACHE = f"--swiftcache-donors auto --swiftcache-runtime-dir {RUNTIME_DIR}"

# HiCache's transfers have no CPU form, so that a rehearsal there has two contenders.
BUILT_IN: dict[str, tuple[str, tuple[Device, ...]]] = {
    "stock": ("", ("cuda", "cpu")),
    "hicache-kernel-layer-first": (
        f"{_HICACHE} --hicache-io-backend kernel --hicache-mem-layout layer_first",
        ("cuda",),
    ),
    "hicache-kernel-page-first": (
        f"{_HICACHE} --hicache-io-backend kernel --hicache-mem-layout page_first",
        ("cuda",),
    ),
    "hicache-direct-page-first-direct": (
        f"{_HICACHE} --hicache-io-backend direct --hicache-mem-layout page_first_direct",
        ("cuda",),
    ),
    "swiftcache": (_SWIFTCACHE, ("cuda", "cpu")),
}


@dataclass(frozen=True)
class Contender:
    """One way to run the server.

    ``args``: flags of its own, after those that all share; ``{runtime_dir}`` stands for the
    directory of the donors started for it, ``{tier_gb}`` for the size of its donors together, in
    HiCache's unit (10**9 bytes). ``donors`` are started when ``args`` name the directory.
    """

    name: str
    args: tuple[str, ...] = ()
    donors: tuple[DonorSpec, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def uses_donors(self) -> bool:
        return any(RUNTIME_DIR in word for word in self.args)

    def flags(self, runtime_dir: Path) -> list[str]:
        """``args`` with what the placeholders stand for. Raises BenchmarkError without donors."""
        tier_bytes = sum(donor.size_bytes or 0 for donor in self.donors)
        tier_gb = tier_bytes // BYTES_PER_HICACHE_GB
        if not tier_gb and any(TIER_GB in word for word in self.args):
            raise BenchmarkError(
                f"contender {self.name!r} uses {TIER_GB}, but its donors hold less than 1 GB "
                "together: give larger --donors, or a size in its flags"
            )
        words = (word.replace(RUNTIME_DIR, str(runtime_dir)) for word in self.args)
        return [word.replace(TIER_GB, str(tier_gb)) for word in words]


class ContenderEntry(msgspec.Struct, forbid_unknown_fields=True):
    """A contender in a file of contenders."""

    args: str = ""
    donors: list[str] | None = None
    env: dict[str, str] = {}


class ContenderFile(msgspec.Struct, forbid_unknown_fields=True):
    """A file of contenders: YAML or JSON. Whatever is not there keeps its default."""

    contenders: dict[str, ContenderEntry] = {}
    server_args: str = ""
    donors: list[str] | None = None
    baseline: str | None = None


def read_contender_file(path: Path) -> ContenderFile:
    """Raises BenchmarkError naming the entry that is wrong."""
    try:
        return msgspec.yaml.decode(path.read_bytes(), type=ContenderFile)
    except OSError as error:
        raise BenchmarkError(
            f"cannot read {path} ({error.strerror}): give --config a YAML file"
        ) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BenchmarkError(f"{path}: {' '.join(str(error).split())}") from None


def built_in_entries(device: Device) -> dict[str, ContenderEntry]:
    """The contenders that run on ``device``."""
    return {
        name: ContenderEntry(args)
        for name, (args, devices) in BUILT_IN.items()
        if device in devices
    }


def parse_contender(text: str) -> tuple[str, ContenderEntry]:
    """``NAME=flags`` of the command line. Raises BenchmarkError."""
    name, equals, args = text.partition("=")
    if not equals or not name.strip():
        raise BenchmarkError(f'contender {text!r} is not of the form NAME="--flag value ..."')
    return name.strip(), ContenderEntry(args)


def resolve_contenders(
    entries: Mapping[str, ContenderEntry], donors: Sequence[str], only: Sequence[str]
) -> list[Contender]:
    """The contenders to run, in the order of ``only``, or all of them in their own.

    ``donors``: SPECs for those that name none. Raises BenchmarkError for a name that is not known,
    or a SPEC that is not a donor that can be started.
    """
    unknown = [name for name in only if name not in entries]
    if unknown:
        raise BenchmarkError(
            f"no contender {', '.join(unknown)}: expected any of {', '.join(entries)}"
        )
    return [_resolve(name, entries[name], donors) for name in (dict.fromkeys(only) or entries)]


def _resolve(name: str, entry: ContenderEntry, donors: Sequence[str]) -> Contender:
    specs = donors if entry.donors is None else entry.donors
    return Contender(
        name,
        split_flags(entry.args, f"contender {name!r}"),
        tuple(_startable(spec) for spec in specs),
        entry.env,
    )


def split_flags(text: str, where: str) -> tuple[str, ...]:
    """Server flags as a shell splits them. Raises BenchmarkError that names ``where``."""
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise BenchmarkError(f"{where}: cannot split {text!r} into flags ({error})") from None


def _startable(text: str) -> DonorSpec:
    try:
        spec = DonorSpec.parse(text)
    except SwiftCacheError as error:
        raise BenchmarkError(str(error)) from None
    if spec.device is None:
        raise BenchmarkError(
            f"donor {text!r} is not one to start: expected host=SIZE or cuda:N=SIZE"
        )
    return spec
