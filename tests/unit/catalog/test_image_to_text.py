"""Cards of Florence-2 and Donut, and the checkpoints that cannot be served as such."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sie.catalog.checkpoint_card import read_card
from sie.catalog.image_to_text import TASK_TOKENS, finish_image_to_text
from sie.catalog.spec import ModelSpec
from sie.values.card import ModelCard
from sie.values.errors import ModelLoadFailed
from sie.values.extract import ImageToText
from tests.unit.image_to_text_checkpoints import save_donut, save_florence


@pytest.fixture(scope="module")
def florence(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_florence(tmp_path_factory.mktemp("florence"), by_authors=True)


@pytest.fixture(scope="module")
def donut(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_donut(tmp_path_factory.mktemp("donut"))


def card_of(directory: Path) -> ModelCard:
    return read_card(ModelSpec(id="test/reads"), str(directory))


def changed(directory: Path, tmp_path: Path, file: str, part: str, **values: Any) -> Path:
    """Return a copy of a checkpoint in which a file's JSON, or a part of it, has other values."""
    for path in directory.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    content: dict[str, Any] = json.loads((tmp_path / file).read_text()) if (tmp_path / file).exists() else {}
    (content[part] if part else content).update(values)
    (tmp_path / file).write_text(json.dumps(content))
    return tmp_path


def test_a_card_says_how_texts_are_generated(florence: Path, donut: Path) -> None:
    card = card_of(florence)
    assert (card.kind, card.inputs, card.wire_outputs) == ("extractor", ("image",), ["json"])
    rule = card.extract
    assert isinstance(rule, ImageToText)
    assert (rule.start_ids, rule.end_ids, rule.last_id, rule.no_repeat_ngram) == ((2, 0), (2,), 2, 3)
    assert card.image is not None
    assert card.image.count_tokens(64, 64) == 96 - (card.max_sequence_length or 0) == 5
    rule = card_of(donut).extract
    assert isinstance(rule, ImageToText)
    assert (rule.family, rule.start_ids, rule.max_new_tokens) == ("donut", (), 95)


def test_bart_s_tokenizer_gets_the_tokens_of_florence(florence: Path, tmp_path: Path) -> None:
    import tokenizers

    card = finish_image_to_text(card_of(florence), str(tmp_path))
    library = tokenizers.Tokenizer.from_file(card.tokenizer_file)
    before = card.vocab_size - len(TASK_TOKENS)
    assert [library.token_to_id(token) for token in ("<od>", "<loc_0>", "<loc_999>", "<and>")] == [
        before, before + 4, before + 1003, card.vocab_size - 1,
    ]  # fmt: skip
    assert library.encode("<loc_7>", add_special_tokens=False).ids == [before + 11]
    assert finish_image_to_text(card_of(florence), str(tmp_path)) == card


def test_a_tokenizer_of_another_size_is_refused(florence: Path, tmp_path: Path) -> None:
    config = json.loads((florence / "config.json").read_text())
    text = {**config["text_config"], "vocab_size": 9999}
    with pytest.raises(ModelLoadFailed, match="tokens with those of Florence-2, but the model has 9999"):
        finish_image_to_text(
            card_of(changed(florence, tmp_path, "config.json", "", text_config=text)), str(tmp_path / "cache")
        )


def test_donut_never_says_an_unknown_token(donut: Path, tmp_path: Path) -> None:
    rule = finish_image_to_text(card_of(donut), str(tmp_path)).extract
    assert isinstance(rule, ImageToText)
    assert rule.forbidden_ids == (3,)


@pytest.mark.parametrize(
    ("family", "file", "part", "values", "reason"),
    [
        ("florence", "config.json", "", {"architectures": ["Florence2Model"]}, "Florence2Model generates no text"),
        ("florence", "config.json", "vision_config", {"image_feature_source": ["last_frame"]}, "image_feature_source"),
        ("florence", "config.json", "vision_config", {"image_pos_embed": {"type": "sine"}}, "image_pos_embed.type"),
        ("florence", "config.json", "text_config", {"normalize_before": True}, "normalize_before"),
        ("florence", "config.json", "text_config", {"max_position_embeddings": 5}, "leaves no prompt"),
        ("florence", "generation_config.json", "", {"repetition_penalty": 1.2}, "repetition_penalty"),
        ("florence", "config.json", "", {"auto_map": {"AutoModelForCausalLM": "other.Florence2Next"}}, "Florence2Next"),
        ("florence", "preprocessor_config.json", "", {"size": {"longest_edge": 3}}, "size"),
        ("donut", "config.json", "", {"encoder": {"model_type": "vit"}}, "'vit'"),
        ("donut", "config.json", "", {"decoder": {"model_type": "trocr"}}, "only Donut"),
        ("donut", "preprocessor_config.json", "", {"do_align_long_axis": True}, "do_align_long_axis"),
        ("donut", "preprocessor_config.json", "", {"size": {"height": 0, "width": 5}}, "size"),
        ("donut", "generation_config.json", "", {"min_length": 4}, "min_length"),
    ],
)
def test_a_checkpoint_that_cannot_be_followed_is_refused(
    request: pytest.FixtureRequest, tmp_path: Path, family: str, file: str, part: str, values: Any, reason: str
) -> None:
    with pytest.raises(ModelLoadFailed, match=reason):
        card_of(changed(request.getfixturevalue(family), tmp_path, file, part, **values))


def test_an_older_size_has_the_width_first(donut: Path, tmp_path: Path) -> None:
    card = card_of(changed(donut, tmp_path, "preprocessor_config.json", "", size=[64, 96]))
    assert card.image is not None
    assert (card.image.height, card.image.width) == (96, 64)
