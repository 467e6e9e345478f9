"""A file that describes a cluster: what it may say, and how it is told what is wrong."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from swiftcache_tier.cluster.commands import Member, waves
from swiftcache_tier.cluster.config import ClusterFile, add_server_args, read_cluster_file
from swiftcache_tier.cluster.environment import apply_environment, cluster_of_environment
from swiftcache_tier.errors import SwiftCacheError

REPOSITORY = Path(__file__).resolve().parents[3]
EXAMPLES = REPOSITORY / "examples"

Read = Callable[[str], ClusterFile]

CLUSTER = """
args: --page-size 16
env: {A: all}
donors:
  attic: {device: host, size: 1GiB}
servers:
  chat: {model: big, role: receiver, gpu: 0, args: --log-level "a b", env: {A: chat}}
  code: {model: small, role: donor, gpu: 1, donate: 0.5}
  helper: {model: tiny, role: both, gpu: 1, donors: [auto], port: 9000}
  plain: {model: other}
"""


@pytest.fixture
def read(tmp_path: Path) -> Read:
    def read_text(text: str) -> ClusterFile:
        path = tmp_path / "cluster.yaml"
        path.write_text(text)
        return read_cluster_file(path)

    return read_text


def members(cluster: ClusterFile) -> dict[str, Member]:
    groups = waves(cluster, Path("/run/there"), launch=("serve",))
    return {member.name: member for group in groups for member in group}


def test_each_role_gets_its_flags_and_each_server_a_port(read: Read) -> None:
    found = members(read(CLUSTER))
    ours = ("serve", "--model-path")
    end = ("--page-size", "16")
    at = ("--host", "127.0.0.1", "--port")
    gpu = "--base-gpu-id"
    receive, lend = "--swiftcache-donors", "--swiftcache-donate"
    assert {name: found[name].command for name in ("chat", "code", "helper", "plain")} == {
        "chat": (*ours, "big", *at, "8000", gpu, "0", receive, *end, "--log-level", "a b"),
        "code": (*ours, "small", *at, "8001", gpu, "1", lend, "0.5", *end),
        "helper": (*ours, "tiny", *at, "9000", gpu, "1", receive, "auto", lend, "auto", *end),
        "plain": (*ours, "other", *at, "8003", *end),
    }
    donor = ("donor", "--device", "host", "--size", "1GiB", "--name", "attic")
    assert found["attic"].command[3:] == (*donor, "--runtime-dir", "/run/there")
    assert found["chat"].env == {"SWIFTCACHE_RUNTIME_DIR": "/run/there", "A": "chat"}
    assert found["code"].env["A"] == "all"
    assert found["code"].ready == "http://127.0.0.1:8001"


def test_donors_start_before_receivers_and_servers_of_one_gpu_one_by_one(read: Read) -> None:
    groups = waves(read(CLUSTER), Path("/run/there"))
    names = [[member.name for member in group] for group in groups]
    assert names == [["attic"], ["code", "plain"], ["helper"], ["chat"]]


def test_the_documented_file_is_one(read: Read) -> None:
    (text,) = re.findall(r"```yaml\n(.*?)```", (REPOSITORY / "docs/cluster.md").read_text(), re.S)
    cluster = read(text)
    assert set(cluster.servers["chat"].__struct_fields__) - {"donate"} == {
        line.split(":")[0].strip()
        for line in text.split("chat:\n")[1].split("  code:")[0].splitlines()
    }, "every entry of a receiver is shown"


def test_a_model_beside_the_file_is_found_from_anywhere(read: Read, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    cluster = read("servers: {a: {model: ./model}}")
    assert cluster.servers["a"].model == str(tmp_path / "model")


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("0.0.0.0", "http://127.0.0.1:8000"),
        ("::", "http://[::1]:8000"),
        ("::1", "http://[::1]:8000"),
        ("fd00::5", "http://[fd00::5]:8000"),
        ("localhost", "http://localhost:8000"),
    ],
)
def test_where_a_server_is_asked_is_a_url_of_this_machine(read: Read, host: str, url: str) -> None:
    (member,) = members(read(f"{{host: '{host}', servers: {{a: {{model: m}}}}}}")).values()
    assert member.command[3:5] == ("--host", host)
    assert member.ready == url


@pytest.mark.parametrize("flags", ["--host 10.0.0.5 --x", "--x --host=10.0.0.5"])
def test_a_host_for_all_servers_is_where_they_are_asked(read: Read, flags: str) -> None:
    cluster, rest = add_server_args(read("servers: {a: {model: m}}"), flags)
    ((member,),) = waves(cluster, Path("/run/there"), rest, launch=("serve",))
    assert member.command[3:] == ("--host", "10.0.0.5", "--port", "8000", "--x")
    assert member.ready == "http://10.0.0.5:8000"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["no servers"]),
        ("# later", ["no servers"]),
        ("{}", ["no servers"]),
        ("chat", ["expected keys (servers, donors,", "got 'chat'"]),
        ("- chat", ["expected keys (servers, donors,", "got ['chat']"]),
        ("servers: [", ["line 1, column 11: ", "correct the YAML there"]),
        ("servers:\n\ta: {model: m}", ["line 2, column 1: ", "correct the YAML there"]),
        ("\0", ["is not YAML", "name a text file"]),
        (
            "host: h\nargs: 2024-99-99",
            ["line 2, column 7: '2024-99-99' is no timestamp (month", "quote it if it is a text"],
        ),
        (
            "servers: {a: 2024-01-01T99:00:00}",
            ["line 1, column 14: '2024-01", "no timestamp (hour"],
        ),
        (f"args: {'1' * 5000}", ["line 1, column 7: '111", "no int (Exceeds the limit"]),
        ("args: !!bool x", ["line 1, column 7: 'x' is no bool"]),
        ("args: !!timestamp x", ["line 1, column 7: 'x' is no timestamp"]),
        (r'args: "\UFFFFFFFF"', ["escape", "is no character: correct it"]),
        (f"args: {'[' * 3000}{']' * 3000}", ["nested too deep", "expected entries a few levels"]),
        ("server: {}", ["key 'server' is not known: expected servers, donors, host, "]),
        ("servers:", ["servers: expected a name for each server", "got nothing"]),
        ("servers: [{model: m}]", ["servers: expected a name for each server", "got [{'model'"]),
        ("servers: {a: }", ["server 'a': expected keys (model, ", "got nothing"]),
        ("servers: {a: {}}", ["server 'a': model: expected a folder or a hub name, got nothing"]),
        (
            "servers: {a: {model: m, modle: m}}",
            ["server 'a': key 'modle' is not known: expected model, role, ", " args or env"],
        ),
        ("servers: {a: {model: ''}}", ["server 'a': model: expected a folder", "got ''"]),
        ("servers: {a: {model: /nowhere/at/all}}", ["'a'", "/nowhere/at/all"]),
        ("servers: {a: {model: ./absent}}", ["'a'", "absent"]),
        (
            "servers: {a: {model: m, role: boss}}",
            ["'a': role: expected receiver, donor", "got 'boss'"],
        ),
        ("servers: {a: {model: m, port: 70000}}", ["'a': port: ", "1 to 65535, got 70000"]),
        ("servers: {a: {model: m, gpu: -1}}", ["'a': gpu: expected the number of a GPU", "got -1"]),
        ("servers: {a: {model: m, gpu: one}}", ["'a': gpu: expected the number", "got 'one'"]),
        ("servers: {a: {model: m, args: [--x]}}", ["'a': args: expected flags in one text"]),
        ("servers: {a: {model: m, env: {N: 8}}}", ["'a': env: expected variables", "{'N': 8}"]),
        ("servers: {a: &a {model: m, donors: [*a]}}", ["'a': donors: expected a list of SPECs"]),
        (
            "servers: {a: {model: m}, a: {model: n}}",
            ["line 1: 'a' is there twice, first in line 1"],
        ),
        ("servers:\n  a:\n    model: m\n    model: n", ["line 4: 'model'", "first in line 3"]),
        ("servers: {a: {model: m, port: 8001}, b: {model: m}}", ["'a'", "'b'", "8001"]),
        ("servers: {a b: {model: m}}", ["server name 'a b'", "expected up to 64 letters"]),
        ("servers: {1: {model: m}}", ["server name 1 ", "expected up to 64 letters"]),
        ("servers: {a: {model: m, args: '--x \"'}}", ["'a'", "split"]),
        ("{args: '\"', servers: {a: {model: m}}}", ["args", "split"]),
        ("servers: {a: {model: m, args: --port 9}}", ["'a': args: --port cannot", "a port: "]),
        ("servers: {a: {model: m, args: --por 9}}", ["'a': args: --por cannot", "a port: "]),
        ("servers: {a: {model: m, args: --hos=h}}", ["'a': args: --hos cannot", "a host: "]),
        ("{args: --swiftcache-run /x, servers: {a: {model: m}}}", ["the --runtime-dir"]),
        ("{args: --host=0.0.0.0, servers: {a: {model: m}}}", ["args: --host cannot", "a host: "]),
        ("{args: --swiftcache-runtime-dir /x, servers: {a: {model: m}}}", ["the --runtime-dir"]),
        ("servers: {a: {model: m, env: {SWIFTCACHE_RUNTIME_DIR: /x}}}", ["'a': env", "not meet"]),
        ("{env: {SWIFTCACHE_RUNTIME_DIR: /x}, servers: {a: {model: m}}}", ["env", "not meet"]),
        ("servers: {a: {model: m, donors: [auto]}}", ["'a'", "'none'", "receiver"]),
        ("servers: {a: {model: m, role: receiver, donors: [attic]}}", ["'a'", "'attic'"]),
        ("servers: {a: {model: m, role: receiver, donate: auto}}", ["'a'", "donor"]),
        ("servers: {a: {model: m, role: donor, donate: 1.5}}", ["'a'", "1.5"]),
        ("servers: {a: {model: m, role: donor, donate: much}}", ["'a'", "'much'"]),
        ("{donors: {a: {device: host, size: 1GiB}}, servers: {a: {model: m}}}", ["'a'"]),
        (
            (
                "donors: {engine-80: {device: host, size: 1GiB}}\n"
                "servers: {a: {model: m, role: donor, port: 80}}"
            ),
            ["donor 'engine-80' has the name", "server 'a'", "give the donor another"],
        ),
        ("donors: {d: {device: gpu1, size: 1GiB}}", ["donor 'd': device: ", "cuda:1, got 'gpu1'"]),
        ("donors: {d: {device: host, size: 1}}", ["donor 'd': size: expected", "40GiB, got 1"]),
        ("donors: {d: {device: host}}", ["donor 'd': size: expected", "got nothing"]),
        ("donors: {d: {device: host, size: big}}", ["'d'", "'big'"]),
        ("donors: {d: {device: host, size: '0'}}", ["'d'", "size 0"]),
        (
            "{start_timeout_s: 0, servers: {a: {model: m}}}",
            ["start_timeout_s: expected seconds", "got 0"],
        ),
        ("{start_timeout_s: .nan}", ["start_timeout_s: expected seconds, more", "got nan"]),
        ("{start_timeout_s: .inf}", ["start_timeout_s: expected seconds, more", "got inf"]),
        ("{stop_timeout_s: .nan}", ["stop_timeout_s: expected seconds, more", "got nan"]),
        ("{stop_timeout_s: .inf}", ["stop_timeout_s: expected seconds, more", "got inf"]),
    ],
)
def test_what_is_wrong_is_said_in_one_line_with_the_file(
    read: Read, text: str, words: list[str]
) -> None:
    with pytest.raises(SwiftCacheError) as caught:
        read(text)
    line = str(caught.value)
    assert "\n" not in line
    for word in ("cluster.yaml", *words):
        assert word in line


def test_entries_may_be_shared_within_the_file(read: Read) -> None:
    cluster = read(
        "servers:\n"
        "  a: &a {model: m, gpu: 0, args: --x}\n"
        "  b: {<<: *a, gpu: 1}\n"
        "  c: {<<: *a, gpu: 2}"
    )
    found = {name: (server.args, server.gpu) for name, server in cluster.servers.items()}
    assert found == {"a": ("--x", 0), "b": ("--x", 1), "c": ("--x", 2)}


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(SwiftCacheError, match=r"cannot read /nowhere\.yaml"):
        read_cluster_file(Path("/nowhere.yaml"))


# -- the environment ----------------------------------------------------------------------------


def test_models_and_role_of_a_container() -> None:
    environ = {"SWIFTCACHE_MASTER_MODEL": "big", "SWIFTCACHE_WORKER_MODELS": "small, tiny"}
    both = cluster_of_environment(environ).servers
    shown = {name: (server.model, server.role, server.gpu) for name, server in both.items()}
    assert shown == {
        "master": ("big", "receiver", 0),
        "worker-0": ("small", "donor", 1),
        "worker-1": ("tiny", "donor", 2),
    }
    master = cluster_of_environment(environ | {"SWIFTCACHE_ROLE": "master"}).servers
    assert list(master) == ["master"]
    workers = cluster_of_environment(environ | {"SWIFTCACHE_ROLE": "worker"}).servers
    assert [workers[name].gpu for name in ("worker-0", "worker-1")] == [1, 2]
    assert len(workers) == 2


def test_the_environment_replaces_models_of_a_file(read: Read) -> None:
    cluster = read("servers: {a: {model: m, role: donor}, b: {model: m, role: receiver}}")
    environ = {"SWIFTCACHE_MASTER_MODEL": "big", "SWIFTCACHE_WORKER_MODELS": "small"}
    changed = apply_environment(cluster, environ)
    assert {name: server.model for name, server in changed.servers.items()} == {
        "a": "small",
        "b": "big",
    }
    assert apply_environment(cluster, {}) == cluster


def test_a_role_takes_its_part_of_a_file(read: Read) -> None:
    cluster = read(CLUSTER)
    receivers = apply_environment(cluster, {"SWIFTCACHE_ROLE": "receiver"})
    assert (set(receivers.servers), set(receivers.donors)) == ({"chat", "helper"}, set())
    assert receivers.servers["helper"].port == 9000, "ports are those of the whole file"
    others = apply_environment(cluster, {"SWIFTCACHE_ROLE": "donor"})
    assert (set(others.servers), set(others.donors)) == ({"code", "plain"}, {"attic"})


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"SWIFTCACHE_ROLE": "boss"}, ["'boss'", "master", "worker"]),
        ({"SWIFTCACHE_ROLE": "receiver"}, ["nothing of that role"]),
        ({"SWIFTCACHE_MASTER_MODEL": "m"}, ["0 receivers"]),
        ({"SWIFTCACHE_WORKER_MODELS": "m,n"}, ["2 models", "1 donor servers"]),
    ],
)
def test_an_environment_that_does_not_fit_is_refused(
    read: Read, environ: dict[str, str], words: list[str]
) -> None:
    with pytest.raises(SwiftCacheError) as caught:
        apply_environment(read("servers: {a: {model: m, role: donor}}"), environ)
    for word in (*environ, *words):
        assert word in str(caught.value)


def test_neither_a_file_nor_an_environment() -> None:
    with pytest.raises(SwiftCacheError, match="name a file, or set SWIFTCACHE_MASTER_MODEL"):
        cluster_of_environment({})


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.name)
def test_the_examples_can_be_started(path: Path, swiftcache_up: Any) -> None:
    done = swiftcache_up(path, "--dry-run")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("--swiftcache-") >= 3
