from __future__ import annotations

import pytest

from sie.catalog.model_file import read_model_file
from sie.config.sources import SettingsError
from sie.values.errors import BadRequest


@pytest.fixture
def path(tmp_path):
    return tmp_path / "models.toml"


def test_a_section_says_where_a_model_is_and_how_it_is_asked(path):
    path.write_text(
        """
        [models."org/a"]
        directory = "weights/a"
        revision = "v1.2"
        preload = true
        max_sequence_length = 256
        encoder_weights = "int8"
        ignore_remote_code = true
        accept_token_ids = true
        pooling = "cls"
        dimensions = [64, 128]

        [models."org/a".reranker]
        like = "Qwen/Qwen3-Reranker-4B"
        true_token = "Ja"

        [models."org/a".profiles.default.options]
        query_template = "q: {text}"

        [models."org/a".profiles.short]
        options = { max_seq_length = 64 }

        [models."intfloat/e5-small".profiles.same]
        extends = "default"
        """
    )
    models = read_model_file(str(path))
    assert list(models) == ["org/a", "intfloat/e5-small"]
    model, profiles = models["org/a"]
    assert model.directory == str(path.parent / "weights/a"), "beside the file, wherever the server is started"
    assert (model.revision, model.preload, model.max_sequence_length) == ("v1.2", True, 256)
    assert model.encoder_weights == "int8"
    assert model.ignore_remote_code
    assert (model.encoder_weights, model.accept_token_ids) == ("int8", True)
    assert (model.pooling, model.dimensions) == ("cls", (64, 128))
    assert profiles == {"default": {"query_template": "q: {text}"}, "short": {"max_seq_length": 64}}
    assert model.reranker is not None
    assert (model.reranker.true_token, model.reranker.false_token) == ("Ja", "no"), "its own value comes first"
    assert "{document}" in model.reranker.parts[1]
    other, inherited = models["intfloat/e5-small"]
    assert not other.accept_token_ids
    assert inherited["same"]["doc_template"] == "passage: {text}", "a built-in profile can be extended"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[x]", "x: unknown section"),
        ("models = 3", "models: a table is expected"),
        ('[models]\na = "dir"', '[models."a"]: a table is expected'),
        ('[models."a b"]', "may only contain letters"),
        ('[models."a:fast"]', "names a profile after ':'"),
        ("[models.a]\ndirectry = 'x'", '[models."a"] directry: unknown key; did you mean directory?'),
        ("[models.a]\npreload = 1", "Expected `bool`, got `int` - at `$.preload`"),
        ("[models.a]\ndirectory = ''", "at `$.directory`"),
        ("[models.a]\nrevision = '../x'", "'../x' is not a revision"),
        ("[models.a]\nmax_sequence_length = 0", "at `$.max_sequence_length`"),
        ("[models.a]\naccept_token_ids = 1", "at `$.accept_token_ids`"),
        ("[models.a]\nencoder_weights = 'int4'", "at `$.encoder_weights`"),
        ("[models.a]\nignore_remote_code = 1", "at `$.ignore_remote_code`"),
        ("[models.a.reranker]\nlike = 'x'", "'x' is not the id of a known reranker"),
        ("[models.a.reranker]\ntrue_token = 'x'", "`parts` - at `$.reranker`"),
        ("[models.a.reranker]\nparts = ['{query}']", "{document} must appear exactly once"),
        ("[models.a.reranker]\nparts = ['{query}', '{document} {query}']", "{query} must appear exactly once"),
        ("[models.a.reranker]\nparts = ['{query}{document}']\ndivisor = 0", "at `$.reranker.divisor`"),
        ("[models.a.reranker]\nparts = ['{query}{document}']\nyes = 'x'", "unknown field `yes`"),
        ("[models.a.reranker]\nparts = ['{query}{document}']\ninstructed_query = '{query}'", "no part may hold both"),
        ("[models.a]\npooling = 'best'", "at `$.pooling`"),
        ("[models.a]\ndimensions = [0]", ">= 1 - at `$.dimensions[0]`"),
        ("[models.a.profiles]\np = 3", '[models."a"] profiles.p: a table is expected'),
        ("[models.a.profiles.p]\noption = {}", '[models."a"] profiles.p option: unknown key; did you mean options?'),
        ("[models.a.profiles.p]\nextends = 3", "at `$.extends`"),
        ("[models.a.profiles.p]\nextends = 'q'", "[models.\"a\"] profile 'p': it extends 'q'"),
        ("[models.a.profiles.p.options]\nis_query = 'x'", "[models.\"a\"] profile 'p': Expected `bool | null`"),
    ],
)
def test_what_is_wrong_is_told_with_file_section_and_reason(path, text, reason):
    path.write_text(text)
    with pytest.raises(BadRequest) as caught:
        read_model_file(str(path))
    assert caught.value.message.startswith(f"{path}: ")
    assert reason in caught.value.message


@pytest.mark.parametrize(("text", "reason"), [("[", "is not TOML"), (None, "cannot be read")])
def test_a_malformed_file_is_refused(path, text, reason):
    if text is not None:
        path.write_text(text)
    with pytest.raises(SettingsError, match=reason):
        read_model_file(str(path))
