"""Errors that a client reads may name files, but not their places on the server (S7)."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from sie.values.errors import Internal, to_wire, without_paths
from tests.process.harness import eventually, start_server
from tests.process.watchers import first_frame
from tests.process.wire import get, post_json


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("there is no directory /srv/models/mine", "there is no directory .../mine"),
        ("/srv/m/model.safetensors: Permission denied", ".../model.safetensors: Permission denied"),
        ("cannot read '/srv/m/a b.json'", "cannot read '.../a b.json'"),
        ("[Errno 2] No such file: '/srv/models/mine/config.json'.", "[Errno 2] No such file: '.../config.json'."),
        ("asking https://huggingface.co/api/models/org/name: refused", None),
        ("Model 'org/name' cannot be loaded: over 1/2 of 3 MiB, and/or more", None),
        ("a ratio of 3 / 4 and a lone / stay", None),
    ],
)
def test_places_of_files_are_left_out(message, shown):
    assert without_paths(to_wire(Internal(message))).message == (shown or message)


def test_a_failed_load_does_not_tell_where_the_model_lies(tmp_path: Path, minilm_directory: Path):
    directory = tmp_path / "private" / "mine"
    shutil.copytree(minilm_directory, directory)
    body = {"items": [{"text": "x"}]}
    with start_server("--model", "stub/a=stub:dense=8", "--lazy-model", f"mine={directory}") as server:
        shutil.rmtree(directory)
        refusal = eventually(
            lambda: (found := post_json(server.port, "/v1/encode/mine", body)).status == 502 and found,
            "the load has failed",
        )
        seen = [refusal.body.decode(), str(first_frame(server))]
        seen += [
            get(server.port, path).body.decode() for path in ("/v1/models", "/v1/models/mine", "/readyz", "/metrics")
        ]
        assert [text for text in seen if str(tmp_path) in text] == []
        assert "No such file or directory: '.../config.json'" in seen[0]
        server.log_line(f"{directory}/config.json")
