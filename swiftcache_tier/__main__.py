"""`python -m swiftcache_tier` is `swiftcache`."""

from __future__ import annotations

import sys

from swiftcache_tier.cli import main

if __name__ == "__main__":
    sys.exit(main())
