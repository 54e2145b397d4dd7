"""Builds the card of a stub model, and counts its tokens.

A stub's requests take the same path as real ones, but its outputs have no meaning. It exists for measurements and
tests. H(x) is SHAKE-256 of x, and `text` is the UTF-8 of the text:

    dense        value i = int8(H(text)[i]) / 127
    sparse       16 little-endian uint32 from H("sparse" text), modulo the width, are the indices: without duplicates,
                 ascending; the value at index i = (1 + i modulo 127) / 127
    multivector  one row a token; row r has value i = int8(H(r as uint32, little-endian, then text)[i]) / 127,
                 then divided by its length unless the request turns normalising off
    score        the first three bytes, little-endian, of H(pair) over 2**24: exact in float32; the pair is the length
                 of the query's UTF-8 as uint32, little-endian, then the query and the document
    extract      D = H("extract" w) for each word w, a run of characters without white space. The word is an entity if
                 D[0] < 128. Its label is number D[1] modulo their count (`word` without labels). Its score is the bytes
                 D[2:5], little-endian, over 2**24. Each label is also a classification, best first; its score is the
                 first three bytes of H("class" label 0x00 text), in the same form. Results under the threshold are
                 left out
    image        height and width as uint32, little-endian, then the bytes of the upright RGB rows in the image's own
                 size replace the text's UTF-8; for an item of several images, those of all, in order. An image costs a
                 token for each 16 by 16 pixel square, partial ones included. Extraction gives one object for each label
                 (`object` without labels), best first. With D = H("object" label 0x00 image) its score is D[0:3] over
                 2**24. Its box is x = D[3:5] modulo the width, y = D[5:7] modulo the height, a width of 1 + D[7:9]
                 modulo the remaining width, and a height of 1 + D[9:11] modulo the remaining height, all little-endian

    tensor       input INPUTn, of any datatype and shape, becomes output OUTPUTn; such a stub accepts only tensors. A
                 token is a KiB
    generate     a token is one byte of the UTF-8; 256, written `<|end|>`, ends a text; such a stub only generates.
                 Choice c of a prompt of n tokens continues it with the prompt's tokens c, c + 1, ..., each modulo n. It
                 ends after n tokens, or continues if the end is ignored. Let x be the next token by this rule; token
                 (x + r) modulo 257 has the probability 2**-(r + 1). At every temperature the likeliest token that a
                 bias and a grammar allow is chosen. A grammar of any kind is the answer itself; a blank one does not
                 compile. A scripted stub answers with the texts that the last user's message holds in `[[ ]]`: with the
                 first one, after each further turn of the assistant with the next one, and with the last one again. In
                 a text, `{result}` is the latest tool result. Its calls are between `<tool_call>` tags, and it follows
                 no grammar

Values are float32. Queries and documents are treated alike. Options that lower the token limit cut the UTF-8 to four
bytes for each allowed token. A text over `max_tokens` is reported as cut, costs at most `max_tokens`, and is refused if
the request asks for it, as with a real model. But its values come from the whole text; only extraction uses its first
bytes. With an adapter, `text` is "lora", the adapter's id in UTF-8, a zero byte and then the text's own bytes. The
number of rows of a multivector follows from this text too.
"""

from __future__ import annotations

import functools
import re
from typing import Final

from sie.catalog.spec import ModelSpec
from sie.values.card import ImageRule, ModelCard, StubOptions
from sie.values.errors import BadRequest
from sie.values.extract import StubExtract
from sie.values.generate import GenerateRule
from sie.values.output_kinds import KINDS
from sie.values.tensor import TensorRule, TensorSpec

BYTES_PER_TOKEN = 4
END_OF_TEXT = 256
"""The token that ends a text of a generating stub; lower tokens are bytes."""
_END_TEXT = "<|end|>"
_SCRIPTED: Final = re.compile(rb"\[\[(.*?)\]\]", re.DOTALL)
_CHAT_TEMPLATE = (
    "{% if tools %}tools: {{ tools | tojson }}\n{% endif %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content or '' }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def stub_card(spec: ModelSpec) -> ModelCard:
    """Return the card of a stub. Raises BadRequest when the spec is not one."""
    if spec.stub is None:
        raise BadRequest(f"model {spec.id!r} is not a stub")
    if spec.stub.tensor:
        return ModelCard(id=spec.id, kind="stub", architecture="stub", inputs=("tensor",), outputs=(), stub=spec.stub,
                         tensor=_stub_rule(spec.id))  # fmt: skip
    if spec.stub.generate:
        return _generator_card(spec.id, spec.stub)
    widths = {"dense": spec.stub.dense, **spec.stub.widths}
    flags = {"score": spec.stub.score, "extract": spec.stub.extract}
    dims = {output: width for output, width in widths.items() if width}
    return ModelCard(
        id=spec.id,
        kind="stub",
        architecture="stub",
        inputs=("text", "image") if spec.stub.image else ("text",),
        image=ImageRule() if spec.stub.image else None,
        outputs=(*dims, *(output for output, wanted in flags.items() if wanted)),
        dims=dims,
        similarity=KINDS[next(iter(dims))].similarity,
        max_sequence_length=spec.stub.max_tokens,
        matryoshka=True,
        stub=spec.stub,
        extract=StubExtract() if spec.stub.extract else None,
    )


def _generator_card(name: str, stub: StubOptions) -> ModelCard:
    rule = GenerateRule(
        context_length=stub.max_tokens,
        eos_token_ids=(END_OF_TEXT,),
        chat_template=_CHAT_TEMPLATE,
        special_tokens={"eos_token": _END_TEXT},
        special_texts=(_END_TEXT,),
        tool_format="hermes" if stub.scripted else "json",
    )
    return ModelCard(
        id=name, kind="stub", architecture="stub", outputs=("generate",), max_sequence_length=stub.max_tokens,
        vocab_size=END_OF_TEXT + 1, stub=stub, generate=rule,
    )  # fmt: skip


@functools.lru_cache(maxsize=64)
def scripted_answer(prompt: bytes) -> bytes:
    """Return what a scripted stub answers to a prompt."""
    _, _, turns = (b"\n" + prompt).rpartition(b"\nuser: ")
    said, *later = turns.split(b"\nassistant: ")
    texts = _SCRIPTED.findall(said) or [b"done"]
    answer = texts[min(len(later) - 1, len(texts) - 1)]
    return answer.replace(b"{result}", turns.rpartition(b"\ntool: ")[2].partition(b"\nassistant: ")[0])


def _stub_rule(name: str) -> TensorRule:
    """Return the tensor rule that a stub shows: only its first input, in the simplest form."""
    config = {
        "name": name,
        "platform": "stub",
        "max_batch_size": 0,
        "input": [{"name": "INPUT0", "data_type": "TYPE_FP32", "dims": [-1]}],
        "output": [{"name": "OUTPUT0", "data_type": "TYPE_FP32", "dims": [-1]}],
    }
    return TensorRule(
        name=name, version="1", platform="stub", config=config,
        inputs=(TensorSpec(name="INPUT0", datatype="FP32", shape=(-1,)),),
        outputs=(TensorSpec(name="OUTPUT0", datatype="FP32", shape=(-1,)),),
    )  # fmt: skip


def count_stub_tokens(num_bytes: int, max_tokens: int) -> int:
    """Return the token cost of num_bytes of UTF-8: one for each four bytes, rounded up, from 1 to max_tokens."""
    return min(max(1, -(-num_bytes // BYTES_PER_TOKEN)), max_tokens)


def adapted_text(text: bytes, lora: str) -> bytes:
    """Return the bytes that represent a text under an adapter."""
    return b"lora" + lora.encode() + b"\0" + text
