"""Which packages may import which others, proved in fresh processes."""

from __future__ import annotations

import ast
import importlib.util
import json
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import sie

ROOT = Path(sie.__file__).parent
FOUNDATION = {
    "sie", "sie.config", "sie.shm", "sie.values", "sie.values.card", "sie.config.sources", "sie.values.errors", "sie.values.extract", "sie.values.generate",
    "sie.config.agent_settings", "sie.config.cluster_settings", "sie.config.generation_settings", "sie.values.agent", "sie.config.grpc_limits", "sie.values.work", "sie.config.limits",
    "sie.config.sections", "sie.config.settings", "sie.config.store_settings", "sie.values.muvera", "sie.values.output_kinds", "sie.values.cgroup_paths", "sie.values.spans", "sie.values.tensor", "sie.values.inference",
}  # fmt: skip
SLOW = {"torch", "transformers", "sentence_transformers"}
SERVERS = {"granian", "nats", "uvloop"}
PURE_FILES = (
    "catalog/options.py",
    "frontend/generation/detokenise.py",
    "frontend/generation/parsers.py",
    "frontend/generation/reader.py",
    "frontend/generation/stops.py",
    "frontend/inputs/profile_options.py",
    "frontend/http/routing.py",
    "frontend/engine/admission.py",
    "frontend/engine/placement.py",
    "frontend/inputs/prompts.py",
    "frontend/tensors/checks.py",
    "supervisor/evictions.py",
    "supervisor/restart.py",
    "workers/scheduling/ceilings.py",
    "workers/generation/token_frames.py",
    "workers/generation/kv.py",
    "workers/generation/planner.py",
    "workers/generation/sequences.py",
    "workers/scheduling/scheduler.py",
    "workers/scheduling/pace.py",
)
OF_TRITON = {"sie.workers.generation.kernels", "sie.workers.generation.layer_kernels"}
HAS_TRITON = importlib.util.find_spec("triton") is not None
IMPURE = {"time", "datetime", "asyncio", "threading", "socket", "os", "random", "torch", "transformers", "uvloop"}


def modules_under(package: str) -> list[str]:
    """Return `package` and all modules in it, except programs, and what needs a library that is not there."""
    path = ROOT / package.removeprefix("sie").removeprefix(".").replace(".", "/")
    found = [name for _, name, _ in pkgutil.walk_packages([str(path)], f"{package}.")]
    return [
        package,
        *(name for name in found if not name.endswith("__main__") and (HAS_TRITON or name not in OF_TRITON)),
    ]


