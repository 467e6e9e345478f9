"""The ``--swiftcache-*`` flags, as real fields of SGLang's ``ServerArgs``.

Being dataclass fields they appear in ``--help``, in ``--config`` YAML, as keyword arguments of
``sglang.Engine`` and ``sglang.Runtime``, pickle to the subprocesses and show in ``/server_info``.
Replacing the class instead would miss everyone who holds a reference to it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Optional

from sglang.srt.arg_groups.arg_utils import NS, A, Arg, namespace_of, resolvable_fields

from sglang.srt.swiftcache import BACKEND_NAME, cpu_engine, donate_checks, flag_checks
from sglang.srt.swiftcache.flag_words import AUTO, OFF
from sglang.srt.swiftcache.layer_stream import flag_checks as layer_stream_checks
from sglang.srt.swiftcache.one_line_exit import one_line_exit
from swiftcache_tier.errors import SwiftCacheError

DONORS_HELP = (
    "Keep radix-prefix KV in memory lent by donors instead of in host RAM. SPECs: 'auto' (the "
    "default when none follows: every donor in the runtime directory, else host RAM sized from "
    "what is free), 'cuda:1=40GiB' or 'host=8GiB' (memory of a GPU or host RAM, in a donor process "
    "of this server's own), 'ipc:///path/of/a/donor' (one that runs)."
)
RUNTIME_DIR_HELP = (
    "Directory in which SwiftCache donors and receivers meet; an empty one is refused. Default: "
    "$SWIFTCACHE_RUNTIME_DIR, else $XDG_RUNTIME_DIR/swiftcache, else /tmp/swiftcache-UID."
)
IO_BACKEND_HELP = (
    "What moves KV between this GPU and donors: 'kernel' (on the SMs), 'copy' (the copy engines) "
    "or 'auto' (the default: loads by the kernels, on as many SMs as was measured to be enough, "
    "stores by the copy engines where their pages lie in runs). Without effect on a CPU."
)
VERIFY_HELP = (
    "Check every block restored from donors against a checksum that was taken when it was stored; "
    "a mismatch is counted, logged and recomputed. For debugging and doubtful memory: loads no "
    "longer overlap the prefill, and every block is read three times more."
)

REPLICAS_HELP = (
    "Keep each block N times, on N different donors, so that the loss of one costs no recompute "
    "and a corrupt block is read elsewhere (--swiftcache-verify). Divides what donors can hold by "
    "N. Default: 1."
)
TTL_HELP = (
    "Forget prefixes, on the device and on donors, that no request has used for so many seconds. "
    "Default: keep them until their memory is needed."
)
LAYER_STREAM_HELP = (
    "Contexts longer than this device's KV memory: 'off', 'auto' (the default when nothing "
    "follows: a window sized from free local and donated memory) or the number of tokens whose "
    "KV, beyond the regular slots, is kept on donors and streamed through the device layer by "
    "layer. Needs --swiftcache-donors; sets --page-size to 16 where it is not given."
)
DONATE_HELP = (
    "Lend this server's own KV memory to others while it is idle, and take it back when it is "
    "needed: 'off', 'auto' (the default when nothing follows: whatever the water marks leave) or "
    "the FRACTION of the KV pool that may be lent at most. Lays the pool out page by page, which "
    "on a GPU needs --attention-backend fa3 (the default then on Hopper) or triton (elsewhere)."
)
LOW_WATER_HELP = (
    "With --swiftcache-donate: when less than this fraction of the KV pool is spare, memory is "
    "taken back. Default: 0.2."
)
HIGH_WATER_HELP = (
    "With --swiftcache-donate: memory is lent only if more than this fraction of the KV pool stays "
    "spare. Default: 0.3."
)

# (name, type, default). The types are objects, not strings: SGLang would resolve strings in a
# module of its own. Values are read as texts and made what they should be by `normalize`: argparse
# would print hundreds of lines of usage before its error, and keyword arguments do not pass it.
_FIELDS: list[tuple[str, Any, Any]] = [
    (
        "swiftcache_donors",
        A[Optional[list[str]], Arg(help=DONORS_HELP, nargs="*"), NS("memory")],  # noqa: UP045
        None,
    ),
    (
        "swiftcache_runtime_dir",
        A[Optional[str], Arg(help=RUNTIME_DIR_HELP), NS("memory")],  # noqa: UP045
        None,
    ),
    (
        "swiftcache_io_backend",
        A[str, Arg(help=IO_BACKEND_HELP), NS("memory")],
        "auto",
    ),
    ("swiftcache_verify", A[bool, Arg(help=VERIFY_HELP), NS("memory")], False),
    ("swiftcache_replicas", A[int, Arg(help=REPLICAS_HELP, type_parser=str), NS("memory")], 1),
    (
        "swiftcache_ttl",
        A[Optional[float], Arg(help=TTL_HELP, type_parser=str), NS("memory")],  # noqa: UP045
        None,
    ),
    (
        "swiftcache_layer_stream",
        A[str, Arg(help=LAYER_STREAM_HELP, nargs="?", const=AUTO), NS("memory")],
        OFF,
    ),
    (
        "swiftcache_donate",
        A[str, Arg(help=DONATE_HELP, nargs="?", const=AUTO), NS("memory")],
        OFF,
    ),
    (
        "swiftcache_low_water",
        A[Optional[float], Arg(help=LOW_WATER_HELP, type_parser=str), NS("memory")],  # noqa: UP045
        None,
    ),
    (
        "swiftcache_high_water",
        A[Optional[float], Arg(help=HIGH_WATER_HELP, type_parser=str), NS("memory")],  # noqa: UP045
        None,
    ),
]


_WITH_VALUE = frozenset(
    "--" + name.replace("_", "-")
    for name, annotation, default in _FIELDS
    if annotation.__metadata__[0].nargs is None and default is not False
)


def install(server_args_module: Any) -> None:
    """Add the flags to ``server_args_module.ServerArgs``. Idempotent.

    Called once per process, right after ``sglang.srt.server_args`` has been imported.
    """
    cls = server_args_module.ServerArgs
    if "swiftcache_donors" in cls.__dataclass_fields__:
        return
    _graft_fields(cls)
    cls.__post_init__ = _with_swiftcache(cls.__post_init__)
    server_args_module.prepare_server_args = _one_line_errors(
        server_args_module.prepare_server_args
    )


def _graft_fields(cls: type) -> None:
    # the generated methods of a subclass with the extra fields are what the class itself needs
    extended = dataclasses.make_dataclass("ServerArgs", _FIELDS, bases=(cls,))
    for name in ("__init__", "__repr__", "__eq__", "__match_args__", "__dataclass_fields__"):
        setattr(cls, name, extended.__dict__[name])
    for name, annotation, default in _FIELDS:
        cls.__annotations__[name] = annotation
        setattr(cls, name, default)
    # both are computed once per class, and may have been before the fields were added
    namespace_of.cache_clear()
    resolvable_fields.cache_clear()


def _with_swiftcache(post_init: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(post_init)
    def with_swiftcache(self: Any) -> None:
        if self.device == "cpu":
            cpu_engine.enable()
        donate_checks.normalize(self)
        flag_checks.normalize(self)
        layer_stream_checks.normalize(self)
        if donate_checks.is_on(self):
            donate_checks.check_before(self)
        borrows = self.swiftcache_donors is not None
        if borrows:
            flag_checks.check_before(self)
            layer_stream_checks.check_before(self)
            self.enable_hierarchical_cache = True
            self.radix_cache_backend = BACKEND_NAME
        post_init(self)
        if borrows:
            flag_checks.check_after(self)
            layer_stream_checks.check_after(self)
        if donate_checks.is_on(self):
            from sglang.srt.swiftcache import succession

            succession.prepare(self)

    return with_swiftcache


def _one_line_errors(prepare: Callable[[Sequence[str]], Any]) -> Callable[[Sequence[str]], Any]:
    """The command line's way of failing: one line on stderr and exit code 2, no traceback."""

    @functools.wraps(prepare)
    def prepare_server_args(argv: Sequence[str]) -> Any:
        with one_line_exit():
            _require_values(argv)
            args = prepare(argv)
            if args.swiftcache_donors is not None:
                flag_checks.check_command_line(argv)
            return args

    return prepare_server_args


def _require_values(argv: Sequence[str]) -> None:
    """Before argparse, which prints hundreds of lines of usage first."""
    for word, following in zip(argv, [*argv[1:], "--"], strict=True):
        if word in _WITH_VALUE and following.startswith("--"):
            raise SwiftCacheError(f"{word} has no value: name one, or drop the flag")
