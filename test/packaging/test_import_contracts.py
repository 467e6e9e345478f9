"""The import contracts hold, and each of them fails when it is violated.

Every violation is planted in a copy of the sources, and found there.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
CONFIGURATIONS = (".importlinter", ".importlinter-overlay")
LINTER = "scripts/lint_imports.py"
OVERLAY = "python/sglang/srt/swiftcache"
TIER = "swiftcache_tier"
KERNEL = "sgl-kernel/swiftcache_kernel"

# (configuration, file that gets the import, import statement, contract that must be broken)
VIOLATIONS = [
    (".importlinter", f"{KERNEL}/layout.py", "import swiftcache_tier.errors", "one-way"),
    (".importlinter", f"{KERNEL}/layout.py", "import sglang.srt.utils", "no-sglang"),
    (".importlinter", f"{TIER}/errors.py", "import sglang", "no-sglang"),
    (
        ".importlinter",
        f"{TIER}/errors.py",
        "from sglang.srt.swiftcache import BACKEND_NAME",
        "no-sglang",
    ),
    (".importlinter", f"{TIER}/sizes.py", "import torch", "no-torch"),
    (".importlinter", f"{TIER}/errors.py", "import swiftcache_tier.cli", "tier-layers"),
    (".importlinter", f"{TIER}/lease/table.py", "import swiftcache_tier.donor", "tier-layers"),
    (".importlinter", f"{TIER}/blocks/pool.py", "import swiftcache_tier.extents", "tier-layers"),
    (
        ".importlinter-overlay",
        f"{TIER}/errors.py",
        "import sglang.srt.swiftcache.plugin",
        "one-way",
    ),
    (
        ".importlinter-overlay",
        f"{KERNEL}/layout.py",
        "from sglang.srt.swiftcache import plugin",
        "one-way",
    ),
    (".importlinter-overlay", f"{KERNEL}/layout.py", "import swiftcache_tier.errors", "one-way"),
]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the three packages, of both configurations and of the linter."""
    for package in (OVERLAY, TIER, KERNEL):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(REPOSITORY / package, tmp_path / package, ignore=ignored)
    (tmp_path / LINTER).parent.mkdir()
    for file in (*CONFIGURATIONS, LINTER):
        shutil.copy(REPOSITORY / file, tmp_path / file)
    return tmp_path


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_contracts_hold(copy: Path, configuration: str) -> None:
    code, output = _lint(copy, configuration)
    assert code == 0, output
    assert "0 broken" in output


@pytest.mark.parametrize(("configuration", "file", "statement", "contract"), VIOLATIONS)
def test_a_planted_violation_is_found(
    copy: Path, configuration: str, file: str, statement: str, contract: str
) -> None:
    source = copy / file
    source.write_text(f"{source.read_text()}\n{statement}\n")
    code, output = _lint(copy, configuration, contract)
    assert code == 1, output
    assert "1 broken" in output


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_each_contract_has_a_violation_here(configuration: str) -> None:
    lines = (REPOSITORY / configuration).read_text().splitlines()
    prefix = "[importlinter:contract:"
    contracts = {line.removeprefix(prefix).rstrip("]") for line in lines if line.startswith(prefix)}
    assert contracts
    assert contracts == {contract for where, _, _, contract in VIOLATIONS if where == configuration}


def _lint(copy: Path, configuration: str, contract: str | None = None) -> tuple[int, str]:
    """Run import-linter in ``copy``, on all contracts or one; returns (exit code, output)."""
    command = [sys.executable, LINTER, "--no-logo", "--no-cache"]
    command += ["--contract", contract] if contract else []
    done = subprocess.run([*command, configuration], cwd=copy, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr
