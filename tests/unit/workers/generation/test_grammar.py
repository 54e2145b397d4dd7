"""Grammars bind a model's output, for any weights: a tiny GGUF model of bytes."""

from __future__ import annotations

import json

import numpy as np
import pytest

from sie.catalog.gguf_file import read_gguf_card
from sie.config.generation_settings import Generation
from sie.values.card import ModelCard
from sie.values.errors import BadRequest
from sie.values.generate import GenerateRule, Sampling
from sie.workers.generation.grammar import GrammarCompiler
from sie.workers.loading.loader import load_generator
from sie.workers.model_api import Draw
from tests.generation_models import Stream
from tests.gguf_models import EOS, write_tiny_llama
from tests.unit.tiny_tokenizers import byte_level
from tests.unit.workers.generation_rig import EngineRig


@pytest.fixture(scope="module")
def runner(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    path = write_tiny_llama(folder / "tiny.gguf")
    card = read_gguf_card("tiny", str(path), str(folder))
    return load_generator(card, "cpu", "float32", Generation(kv_block_tokens=8), lambda *_: None)


def constrained(runner, kind, grammar, **sampling):
    """Return the text that a grammar leads an answer to, which must end by itself."""
    matcher = runner.compile_grammar(kind, grammar)
    stream = Stream([5, 6, 7], range(16))
    while not matcher.is_complete:
        assert len(stream.answer) < 100
        draw = Draw(Sampling(**sampling), 0, len(stream.tokens), forbidden=(EOS,), matcher=matcher)
        slot = stream.next_slot()
        stream.num_read = len(stream.tokens)
        chosen = runner.run_step([slot._replace(draws=(draw,))])[0][0].token_id
        matcher.consume(chosen)
        stream.tokens.append(chosen)
    merged = {258: b"th", 259: b"er", EOS: b""}
    return b"".join(merged.get(token, bytes([token % 256])) for token in stream.answer).decode()


@pytest.mark.parametrize("seed", range(3))
def test_a_schema_leads_to_json_that_follows_it(runner, seed):
    schema = {
        "type": "object", "properties": {"age": {"type": "integer", "maximum": 99}, "ok": {"type": "boolean"}},
        "required": ["age", "ok"], "additionalProperties": False,
    }  # fmt: skip
    found = json.loads(constrained(runner, "json_schema", json.dumps(schema), seed=seed))
    assert isinstance(found["age"], int)
    assert isinstance(found["ok"], bool)


def test_white_space_in_json_comes_to_an_end(runner):
    def allows(text):
        matcher = runner.compile_grammar("json_schema", '{"type": "array", "items": {"type": "integer"}}')
        words = np.zeros(9, np.int32)
        for byte in text.encode():
            matcher.fill_mask(words)
            if not words[byte >> 5] >> (byte & 31) & 1:
                return False
            matcher.consume(byte)
        return True

    assert allows("[1, 2]")
    assert allows("[\n    1,\n    2\n]")
    assert not allows("[  1")
    assert not allows("[\n\n")


def test_every_other_kind_binds_every_token(runner):
    assert constrained(runner, "regex", "(yes|no){2}", seed=2) in {"yesyes", "yesno", "noyes", "nono"}
    lark = 'start: "a" DIGIT\nDIGIT: /[0-4]/'
    assert constrained(runner, "lark", lark, temperature=0.0) in {"a0", "a1", "a2", "a3", "a4"}
    both = json.dumps({"grammars": [{"lark_grammar": lark}]})
    assert constrained(runner, "llguidance", both, temperature=0.0)[0] == "a"


@pytest.mark.parametrize(
    ("kind", "grammar"),
    [
        ("regex", "a("),
        ("json_schema", "{"),
        ("json_schema", '{"type": "foo"}'),
        ("lark", "start: nothing"),
        ("xml", "<a/>"),
    ],
)
def test_a_malformed_grammar_is_the_clients_mistake(runner, kind, grammar):
    with pytest.raises(BadRequest, match="grammar"):
        runner.compile_grammar(kind, grammar)


def test_a_grammar_that_allows_no_text_is_the_clients_mistake(runner):
    matcher = runner.compile_grammar("regex", r"[^\s\S]")
    with pytest.raises(BadRequest, match=r"grammar: no token can follow$") as refused:
        matcher.fill_mask(np.zeros(9, np.int32))
    assert refused.value.extras == {"param": "grammar"}  # the frontend puts the client's own field in its place


def test_matchers_of_one_grammar_go_their_own_ways(runner):
    first = runner.compile_grammar("regex", "ab|cd")
    other = first.fork()
    first.consume(ord("a"))
    other.consume(ord("c"))
    third = other.fork()
    for matcher, byte in ((first, "b"), (other, "d"), (third, "d")):
        assert not matcher.is_complete
        matcher.consume(ord(byte))
        assert matcher.is_complete


def test_behind_a_complete_text_only_its_end_is_allowed(runner):
    matcher = runner.compile_grammar("regex", "a")
    assert not matcher.is_complete
    matcher.consume(ord("a"))
    assert matcher.is_complete
    draw = Draw(Sampling(), 0, 4, forbidden=(EOS,), matcher=matcher)
    assert runner.run_step([Stream([5, 6, 7], [0]).next_slot()._replace(draws=(draw,))])[0][0].token_id == EOS


def test_a_grammar_that_grows_too_large_on_the_way_is_the_clients_mistake(runner):
    rig = EngineRig(runner=runner)
    refused = rig.submit(b"abc", grammar_kind="regex", grammar="((a{300}){300}){300}b", max_tokens=20)
    other = rig.submit(b"abc", grammar_kind="regex", grammar="[ab]{9}", max_tokens=20)
    rig.run()
    assert isinstance(refused.error, BadRequest)
    assert "grammar: lexer error: too many" in str(refused.error)
    assert (len(other.tokens[0]), other.finish) == (9, ["stop"])
    rig.assert_all_given_back()


def test_a_text_with_too_many_readings_is_the_clients_mistake(runner):
    letters = " | ".join(f'"{letter}"' for letter in "abcdefghijklmnopqrstuvwxyz")
    text = f'start: s\ns: s s s | s s | t\nt: t t | s s | {letters} | ""'
    matcher = runner.compile_grammar("lark", text)
    allowed = np.empty(-(-runner.vocab_size // 32), np.int32)

    def follow():
        for _ in range(50):
            matcher.fill_mask(allowed)
            matcher.consume(ord("a"))

    with pytest.raises(BadRequest, match="grammar: parser error: Too many items"):
        follow()


def test_an_object_of_many_optional_properties_is_followed(runner):
    properties = {f"p{number}": {"type": "string"} for number in range(495)}
    schema = {"type": "object", "properties": properties, "additionalProperties": {"type": "string"}}
    matcher = runner.compile_grammar("json_schema", json.dumps(schema))
    allowed = np.empty(-(-runner.vocab_size // 32), np.int32)
    for byte in b'{"p494":"a","p':
        matcher.fill_mask(allowed)
        matcher.consume(byte)
    matcher.fill_mask(allowed)


def drive(matcher, tokenizer, *texts):
    """Have a matcher follow tokens by their texts, each of which its mask must allow."""
    for text in texts:
        token_id = tokenizer.token_to_id(text)
        assert is_allowed(matcher, tokenizer, text), text
        matcher.consume(token_id)


def is_allowed(matcher, tokenizer, text):
    words = np.zeros(-(-tokenizer.get_vocab_size() // 32), np.int32)
    matcher.fill_mask(words)
    both = np.zeros((2, len(words)), np.int32)
    assert matcher.fill_masks([matcher, matcher.fork()], both) == [None, None]
    assert (both == words).all()
    token_id = tokenizer.token_to_id(text)
    return bool(words[token_id >> 5] >> (token_id & 31) & 1)


@pytest.fixture(scope="module")
def tagged(tmp_path_factory):
    """Return a tokenizer that has the tag of a call as a token, and what compiles grammars over it."""
    tokenizer = byte_level()
    file = tmp_path_factory.mktemp("tagged") / "tokenizer.json"
    tokenizer.save(str(file))
    rule = GenerateRule(context_length=64, eos_token_ids=(tokenizer.token_to_id("<s>"),))
    compiler = GrammarCompiler(ModelCard(id="tagged", kind="generator", tokenizer_file=str(file), generate=rule))
    return tokenizer, lambda text: compiler.compile("lark", f"%llguidance {{}}\n{text}", tokenizer.get_vocab_size())


@pytest.mark.parametrize("pieces", [("<tool_call>",), tuple("<tool_call>")])
@pytest.mark.parametrize("before", ['"<tool_call>"', 'head\nhead[lazy]: TEXT "<tool_call>"\nTEXT: /(.|\\n)*/'])
def test_a_tag_is_text_whether_it_is_one_token_or_many(tagged, before, pieces):
    tokenizer, compile_lark = tagged
    matcher = compile_lark(f'start: start_of "{{}}"\nstart_of: {before}')
    drive(matcher, tokenizer, *pieces, "{")
    assert not is_allowed(matcher, tokenizer, "<tool_call>")
    drive(matcher, tokenizer, "}")
    assert matcher.is_complete


def test_the_text_of_a_special_token_is_never_that_token(tagged):
    tokenizer, compile_lark = tagged
    matcher = compile_lark('start: "<|im_end|>!"')
    written = ""
    while not matcher.is_complete:
        text = next(text for text in sorted(tokenizer.get_vocab()) if is_allowed(matcher, tokenizer, text))
        drive(matcher, tokenizer, text)
        assert text != "<|im_end|>"
        written += text
    assert written == "<|im_end|>!"
    matcher = compile_lark("start: <|im_end|> /a/")
    drive(matcher, tokenizer, "<|im_end|>", "a")
    assert is_allowed(compile_lark('start: <s> "a"'), tokenizer, "<s>")  # which ends the answer there


def test_preempted_json_is_the_json_of_a_model_that_has_room(runner, monkeypatch):
    schema = {
        "type": "array",
        "items": {"type": "integer", "minimum": 100, "maximum": 999},
        "minItems": 9,
        "maxItems": 9,
    }
    prompts = [bytes(range(first, first + 11)) for first in (5, 40, 90, 140)]
    task = {"grammar_kind": "json_schema", "grammar": json.dumps(schema), "num_choices": 2, "max_tokens": 100}
    alone = []
    for prompt in prompts:
        rig = EngineRig(runner=runner)
        alone.append(rig.submit(prompt, **task))
        rig.run()
        assert not rig.engine.planner.num_preempted
    monkeypatch.setattr(runner, "num_blocks", 16)
    rig = EngineRig(runner=runner, max_prefill_tokens=13)
    amid = [rig.submit(prompt, **task) for prompt in prompts]
    rig.run()
    assert rig.engine.planner.num_preempted
    for answer, expected in zip(amid, alone, strict=True):
        assert answer.finish == ["stop", "stop"]
        assert answer.tokens == expected.tokens
        for tokens in answer.tokens:
            found = json.loads(bytes(tokens))
            assert len(found) == 9
            assert all(100 <= number <= 999 for number in found)
    rig.assert_all_given_back()
