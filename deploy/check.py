"""Lints the files of this folder, and renders `manifests/` from the chart: `make deploy`. No daemon or cluster is needed.

With `--check` it writes nothing, and fails if a manifest differs from the chart's output.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import yaml
from helm_python.chart import Chart, lint

HERE: Final = Path(__file__).resolve().parent
CHART: Final = HERE / "helm/sie"
_KUBERNETES: Final = "1.33"
_INFO: Final = 1
_ALL: Final[dict[str, Any]] = {
    "models": ["org/name", "other=/models/other"],
    "settings": "[limits]\nmax_items = 64\n",
    "apiKeysSecret": "keys",
    "tlsSecret": "tls",
    "hubTokenSecret": "hub",
    "cache": {"size": "50Gi", "storageClass": "fast"},
    "service": {"grpcPort": 8001},
    "disruptionBudget": {"enabled": True},
}
MANIFESTS: Final[dict[str, dict[str, Any]]] = {
    "cpu": {},
    "gpu": {
        "image": {"tag": "cuda"},
        "gpus": 1,
        "cache": {"size": "100Gi"},
        "resources": {"requests": {"cpu": "8", "memory": "64Gi"}, "limits": {"cpu": "8", "memory": "64Gi"}},
    },
}
"""The values of each rendered manifest, beside the chart's own."""


def render(values: dict[str, Any]) -> str:
    """Return the objects of the chart with these values, in the order of their files."""
    with Chart.load(CHART) as chart:
        rendered = chart.render(values=values, name="sie", namespace="default")
    texts = [text.strip() for path, text in sorted(rendered.items()) if path.endswith(".yaml")]
    return "---\n".join(f"{text}\n" for text in texts if text)


def main(is_check: bool) -> int:
    """Run every check. Return 0 if all passed."""
    faults: list[str] = []
    report = lint(CHART, _ALL, strict=True)
    faults += [f"helm lint: {message}" for message in report["messages"] if message["severity"] > _INFO]
    for name, values in MANIFESTS.items():
        text = f"# Rendered from deploy/helm/sie by `make deploy`.\n{render(values)}"
        path = HERE / "manifests" / f"{name}.yaml"
        if not is_check:
            path.write_text(text)
        elif path.read_text() != text:
            faults.append(f"{path.name} differs from the chart; `make deploy` writes it")
    Path(HERE.parent / "build").mkdir(exist_ok=True)
    everything = HERE.parent / "build/everything.yaml"
    everything.write_text(render(_ALL))
    objects = [HERE / "manifests" / f"{name}.yaml" for name in MANIFESTS]
    commands = [
        ["hadolint", str(HERE / "Dockerfile")],
        ["kubernetes-validate", "--strict", "-k", _KUBERNETES, *map(str, objects), str(everything)],
    ]
    for command in commands:
        executable = Path(sys.executable).with_name(command[0])
        done = subprocess.run([executable, *command[1:]], capture_output=True, text=True, check=False)  # noqa: S603
        print(done.stdout + done.stderr, end="")
        faults += [f"{command[0]}: status {done.returncode}"] if done.returncode else []
    for path in (HERE / "compose.yaml", HERE / "prometheus.yml", *sorted((HERE / "grafana").glob("*.yml"))):
        yaml.safe_load(path.read_text())
    # Objects of other projects' kinds are not in Kubernetes' own schema.
    for extra in ({"podMonitor": {"enabled": True}}, {"autoscaling": {"enabled": True}}):
        kinds = [document["kind"] for document in yaml.safe_load_all(render({**_ALL, **extra}))]
        print("with", extra, "->", ", ".join(kinds))
    print("\n".join(faults) or "deploy: all checks passed")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