def loaded_after_importing(modules: list[str]) -> set[str]:
    """Return the modules that a fresh process holds after importing these."""
    code = (
        "import importlib, json, sys\n"
        "for name in json.loads(sys.argv[1]): importlib.import_module(name)\n"
        "print(json.dumps(sorted(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(modules)], capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def roots(modules: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in modules}


def ours(modules: set[str]) -> set[str]:
    return {name for name in modules if name == "sie" or name.startswith("sie.")}


@pytest.mark.parametrize("module", sorted(FOUNDATION))
def test_foundation_imports_only_itself_and_msgspec(module: str):
    loaded = loaded_after_importing([module])
    assert ours(loaded) <= FOUNDATION
    assert not roots(loaded) & {"numpy", "click", "logging", *SLOW, *SERVERS}


def test_shm_imports_only_numpy_msgspec_and_the_foundation():
    loaded = loaded_after_importing(modules_under("sie.shm"))
    assert {name for name in ours(loaded) if not name.startswith("sie.shm")} <= {*FOUNDATION, "sie.values.work_bytes"}
    plain = loaded_after_importing(["numpy", "msgspec", "ctypes"])
    third_party = roots(loaded) - roots(plain) - sys.stdlib_module_names - {"sie"}
    assert not {name for name in third_party if not name.startswith("_")}


def test_frontend_never_imports_torch_or_workers():
    loaded = loaded_after_importing(modules_under("sie.frontend"))
    assert not roots(loaded) & {*SLOW, "onnxruntime"}
    assert not {name for name in loaded if name.startswith(("sie.workers", "sie.supervisor"))}


def test_frontend_loads_no_tracing_library_by_itself():
    loaded = loaded_after_importing(["sie.frontend.main", "sie.frontend.app"])
    assert not roots(loaded) & {"opentelemetry", "grpc", "google"}


def test_workers_never_import_a_server_or_the_frontend():
    loaded = loaded_after_importing(modules_under("sie.workers"))
    assert not roots(loaded) & {"granian", "nats"}
    assert not {name for name in loaded if name.startswith(("sie.frontend", "sie.supervisor"))}


def test_supervisor_never_imports_torch_or_http():
    loaded = loaded_after_importing(modules_under("sie.supervisor"))
    assert not roots(loaded) & {*SLOW, "granian", "tokenizers", "onnxruntime"}
    assert not {name for name in loaded if name.startswith("google.protobuf")}
    assert not {name for name in loaded if name.startswith(("sie.frontend", "sie.workers"))}


def test_the_load_generator_imports_no_part_of_the_server():
    loaded = loaded_after_importing(modules_under("sie.loadgen"))
    assert not roots(loaded) & {*SLOW, *SERVERS, "click", "grpc", "google", "tokenizers"}
    assert {name for name in ours(loaded) if not name.startswith("sie.loadgen")} == {"sie"}


def test_a_stub_worker_needs_no_torch():
    assert not roots(loaded_after_importing(["sie.workers.runners.stub", "sie.workers.generation.stub"])) & SLOW
    assert not roots(loaded_after_importing(["sie.workers.loop"])) & SLOW


def test_a_worker_of_onnx_models_needs_no_torch():
    assert not roots(loaded_after_importing(["sie.workers.runners.onnx"])) & SLOW


def test_command_line_imports_nothing_slow():
    loaded = loaded_after_importing(["sie.commands.cli"])
    assert not roots(loaded) & {"numpy", "tokenizers", "huggingface_hub", "asyncio", *SLOW, *SERVERS}


def test_dialects_know_no_ring_no_socket_and_not_the_document():
    for path in sorted((ROOT / "frontend" / "dialects").rglob("*.py")):
        imported = imported_names(path)
        unwanted = ("sie.shm", "sie.frontend.openapi", "socket", "granian")
        assert not {name for name in imported if name.startswith(unwanted)}, path


def test_a_dialect_imports_no_other_but_the_one_that_all_share():
    shared = {"openai": set(), "tei": {"openai", "cohere"}, "trtis": {"openai", "kserve"}}
    root = ROOT / "frontend" / "dialects"
    for path in sorted(root.glob("*/*.py")):
        package = path.parent.name
        parts = [name.split(".") for name in imported_names(path) if name.startswith("sie.frontend.dialects.")]
        used = {part[3] for part in parts} - {"description", "operation", package}
        assert used <= shared.get(package, {"openai"}), path


def test_only_the_document_loads_the_rows_of_the_dialects():
    folder = ROOT / "frontend" / "dialects"
    names = [".".join(path.relative_to(ROOT.parent).with_suffix("").parts) for path in sorted(folder.glob("*/*.py"))]
    wire = [name.removesuffix(".__init__") for name in names if not name.endswith((".openapi", ".dialect"))]
    assert not {name for name in loaded_after_importing(wire) if name.endswith((".openapi", "dialects.operation"))}


@pytest.mark.parametrize("name", PURE_FILES)
def test_pure_files_import_no_clock_no_loop_no_torch(name: str):
    assert not {imported.partition(".")[0] for imported in imported_names(ROOT / name)} & IMPURE


def imported_names(path: Path) -> set[str]:
    """Return every module that a file names in an import, inside functions too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names
