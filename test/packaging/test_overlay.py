"""The wheel: what it holds, what it asks for, and that it overwrites nothing of SGLang."""

from __future__ import annotations

import configparser
import email.message
import email.parser
import importlib.metadata
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
SOURCES = {
    "sglang/srt/swiftcache": REPOSITORY / "python/sglang/srt/swiftcache",
    "swiftcache_kernel": REPOSITORY / "sgl-kernel/swiftcache_kernel",
    "swiftcache_tier": REPOSITORY / "swiftcache_tier",
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel that pip builds from a copy of the sources, opened."""
    folder = tmp_path_factory.mktemp("wheel")
    sources = folder / "sources"
    sources.mkdir()
    for name in ("pyproject.toml", "LICENSE", "README.md"):
        shutil.copy(REPOSITORY / name, sources)
    for source in SOURCES.values():
        shutil.copytree(source, sources / source.relative_to(REPOSITORY))
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    done = subprocess.run(
        [*command, "--wheel-dir", str(folder), str(sources)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = folder.glob("*.whl")
    return zipfile.ZipFile(built)


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> email.message.Message:
    return email.parser.Parser().parsestr(_dist_info(wheel, "METADATA"))


def test_no_path_of_the_wheel_belongs_to_sglang(wheel: zipfile.ZipFile) -> None:
    owned = {str(path) for path in importlib.metadata.files("sglang") or ()}
    assert "sglang/srt/server_args.py" in owned
    assert owned.isdisjoint(wheel.namelist())


def test_every_source_file_is_in_the_wheel(wheel: zipfile.ZipFile) -> None:
    expected = {
        f"{package}/{path.relative_to(source)}"
        for package, source in SOURCES.items()
        for path in source.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert packed == expected


# Not the overlay: the marker means nothing below the top of a distribution, and that is SGLang's.
@pytest.mark.parametrize("package", ["swiftcache_kernel", "swiftcache_tier"])
def test_packages_are_marked_as_typed(wheel: zipfile.ZipFile, package: str) -> None:
    assert f"{package}/py.typed" in wheel.namelist()


def test_sglang_is_pinned(metadata: email.message.Message) -> None:
    assert "sglang==0.5.17" in metadata.get_all("Requires-Dist", [])


def test_the_licence_is_named_and_included(
    wheel: zipfile.ZipFile, metadata: email.message.Message
) -> None:
    assert metadata["License-Expression"] == "Apache-2.0"
    assert _dist_info(wheel, "licenses/LICENSE") == (REPOSITORY / "LICENSE").read_text()


def test_sglang_finds_both_entry_points_and_the_shell_the_command(wheel: zipfile.ZipFile) -> None:
    groups = configparser.ConfigParser()
    groups.read_string(_dist_info(wheel, "entry_points.txt"))
    assert {name: dict(groups[name]) for name in groups.sections()} == {
        "console_scripts": {"swiftcache": "swiftcache_tier.cli:main"},
        "sglang.srt.plugins": {"swiftcache": "sglang.srt.swiftcache.plugin:register"},
        "sglang.srt.platforms": {"swiftcache": "sglang.srt.swiftcache.early:activate"},
    }


def test_installed_entry_points_load_inside_sglang() -> None:
    program = (
        "import importlib.metadata, sglang\n"
        "for point in importlib.metadata.distribution('sglang-swiftcache').entry_points:\n"
        "    print(point.group, callable(point.load()))\n"
    )
    lines = _run(program).splitlines()
    for group in ("console_scripts", "sglang.srt.plugins", "sglang.srt.platforms"):
        assert f"{group} True" in lines


def test_wheel_and_sglang_work_in_one_site_packages(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    """Unpacked into SGLang's package, as pip would, the overlay is found there."""
    site = tmp_path / "site-packages"
    wheel.extractall(site)
    installed = Path(str(importlib.metadata.distribution("sglang").locate_file("sglang")))
    for folder in (installed, installed / "srt"):
        for path in folder.iterdir():
            if path != installed / "srt":
                (site / path.relative_to(installed.parent)).symlink_to(path)
    program = (
        "import importlib.util, sys\n"
        f"sys.path.insert(0, {str(site)!r})\n"
        # What is installed in editable mode must not answer for what was unpacked.
        "sys.meta_path = [f for f in sys.meta_path if 'ditable' not in repr(f)]\n"
        "for name in 'sglang.srt.swiftcache', 'sglang.srt.server_args', 'swiftcache_tier':\n"
        "    print(importlib.util.find_spec(name).origin)\n"
    )
    assert _run(program).split() == [
        str(site / "sglang/srt/swiftcache/__init__.py"),
        str(site / "sglang/srt/server_args.py"),
        str(site / "swiftcache_tier/__init__.py"),
    ]


def _run(program: str) -> str:
    """Standard output of a Python program."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _dist_info(wheel: zipfile.ZipFile, name: str) -> str:
    (path,) = (path for path in wheel.namelist() if path.endswith(f".dist-info/{name}"))
    return wheel.read(path).decode()
