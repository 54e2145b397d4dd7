"""Each snippet of docs/integrations.md, run as it stands there against a server.

Those in CI run in this process, because an import of a client takes longer than its snippet. With INTEGRATIONS, the folder
of an environment that `make integrations` made, all others run instead, in processes of their own.
"""

from __future__ import annotations

import gc
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.conformance.snippets import PAGE, Snippet, read_snippets
from tests.process.harness import Server, free_port, start_server

ENVIRONMENT: Final = os.environ.get("INTEGRATIONS", "")
SNIPPETS: Final = read_snippets()
IN_CI: Final = [snippet for snippet in SNIPPETS if snippet.is_in_ci]
ELSEWHERE: Final = [snippet for snippet in SNIPPETS if not snippet.is_in_ci]
LONG: Final = 262_144


@pytest.fixture(scope="module")
def ports() -> Iterator[tuple[Server, int]]:
    """Return a server with stand-ins for the page's models, and its port for gRPC; a token of its generator is a byte."""
    grpc_port = free_port()
    with start_server(
        "--model", f"chat=stub:generate,scripted,max_tokens={LONG},blocks=16384", "--max-context-tokens", str(LONG),
        "--model", "embed=stub:dense=16", "--model", "rerank=stub:dense=16,score", "--default-model", "rerank",
        "--frontends", "1", "--devices", "cpu:1", "--grpc-port", str(grpc_port),
    ) as server:  # fmt: skip
        yield server, grpc_port


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("snippet", IN_CI, ids=lambda snippet: snippet.name)
def test_snippet_of_the_page_works(
    snippet: Snippet, ports: tuple[Server, int], capfd: pytest.CaptureFixture[str]
) -> None:
    server, grpc_port = ports
    exec(compile(snippet.fitted(server.port, grpc_port), snippet.name, "exec"), {"__name__": "__main__"})
    gc.collect()  # the snippets leave some clients open, whose sockets warn of it when they are collected
    assert snippet.prints in capfd.readouterr().out


@pytest.mark.skipif(not ENVIRONMENT, reason="make integrations")
@pytest.mark.parametrize("snippet", ELSEWHERE, ids=lambda snippet: snippet.name)
def test_snippet_works_in_an_environment_of_its_own(
    snippet: Snippet, ports: tuple[Server, int], tmp_path: Path
) -> None:
    server, grpc_port = ports
    environment = Path(ENVIRONMENT).resolve()
    name, *command = {
        "python": ("snippet.py", str(environment / snippet.environment / "bin/python"), "snippet.py"),
        "js": ("snippet.mjs", "node", "snippet.mjs"),
        "sh": ("snippet.sh", "bash", "-e", "snippet.sh"),
    }[snippet.language]
    (tmp_path / name).write_text(snippet.fitted(server.port, grpc_port))
    (tmp_path / "node_modules").symlink_to(environment / "node_modules")
    path = f"{environment / 'node_modules/.bin'}:{os.environ['PATH']}"
    own = {"PATH": path, "HOME": str(tmp_path), "HTTP_PROXY": "", "HTTPS_PROXY": ""}
    done = subprocess.run(command, cwd=tmp_path, env=own, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                          timeout=100, check=False)  # fmt: skip
    assert snippet.prints in done.stdout, f"status {done.returncode}\n{done.stdout}\n{done.stderr}"
    assert done.returncode == 0


def test_page_says_of_each_client_where_it_runs() -> None:
    rows = re.findall(r"^\| \[.+?\]\(#(.+?)\) \|.*\| (.+?) \|$", PAGE.read_text(), re.MULTILINE)
    said = {anchor: where for anchor, where in rows if where != "not run"}
    found = {_anchor(snippet.name.rpartition(" ")[0]): snippet.is_in_ci for snippet in SNIPPETS}
    assert {anchor: where == "in CI" for anchor, where in said.items()} == found


def _anchor(heading: str) -> str:
    return re.sub(r"[^a-z0-9 _-]", "", heading.lower()).replace(" ", "-")
