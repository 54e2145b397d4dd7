"""Florence-2 and Donut against the library's own processor and `generate`, on few random weights."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray
from PIL import Image
from safetensors.torch import load_file

from sie.catalog.prepare import Request, prepare
from sie.catalog.spec import ModelSpec
from sie.frontend.inputs.images import prepare_image
from sie.frontend.inputs.tokenize import Tokenizer
from sie.frontend.operations.extraction.image_texts import PromptReading
from sie.values.card import ModelCard
from sie.values.errors import BadRequest, NonFinite
from sie.values.extract import ExtractTask, ImageToText
from sie.workers.loading.loader import load_image_to_text
from sie.workers.model_api import SearchedImage
from sie.workers.runners import image_to_text
from tests.unit.image_to_text_checkpoints import authors_name, save_donut, save_florence

NUM_TOKENS = 40
FLORENCE_TASKS = (
    ExtractTask(task="<OD>"),
    ExtractTask(task="<CAPTION_TO_PHRASE_GROUNDING>", instruction="a cat on a sofa"),
    ExtractTask(task="<REGION_TO_OCR>", instruction="<loc_7><loc_40><loc_500><loc_999>"),
    ExtractTask(),
)
DONUT_TASKS = (
    ExtractTask(),
    ExtractTask(task="<s_docvqa>", instruction="What is it?"),
    ExtractTask(task="<s_rvlcdip>"),
    ExtractTask(task="<s_docvqa>", instruction="Who?"),
)
Given = tuple[Image.Image, ExtractTask]
Answers = list[list[int]]


def pictures() -> list[Image.Image]:
    random = np.random.default_rng(5)
    sizes = ((40, 70), (90, 55), (200, 120), (64, 64))
    return [Image.fromarray(random.integers(0, 256, (*size, 3), np.uint8)) for size in sizes]


class Served:
    """One checkpoint, loaded by us, and what the library's form of it answers."""

    def __init__(self, directory: Path, cache: Path, tasks: Sequence[ExtractTask], dtype: Any = "float32") -> None:
        self.card: ModelCard = prepare_card(directory, cache)
        assert isinstance(self.card.extract, ImageToText)
        self.rule = self.card.extract
        self.runner = load_image_to_text(self.card, "cpu", dtype, lambda *_: None)
        self.tokenizer = Tokenizer.load(self.card)
        self.given: list[Given] = list(zip(pictures(), tasks, strict=True))

    def image(self, picture: Image.Image, task: ExtractTask) -> SearchedImage:
        """Return a picture as it reaches the worker."""
        assert self.card.image is not None
        reading = PromptReading(self.rule, task, self.tokenizer)
        (_, ids), _ = reading.prepare(reading.texts)
        return SearchedImage(prepare_image(picture, self.card.image), (ids,), b"")

    def run(self, given: Sequence[Given], num_tokens: int = NUM_TOKENS) -> Answers:
        """Return the answers to images that all come in the first step."""
        return [ids.tolist() for ids in self.find(given, num_tokens)]

    def find(self, given: Sequence[Given], num_tokens: int = NUM_TOKENS) -> list[Any]:
        """Return the same as the runner gives them: arrays, or errors."""
        images = [self.image(*each) for each in given]
        told = [ExtractTask(max_new_tokens=num_tokens)] * len(images)
        found: dict[int, Any] = {}
        while len(found) < len(images):
            waiting = [place for place in range(len(images)) if place not in found]
            answers = self.runner.advance([images[place] for place in waiting], told[: len(waiting)])
            found |= {place: answer for place, answer in zip(waiting, answers, strict=True) if answer is not None}
        return [found[place] for place in range(len(images))]


