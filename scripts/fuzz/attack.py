"""One attack, as a process of its own: `python -m fuzz.attack KIND DOOR INPUTS SEED`.

Prints how many inputs it sent. Its end ends all that it may have been given by its victim.
"""

from __future__ import annotations

import sys
from pathlib import Path

from fuzz.control import attack_control
from fuzz.door import attack_door
from fuzz.hostile_donor import attack_receiver
from swiftcache_tier.control.runtime_dir import donor_paths_at
from swiftcache_tier.settings import Settings

ATTACKS = ("door", "control", "receiver")


def main(arguments: list[str]) -> None:
    kind, path, inputs, seed = arguments
    paths, settings = donor_paths_at(Path(path)), Settings.from_env()
    match kind:
        case "door":
            sent = attack_door(paths.door, int(inputs), seed, settings)
        case "control":
            sent = attack_control(paths.door, paths.control, int(inputs), seed, settings)
        case "receiver":
            sent = attack_receiver(paths, int(inputs), seed, settings)
        case _:
            raise SystemExit(f"no attack {kind!r}: expected one of {', '.join(ATTACKS)}")
    print(sent, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
