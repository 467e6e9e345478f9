"""The manifests: valid for Kubernetes and Compose, and they fit each other and the program."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from support.deployed import DEPLOY, adapter_expressions, adapter_rules
from support.promql import selectors
from swiftcache_tier.cluster.commands import waves
from swiftcache_tier.cluster.config import read_cluster_file
from swiftcache_tier.settings import Settings

KUBERNETES = DEPLOY / "kubernetes"
FILES = sorted(KUBERNETES.glob("*.yaml"))
# Oldest version with all that the manifests use that is still supported, and the newest known.
VERSIONS = ("1.32", kubernetes_validate.latest_version())


def documents(file: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(file.read_text()))


def document(kind: str, name: str) -> dict[str, Any]:
    """The one object of that kind and name among all files."""
    (found,) = (
        d
        for file in FILES
        for d in documents(file)
        if (d["kind"], d["metadata"]["name"]) == (kind, name)
    )
    return found


def pod() -> dict[str, Any]:
    template: dict[str, Any] = document("Deployment", "swiftcache")["spec"]["template"]
    return template


def container(name: str) -> dict[str, Any]:
    (found,) = (c for c in pod()["spec"]["containers"] if c["name"] == name)
    return dict(found)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_kubernetes_takes_it(file: Path, version: str) -> None:
    for found in documents(file):
        kubernetes_validate.validate(found, version, strict=True)


def test_the_validator_finds_a_misspelt_field() -> None:
    wrong = document("Deployment", "swiftcache")
    wrong["spec"]["template"]["spec"]["containers"][0]["livenesProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, VERSIONS[0], strict=True)


def test_the_pod_is_what_operators_asked_for() -> None:
    server = container("swiftcache")
    variables = {variable["name"] for variable in server["env"]}
    assert {"SWIFTCACHE_MASTER_MODEL", "SWIFTCACHE_WORKER_MODELS"} <= variables
    assert int(server["resources"]["limits"]["nvidia.com/gpu"]) > 1
    assert {port["name"]: port["containerPort"] for port in server["ports"]}["http"] == 8000
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert server[probe]["httpGet"] == {"path": "/health", "port": "http"}
    assert pod()["metadata"]["annotations"]["prometheus.io/port"] == "8000"
    # peers are told apart by their process, so donors and who asks them must see each other's
    assert pod()["spec"]["shareProcessNamespace"] is True


def test_the_variables_are_known_to_the_program() -> None:
    for found in pod()["spec"]["containers"]:
        Settings.from_env({variable["name"]: variable["value"] for variable in found["env"]})


def test_services_and_volumes_lead_somewhere() -> None:
    labels = pod()["metadata"]["labels"]
    ports = {port["name"] for c in pod()["spec"]["containers"] for port in c["ports"]}
    for service in documents(KUBERNETES / "service.yaml"):
        assert service["spec"]["selector"].items() <= labels.items()
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports
    volumes = {volume["name"] for volume in pod()["spec"]["volumes"]}
    for found in pod()["spec"]["containers"]:
        assert {mount["name"] for mount in found["volumeMounts"]} <= volumes


def test_every_server_of_the_cluster_has_a_gpu_and_a_port_of_its_own() -> None:
    cluster = yaml.safe_load(document("ConfigMap", "swiftcache")["data"]["cluster.yaml"])
    servers = list(cluster["servers"].values())
    gpus = int(container("swiftcache")["resources"]["limits"]["nvidia.com/gpu"])
    assert sorted(server["gpu"] for server in servers) == list(range(gpus))
    exposed = {port["containerPort"] for port in container("swiftcache")["ports"]}
    assert {server["port"] for server in servers} == exposed
    workers = {v["name"]: v["value"] for v in container("swiftcache")["env"]}
    donors = [server for server in servers if server["role"] == "donor"]
    assert len(workers["SWIFTCACHE_WORKER_MODELS"].split(",")) == len(donors)


def test_the_autoscaler_reads_what_the_adapter_makes_of_our_metrics() -> None:
    scaler = document("HorizontalPodAutoscaler", "swiftcache")["spec"]
    assert scaler["scaleTargetRef"]["name"] == "swiftcache"
    read = {metric["pods"]["metric"]["name"] for metric in scaler["metrics"]}
    assert read == {"swiftcache_ttft_seconds_p99", "swiftcache_miss_ratio"}
    assert {rule["name"]["as"] for rule in adapter_rules()} == read
    assert len(adapter_expressions()) == 2 * len(read)
    for expression in adapter_expressions():
        assert selectors(expression)


def test_the_exporter_s_command_is_one() -> None:
    assert "usage: swiftcache exporter" in swiftcache([*container("exporter")["command"], "--help"])


def test_the_pod_starts_a_receiver_and_a_donor(tmp_path: Path) -> None:
    """`swiftcache up` says what it would start with the pod's file and variables."""
    file = tmp_path / "cluster.yaml"
    file.write_text(document("ConfigMap", "swiftcache")["data"]["cluster.yaml"])
    *command, mounted = container("swiftcache")["command"]
    (cluster,) = (m for m in container("swiftcache")["volumeMounts"] if m["name"] == "cluster")
    assert mounted == f"{cluster['mountPath']}/{file.name}"
    variables = {variable["name"]: variable["value"] for variable in container("swiftcache")["env"]}
    worker, master = swiftcache([*command, str(file), "--dry-run"], variables).splitlines()
    assert f"--model-path {variables['SWIFTCACHE_MASTER_MODEL']} " in master
    assert f"--model-path {variables['SWIFTCACHE_WORKER_MODELS']} " in worker
    assert "--swiftcache-donors" in master
    assert "--swiftcache-donate" in worker
    for line in (master, worker):
        assert "--host 0.0.0.0" in line
        assert "--enable-metrics" in line
    assert "--port 8000" in master


