"""Refuse to start on an SGLang that the hooks do not fit.

SGLang logs and swallows a plugin's exceptions, so without this check a server would come up with
half of SwiftCache missing.
"""

from __future__ import annotations

import pkgutil
from importlib.metadata import version

from sglang.srt.mem_cache.registry import registered_radix_cache_backends
from sglang.srt.plugins import load_plugins

from sglang.srt.swiftcache import BACKEND_NAME, SGLANG_VERSION
from sglang.srt.swiftcache.hooks import HOOKS, Hook
from swiftcache_tier.errors import SwiftCacheError


def check() -> None:
    """Main process, before anything is allocated. Loads the plugins where SGLang has not.

    Raises:
        SwiftCacheError: another version of SGLang, or a hook or the backend is not in place.
    """
    installed = version("sglang")
    if installed != SGLANG_VERSION:
        raise SwiftCacheError(
            f"built for sglang {SGLANG_VERSION}, found {installed}: "
            f"pip install 'sglang=={SGLANG_VERSION}'"
        )
    load_plugins()
    missing = [hook.target for hook in HOOKS if not is_applied(hook)]
    if BACKEND_NAME not in registered_radix_cache_backends():
        missing.append(f"radix cache backend '{BACKEND_NAME}'")
    if missing:
        raise SwiftCacheError(
            f"{len(missing)} hook(s) on SGLang did not take ({', '.join(missing)}): check that "
            f"sglang is an unmodified {SGLANG_VERSION} and SGLANG_PLUGINS does not leave "
            "'swiftcache' out"
        )


def is_applied(hook: Hook) -> bool:
    """True if calling the hook's target runs its wrapper."""
    try:
        function = pkgutil.resolve_name(hook.target)
    except (ImportError, AttributeError):
        return False
    while function is not None:
        cells = getattr(function, "__closure__", None) or ()
        if any(cell.cell_contents is hook.wrapper for cell in cells):
            return True
        function = getattr(function, "__wrapped__", None)
    return False
