"""What `deploy/` says about the server is true: its flags, variables, routes and ports exist."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from sie.cluster.subjects import consumer_name, lane_of, work_stream
from sie.config.settings import Settings, all_keys
from sie.frontend.routes.table import TABLE
from sie.metrics.cluster_definitions import CLUSTER_FAMILIES

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
MANIFESTS = sorted((DEPLOY / "manifests").glob("*.yaml"))


def read(path: Path) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def container(manifest: Path) -> dict[str, Any]:
    (workload,) = [one for one in read(manifest) if one["kind"] == "StatefulSet"]
    (only,) = workload["spec"]["template"]["spec"]["containers"]
    return only


def test_variables_and_flags_are_the_servers():
    texts = [path.read_text() for path in (DEPLOY / "Dockerfile", DEPLOY / "helm/sie/templates/statefulset.yaml")]
    variables = {name for text in texts for name in re.findall(r"\bSIE_[A-Z_]+", text)}
    flags = {name for text in texts for name in re.findall(r"--[a-z-]+(?==\{\{|=/|\n)", text.partition("args:")[2])}
    assert {"SIE_HOST", "SIE_SERVER_NAME"} <= variables
    assert variables <= {key.variable for key in all_keys()}
    assert {"--grpc-port", "--open-metrics", "--tls-cert", "--model"} <= flags
    assert flags <= {"--config", *(key.flag for key in all_keys())}


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda path: path.stem)
def test_probes_ask_routes_that_need_no_key(manifest: Path):
    open_paths = {row.template for row in TABLE if row.need == "open"}
    server = container(manifest)
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert server[name]["httpGet"]["path"] in open_paths
    assert server["ports"][0]["containerPort"] == Settings().server.port


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda path: path.stem)
def test_a_pod_has_time_to_finish_its_requests(manifest: Path):
    (workload,) = [one for one in read(manifest) if one["kind"] == "StatefulSet"]
    pod = workload["spec"]["template"]["spec"]
    (drain,) = [word.partition("=")[2] for word in pod["containers"][0]["args"] if word.startswith("--drain-timeout-s")]
    (wait,) = pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][1:]
    assert float(drain) + float(wait) < pod["terminationGracePeriodSeconds"]
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["containers"][0]["securityContext"]["readOnlyRootFilesystem"]


def test_compose_mounts_files_that_exist_and_scrapes_the_job_of_the_alert_rules():
    (compose,) = read(DEPLOY / "compose.yaml")
    for service in compose["services"].values():
        for volume in service["volumes"]:
            source = volume.partition(":")[0]
            assert source in compose["volumes"] or (DEPLOY / source).is_file(), volume
    (prometheus,) = read(DEPLOY / "prometheus.yml")
    (scrape,) = prometheus["scrape_configs"]
    jobs = set(re.findall(r'job="(\w+)"', (ROOT / "monitoring/alerts.yml").read_text()))
    assert jobs == {scrape["job_name"]}
    assert scrape["static_configs"] == [{"targets": [f"sie:{Settings().server.port}"]}]
    assert (DEPLOY / "helm/sie/alerts.yml").read_text() == (ROOT / "monitoring/alerts.yml").read_text()


def test_the_image_copies_files_that_exist_and_lets_them_through():
    text = (DEPLOY / "Dockerfile").read_text()
    copied = [word for line in re.findall(r"^COPY (?!--)(.+) \S+$", text, re.MULTILINE) for word in line.split()]
    let_through = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    assert "sie" in copied
    for name in copied:
        assert (ROOT / name).exists(), name
        assert f"!{name}" in let_through, name


def test_the_image_has_the_packages_of_traces_and_clusters():
    extras = re.findall(r"^ARG EXTRAS=(\S+)$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {"otel", "cluster"} == set(extras[0].split(",")) <= known.keys()


def test_examples_for_keda_ask_for_what_gateways_and_nats_have():
    triggers = {
        path.stem: [trigger["metadata"] for trigger in read(path)[0]["spec"]["triggers"]]
        for path in (DEPLOY / "keda").glob("*.yaml")
    }
    for asked in triggers["prometheus"]:
        (name, label) = re.findall(r"\((\w+)\{(\w+)=", asked["query"])[0]
        (family,) = [one for one in CLUSTER_FAMILIES if one.name == name]
        assert label in family.labels
    (asked,) = triggers["nats"]
    assert asked["stream"] == work_stream("default")
    assert asked["consumer"] == consumer_name(lane_of("", "l4", ""), "sentence-transformers/all-MiniLM-L6-v2")


def test_a_local_cluster_does_not_join_the_nats_of_somebody_else():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        ended = subprocess.run(
            [sys.executable, DEPLOY / "local_cluster.py", "--nats-port", port],
            check=False,
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert ended.returncode == 1
    assert f"port {port} is taken" in ended.stderr
