"""Entry point of the group ``sglang.srt.platforms``.

SGLang calls it inside ``import sglang``, in every process: the server's main process, scheduler
and detokenizer children, a ``Runtime``'s parent, ``sglang serve --help``. The general plugin group
is called later and not everywhere, too late for what must happen before ``sgl_kernel`` is imported
or ``ServerArgs`` is read.
"""

from __future__ import annotations

import sys
from types import ModuleType

import wrapt

from sglang.srt.swiftcache import cpu_engine


def activate() -> None:
    """Prepare the process. Returns ``None``: no platform is activated, SGLang picks its own."""
    if cpu_engine.requested(sys.orig_argv):
        cpu_engine.enable()
    wrapt.register_post_import_hook(_add_flags, "sglang.srt.server_args")


def _add_flags(server_args_module: ModuleType) -> None:
    from sglang.srt.swiftcache import server_flags

    server_flags.install(server_args_module)
