from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from sie.catalog.spec import ModelSpec
from sie.commands.pull import pull
from sie.config import bundled
from sie.supervisor import card_helper
from sie.values.card import ModelCard


@pytest.mark.parametrize(
    ("model", "is_bundled"), [(bundled.BUNDLED_MODEL, True), (f"{bundled.BUNDLED_MODEL}@main", False), ("org/x", False)]
)
def test_bundled_model_is_the_one_that_the_server_has(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: str, is_bundled: bool
):
    seen: list[ModelSpec] = []

    def prepare(_settings: Any, specs: list[ModelSpec]) -> dict[str, ModelCard]:
        seen.extend(specs)
        return {spec.id: ModelCard(id=spec.id, kind="encoder") for spec in specs}

    spec = f"{bundled.BUNDLED_MODEL}={tmp_path}"
    monkeypatch.setattr(bundled, "_find_bundled", lambda: spec)
    monkeypatch.setattr(card_helper, "prepare_models", prepare)
    result = CliRunner().invoke(pull, [model], standalone_mode=False)
    assert result.exception is None, result.output
    assert [bool(one.directory) for one in seen] == [is_bundled]
