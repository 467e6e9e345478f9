#!/usr/bin/env python3
"""Lay SwiftCache over an unpacked SGLang, for a machine where pip cannot install.

``lay_overlay.py SITE`` copies the packages that pyproject.toml names into SITE, a folder on
PYTHONPATH that holds ``sglang``, and writes the metadata by which SGLang finds the entry points.
Dependencies are the caller's business. May be repeated; files of SGLang are never overwritten.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tomllib
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
WANTED = shutil.ignore_patterns("__pycache__", "*.pyc")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("site", type=Path, help="folder that holds the package sglang")
    site: Path = parser.parse_args().site
    if not (site / "sglang" / "srt").is_dir():
        sys.exit(f"{site} holds no sglang: unpack SGLang there first")
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    folders: dict[str, str] = project["tool"]["setuptools"]["package-dir"]
    for package, folder in folders.items():
        target = site.joinpath(*package.split("."))
        # the folder is ours as a whole: SGLang has no package of that name
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(REPOSITORY / folder, target, ignore=WANTED)
    write_metadata(site, project["project"])
    print(f"laid {', '.join(folders)} into {site}")


def write_metadata(site: Path, project: dict[str, Any]) -> None:
    """Make ``importlib.metadata`` see the distribution."""
    name, version = project["name"], project["version"]
    folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir(exist_ok=True)
    requires = "".join(f"Requires-Dist: {dependency}\n" for dependency in project["dependencies"])
    (folder / "METADATA").write_text(
        f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n{requires}"
    )
    groups = {"console_scripts": project["scripts"], **project["entry-points"]}
    (folder / "entry_points.txt").write_text(
        "\n".join(
            f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in entries.items())
            for group, entries in groups.items()
        )
    )


if __name__ == "__main__":
    main()
