#!/usr/bin/env python3
"""import-linter on the sources of this checkout; takes the arguments of ``lint-imports``.

``lint-imports`` finds ``sglang.srt.swiftcache`` by importing what is above it: all of SGLang, and
whichever copy of the overlay is installed. Here two empty modules stand for SGLang, and the overlay
is the one that lies beside this script.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path

from importlinter.cli import lint_imports_command

REPOSITORY = Path(__file__).resolve().parent.parent


def main() -> None:
    sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "sgl-kernel")]
    for name in ("sglang", "sglang.srt"):
        namespace = ModuleSpec(name, loader=None, is_package=True)
        namespace.submodule_search_locations = [str(REPOSITORY / "python" / name.replace(".", "/"))]
        sys.modules[name] = module_from_spec(namespace)
    lint_imports_command()


if __name__ == "__main__":
    main()