def prepare_card(directory: Path, cache: Path) -> ModelCard:
    spec = ModelSpec(id="test/reads", directory=str(directory))
    return prepare(Request(spec=spec, cache_dir=str(cache)), lambda *_: None)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def florence(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> tuple[Served, Answers]:
    directory = save_florence(tmp_path_factory.mktemp("florence"))
    served = Served(directory, cache, FLORENCE_TASKS)
    model: Any = transformers.Florence2ForConditionalGeneration.from_pretrained(directory).eval()
    images = transformers.CLIPImageProcessorPil.from_pretrained(directory)
    images.image_seq_length = 5
    processor: Any = transformers.Florence2Processor(images, transformers.AutoTokenizer.from_pretrained(directory))
    expected: Answers = []
    for picture, task in served.given:
        text = (task.task or "<OCR_WITH_REGION>") + (task.instruction or "")
        inputs = processor(images=picture, text=text, return_tensors="pt")
        expected.append(generate(model, 1, num_beams=1, do_sample=False, **inputs))
    return served, expected


@pytest.fixture(scope="module")
def donut(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> tuple[Served, Answers]:
    directory = save_donut(tmp_path_factory.mktemp("donut"))
    served = Served(directory, cache, DONUT_TASKS)
    model: Any = transformers.VisionEncoderDecoderModel.from_pretrained(directory).eval()
    images = transformers.DonutImageProcessorPil.from_pretrained(directory)
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(directory)
    expected: Answers = []
    for picture, task in served.given:
        text = task.task or "<s_cord-v2>"
        if task.instruction:
            text = f"{text}<s_question>{task.instruction}</s_question><s_answer>"
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
        pixels = images(picture, return_tensors="pt").pixel_values
        bad = [[tokenizer.unk_token_id]]
        expected.append(generate(model, ids.shape[1], pixel_values=pixels, decoder_input_ids=ids, bad_words_ids=bad))
    return served, expected


def generate(model: Any, num_prompt: int, **inputs: Any) -> list[int]:
    """Return the library's tokens behind the prompt, without the end."""
    [ids] = model.generate(**inputs, max_new_tokens=NUM_TOKENS).tolist()
    answer = ids[num_prompt:]
    return answer[: answer.index(2)] if 2 in answer else answer


@pytest.fixture(params=["florence", "donut"])
def both(request: pytest.FixtureRequest) -> tuple[Served, Answers]:
    return request.getfixturevalue(request.param)


def test_an_answer_has_the_tokens_of_the_library(both: tuple[Served, Answers]) -> None:
    served, expected = both
    assert [served.run([each])[0] for each in served.given] == expected
    assert len({tuple(answer) for answer in expected}) == len(expected)
    assert max(map(len, expected)) > NUM_TOKENS // 2


def test_answers_are_the_same_in_a_batch(both: tuple[Served, Answers]) -> None:
    served, expected = both
    assert served.run(served.given) == expected
    assert served.run(served.given[::-1]) == expected[::-1]


def test_answers_are_the_same_when_images_come_one_after_another(
    both: tuple[Served, Answers], monkeypatch: pytest.MonkeyPatch
) -> None:
    served, expected = both
    monkeypatch.setattr(image_to_text, "_STEP_NS", 0)  # a token a step
    images = [served.image(*each) for each in served.given]
    found: dict[int, list[int]] = {}
    num_steps = 0
    while len(found) < len(images):
        num_steps += 1
        here = [place for place in range(min(len(images), 1 + num_steps // 3)) if place not in found]
        told = [ExtractTask(max_new_tokens=NUM_TOKENS)] * len(here)
        for place, ids in zip(here, served.runner.advance([images[place] for place in here], told), strict=True):
            assert images[place].is_running == (ids is None)
            if ids is not None:
                found[place] = ids.tolist()
    assert [found[place] for place in range(len(images))] == expected
    assert num_steps > NUM_TOKENS


def test_an_answer_that_left_a_step_begins_again(both: tuple[Served, Answers], monkeypatch: pytest.MonkeyPatch) -> None:
    served, expected = both
    monkeypatch.setattr(image_to_text, "_STEP_NS", 0)
    first, second = (served.image(*each) for each in served.given[:2])
    told = [ExtractTask(max_new_tokens=NUM_TOKENS)]
    served.runner.advance([first, second], told * 2)
    assert served.runner.advance([second], told) == [None]
    assert (first.is_running, second.is_running) == (False, True)
    monkeypatch.undo()
    found = None
    while found is None:
        [found] = served.runner.advance([first], told)
    assert found.tolist() == expected[0]


def test_the_memory_of_an_answer_that_nobody_waits_for_is_freed(
    florence: tuple[Served, Answers], monkeypatch: pytest.MonkeyPatch
) -> None:
    served, _ = florence
    monkeypatch.setattr(image_to_text, "_STEP_NS", 0)
    image = served.image(*served.given[0])
    assert served.runner.advance([image], [ExtractTask(max_new_tokens=NUM_TOKENS)]) == [None]
    assert served.runner._memory is not None
    del image
    gc.collect()
    assert served.runner._memory is None


@pytest.mark.parametrize("num_tokens", [2, 7])
def test_an_answer_is_cut_at_the_most_tokens(florence: tuple[Served, Answers], num_tokens: int) -> None:
    served, expected = florence
    answers = served.run(served.given, num_tokens)
    # The end token takes the last place.
    assert answers == [answer[: num_tokens - (len(answer) >= num_tokens)] for answer in expected]


def test_the_authors_layout_answers_as_the_librarys(
    tmp_path: Path, cache: Path, florence: tuple[Served, Answers]
) -> None:
    """The same weights under the names of the hub, with a tokenizer that has only BART's tokens."""
    by_authors = save_florence(tmp_path / "authors", by_authors=True)
    served = Served(by_authors, cache, FLORENCE_TASKS)
    twin = florence[0]
    assert served.card.max_sequence_length == twin.card.max_sequence_length
    assert served.rule == twin.rule
    library = Tokenizer.load(twin.card)
    for task in FLORENCE_TASKS:
        ours, theirs = (PromptReading(served.rule, task, each) for each in (served.tokenizer, library))
        np.testing.assert_array_equal(ours.prepare(ours.texts)[0][1], theirs.prepare(theirs.texts)[0][1])
    model: Any = served.runner._model
    inner = model.get_input_embeddings().weight.shape[0]
    published = load_file(by_authors / "model.safetensors")
    for name, weight in model.named_parameters():
        own = authors_name(name)
        expected = published[own].T if own == "image_projection" else published[own]
        assert torch.equal(weight, expected), name
    assert inner == served.card.vocab_size == served.tokenizer.backend.get_vocab_size()
    # Its vocabulary lacks the image's token, so its random weights are others: the library gets them from our model.
    image = served.image(*served.given[0])
    pixels = served.runner._pixels([image])
    ids = torch.from_numpy(image.queries[0].astype(np.int64))[None]
    with torch.no_grad():
        seen = model.model.get_image_features(pixels).pooler_output
        embedded = torch.cat([seen, model.get_input_embeddings()(ids)], dim=1)
        encoded = model.model.language_model.encoder(inputs_embeds=embedded)
        settings = transformers.GenerationConfig(
            decoder_start_token_id=2, forced_bos_token_id=0, forced_eos_token_id=2, no_repeat_ngram_size=3,
            eos_token_id=2, pad_token_id=1, bos_token_id=0, max_new_tokens=NUM_TOKENS,
        )  # fmt: skip
        [found] = model.generate(encoder_outputs=encoded, generation_config=settings).tolist()
    answer = found[1:]
    assert served.run([served.given[0]]) == [answer[: answer.index(2)] if 2 in answer else answer]


@pytest.mark.parametrize("save", [save_florence, save_donut])
def test_weights_of_16_bits_are_served(tmp_path: Path, cache: Path, save: Any) -> None:
    tasks = FLORENCE_TASKS if save is save_florence else DONUT_TASKS
    served = Served(save(tmp_path / "half"), cache, tasks, "bfloat16")
    assert served.runner.dtype == "bfloat16"
    assert all(served.run(served.given))


def test_wrong_tokens_and_values_are_errors(florence: tuple[Served, Answers]) -> None:
    served, expected = florence
    image = served.image(*served.given[0])
    image.queries = (np.array([served.card.vocab_size], np.int32),)
    with pytest.raises(BadRequest, match="not in the vocabulary"):
        served.runner.advance([image], [ExtractTask(max_new_tokens=3)])
    head = served.runner._model.lm_head
    kept = head.weight
    head.weight = torch.nn.Parameter(torch.full_like(kept, torch.nan), requires_grad=False)
    assert isinstance(served.find(served.given[:1])[0], NonFinite)
    head.weight = kept
    assert served.run(served.given[:1]) == expected[:1]


def test_an_answer_that_is_not_finite_ends_no_other(
    florence: tuple[Served, Answers], monkeypatch: pytest.MonkeyPatch
) -> None:
    served, expected = florence
    step = served.runner._decoder.step

    def spoiled(memory: Any, tokens: list[int], places: list[int]) -> torch.Tensor:
        logits = step(memory, tokens, places)
        if len(tokens) == len(served.given):
            logits[1] = torch.nan
        return logits

    monkeypatch.setattr(served.runner._decoder, "step", spoiled)
    found = served.find(served.given)
    assert isinstance(found[1], NonFinite)
    assert [found[place].tolist() for place in (0, 2, 3)] == [expected[place] for place in (0, 2, 3)]


def test_after_want_of_memory_fewer_answers_are_held_at_once(
    florence: tuple[Served, Answers], monkeypatch: pytest.MonkeyPatch
) -> None:
    served, expected = florence
    step, held = served.runner._decoder.step, []

    def little_memory(memory: Any, tokens: list[int], places: list[int]) -> torch.Tensor:
        if len(tokens) > 3:
            raise MemoryError
        held.append(len(tokens))
        return step(memory, tokens, places)

    monkeypatch.setattr(served.runner._decoder, "step", little_memory)
    monkeypatch.setattr(served.runner, "_ceiling", None)
    with pytest.raises(MemoryError):
        served.run(served.given)
    assert served.run(served.given) == expected
    assert max(held) == 2
    monkeypatch.setattr(served.runner, "_ceiling", None)


def rows_of(picture: Image.Image, card: ModelCard) -> NDArray[np.uint8]:
    assert card.image is not None
    return prepare_image(picture, card.image)


@pytest.mark.parametrize("size", [(40, 70), (90, 55), (64, 64), (500, 300), (30, 100), (96, 64), (3, 300), (1, 1)])
def test_a_framed_image_has_the_bytes_of_the_library(donut: tuple[Served, Answers], size: tuple[int, int]) -> None:
    random = np.random.default_rng(sum(size))
    picture = Image.fromarray(random.integers(0, 256, (*size, 3), np.uint8))
    ours = rows_of(picture, donut[0].card)
    is_sliver = max(size) > 5 * min(size)
    if is_sliver:
        assert ours.shape == (96, 64, 3)
        return
    processor: Any = transformers.DonutImageProcessorPil.from_pretrained(donut[0].card.directory)
    theirs = processor(picture, do_rescale=False, do_normalize=False, return_tensors="np").pixel_values[0]
    np.testing.assert_array_equal(ours, theirs.transpose(1, 2, 0).astype(np.uint8))