def test_compose_starts_the_same(tmp_path: Path) -> None:
    service = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["swiftcache"]
    variables = {
        name: value.partition(":-")[2].rstrip("}") if value.startswith("${") else value
        for name, value in service["environment"].items()
    }
    worker, master = swiftcache([*service["command"], "--dry-run"], variables).splitlines()
    assert "--swiftcache-donors" in master
    assert "--swiftcache-donate" in worker
    assert "--host 0.0.0.0" in master


def test_there_is_time_for_all_groups_to_end(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(document("ConfigMap", "swiftcache")["data"]["cluster.yaml"])
    cluster = read_cluster_file(file)
    groups = waves(cluster, tmp_path)
    assert len(groups) == 2
    # `swiftcache up` may wait twice ten seconds for what it has killed to be gone
    needed_s = len(groups) * (cluster.stop_timeout_s + 20)
    assert pod()["spec"]["terminationGracePeriodSeconds"] > needed_s
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    grace = compose["services"]["swiftcache"]["stop_grace_period"]
    assert float(grace.removesuffix("s")) > needed_s


def swiftcache(command: list[str], variables: Mapping[str, str] = os.environ) -> str:
    """What a container's command prints here."""
    assert command[0] == "swiftcache"
    result = subprocess.run(
        [sys.executable, "-m", "swiftcache_tier", *command[1:]],
        capture_output=True,
        text=True,
        timeout=60,
        env={"PATH": os.environ["PATH"], **variables},
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_compose_takes_it() -> None:
    result = subprocess.run(
        [
            *(sys.executable, "-m", "check_jsonschema"),
            *("--builtin-schema", "vendor.compose-spec", str(DEPLOY / "compose.yaml")),
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_compose_mounts_files_that_are_there_and_scrapes_services_that_are_there() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    for service in compose["services"].values():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            assert source in compose["volumes"] or (DEPLOY / source).exists(), volume
    prometheus = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    targets = [
        target.split(":")[0]
        for job in prometheus["scrape_configs"]
        for config in job["static_configs"]
        for target in config["targets"]
    ]
    assert set(targets) <= compose["services"].keys()
    build = compose["services"]["swiftcache"]["build"]
    assert (DEPLOY / build["context"] / build["dockerfile"]).exists()
