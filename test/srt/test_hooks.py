"""Hooks on SGLang: all in place, checked at start, and without effect when not asked for."""

from __future__ import annotations

import importlib.metadata
import pkgutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookType

from sglang.srt.swiftcache import SGLANG_VERSION, hooks, startup_check, tier_wiring
from swiftcache_tier.errors import SwiftCacheError


@pytest.fixture(autouse=True)
def plugins() -> None:
    load_plugins()


def test_every_hook_takes() -> None:
    startup_check.check()


@pytest.mark.parametrize("hook", hooks.HOOKS, ids=lambda hook: hook.target.rpartition(".")[2])
def test_a_hook_that_did_not_take_stops_the_server(
    hook: hooks.Hook, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, _, name = hook.target.rpartition(".")
    original = pkgutil.resolve_name(hook.target).__wrapped__
    monkeypatch.setattr(pkgutil.resolve_name(owner), name, original)
    with pytest.raises(SwiftCacheError, match=name):
        startup_check.check()


def test_a_target_that_is_gone_stops_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = hooks.HOOKS[0]._replace(target="sglang.srt.mem_cache.no_such_module.function")
    monkeypatch.setattr(startup_check, "HOOKS", (gone,))
    with pytest.raises(SwiftCacheError, match="no_such_module"):
        startup_check.check()


def test_another_sglang_stops_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup_check, "version", lambda _: "0.5.18")
    with pytest.raises(SwiftCacheError, match=r"0\.5\.18.*pip install 'sglang==0\.5\.17'"):
        startup_check.check()


def test_the_pin_and_the_installed_version_are_the_one_the_hooks_were_written_for() -> None:
    assert importlib.metadata.version("sglang") == SGLANG_VERSION
    assert f"sglang=={SGLANG_VERSION}" in (importlib.metadata.requires("sglang-swiftcache") or [])


def test_without_donors_sglang_builds_its_own_host_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt import runtime_context
    from sglang.srt.mem_cache import hiradix_cache

    args = SimpleNamespace(swiftcache_donors=None)
    monkeypatch.setattr(runtime_context, "get_server_args", lambda: args)
    pool = SimpleNamespace(head_dim=64, v_head_dim=64)
    assert hiradix_cache.get_mha_host_pool_cls(pool) is MHATokenToKVPoolHost
    args.swiftcache_donors = []
    assert hiradix_cache.get_mha_host_pool_cls(pool).__name__ == "DonorKVCache"


def test_no_function_has_two_hooks_around_it() -> None:
    """Of which SGLang would warn every user, whatever the flags."""
    around = [hook.target for hook in hooks.HOOKS if hook.kind is HookType.AROUND]
    assert len(set(around)) == len(around)


def test_without_donors_the_other_hooks_change_nothing() -> None:
    scheduler = SimpleNamespace(
        tree_cache=object(), token_to_kv_pool_allocator=object(), _engine_paused=True
    )
    tier_wiring.follow_donors_while_paused(None, scheduler, [])
    output = SimpleNamespace(internal_state={})
    tier_wiring.add_state(output, scheduler, None)
    assert output.internal_state == {}
    indices = object(), object()
    controller = SimpleNamespace(mem_pool_host=object())
    moved = tier_wiring.keep_donor_indices(
        lambda _, *given: ("moved", *given), controller, *indices
    )
    assert moved == ("moved", *indices)
    request = SimpleNamespace()
    tier_wiring.count_prefix_sources(None, SimpleNamespace(tree_cache=object(), reqs=[request]))
    assert vars(request) == {}


def test_a_tier_that_cannot_be_built_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from sglang.srt.swiftcache import donor_radix_cache, plugin

    def fails(**_: object) -> None:
        raise SwiftCacheError("donor x granted no memory")

    monkeypatch.setattr(donor_radix_cache, "DonorRadixCache", fails)
    params = SimpleNamespace(token_to_kv_pool_allocator=None)
    with pytest.raises(SystemExit) as exit_:
        plugin.build_radix_cache(SimpleNamespace(params=params, server_args=None))  # type: ignore[arg-type]
    assert exit_.value.code == 2
    assert capsys.readouterr().err == "swiftcache: donor x granted no memory\n"


def test_arguments_resolve_as_without_the_plugin(tiny_model: Path) -> None:
    """The same command line gives the same ServerArgs, apart from the new fields."""
    import json
    import os
    import subprocess
    import sys

    program = (
        "import json; from sglang.srt.plugins import load_plugins; load_plugins();"
        "from sglang.srt.server_args import ServerArgs;"
        f"a = ServerArgs(model_path={str(tiny_model)!r}, device='cuda', random_seed=1,"
        " attention_backend='triton', mem_fraction_static=0.8, port=31000, nccl_port=31001);"
        "print('ARGS' + json.dumps({k: repr(v) for k, v in vars(a).items()"
        " if not k.startswith('swiftcache_') and k != 'model_config'}))"
    )
    seen = []
    for plugins_ in ("", "none"):
        env = {**os.environ, "SGLANG_PLUGINS": plugins_}
        done = subprocess.run(
            [sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=300
        )
        line = next((x for x in done.stdout.splitlines() if x.startswith("ARGS")), None)
        assert line is not None, done.stderr[-2000:]
        seen.append(json.loads(line[4:]))
    assert seen[0] == seen[1]
