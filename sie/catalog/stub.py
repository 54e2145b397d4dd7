"""Gives a stub model its card and its token count.

A stub goes the whole path of a request and computes nothing worth having; it exists to measure and to test. With
H(x) = SHAKE-256 of x and `text` the UTF-8 of the text:

    dense        value i = int8(H(text)[i]) / 127
    sparse       16 little-endian uint32 from H("sparse" text), modulo the width: the indices, each once, ascending;
                 the value at index i = (1 + i modulo 127) / 127
    multivector  one row a token; row r has value i = int8(H(r as uint32, little-endian, then text)[i]) / 127,
                 then divided by its length unless the request turns that off
    score        the first three bytes, little-endian, of H(pair) over 2**24: exact in float32; the pair is the length
                 of the query's UTF-8 as uint32, little-endian, then the query and the document
    extract      with D = H("extract" w) for each word w, a run of characters without white space: it is an entity if
                 D[0] < 128, its label is number D[1] modulo their count (`word` if there are none), its score the
                 bytes D[2:5], little-endian, over 2**24; and each label is a classification, best first, its score the
                 same of the first three bytes of H("class" label 0x00 text). What is under the threshold is left out
    image        height and width as uint32, little-endian, then the bytes of the upright RGB rows in the image's own
                 size take the place of the text's UTF-8; an item of several images is all of theirs, in order. It
                 costs a token for each square begun of 16 pixels a side. What is extracted from an image is an object
                 for each label (`object` if there are none), best first: with D = H("object" label 0x00 image) its score
                 is D[0:3] over 2**24, its box x = D[3:5] modulo the width, y = D[5:7] modulo the height, 1 + D[7:9]
                 modulo what is left of the width, 1 + D[9:11] modulo what is left of the height, all little-endian

    tensor       input INPUTn, of any datatype and shape, is output OUTPUTn; nothing else is taken then. A token is a KiB
    generate     a token is one byte of the UTF-8, and 256, written `<|end|>`, ends a text; nothing else is given then. Choice
                 c of a prompt of n tokens continues it with its tokens c, c + 1, ..., each modulo n, and ends after n of
                 them, or goes on where the end is ignored. Where that token may not come (a bias, a grammar), the
                 likeliest does that may: token (x + r) modulo 257 has the probability 2**-(r + 1) where x is the one that should come. Whatever
                 the temperature is, the likeliest comes. A grammar, of whatever kind, is the answer itself; one that
                 is blank does not compile

Values are float32. Queries and documents are alike. Options that lower the limit of tokens cut the UTF-8 at four bytes
for each token left. A text over `max_tokens` is told of as cut, costs no more and is refused where that is asked for, as
with a real model; yet values are those of all of it, and only what is extracted is of its first bytes. With an adapter, `text` is "lora", its id in UTF-8, a zero byte and then the text's own bytes; how
many rows a multivector has follows from that, too.
"""

from __future__ import annotations

from sie.catalog.spec import ModelSpec
from sie.values.card import ImageRule, ModelCard, StubOptions
from sie.values.errors import BadRequest
from sie.values.extract import StubExtract
from sie.values.generate import GenerateRule
from sie.values.tensor import TensorRule, TensorSpec

BYTES_PER_TOKEN = 4
END_OF_TEXT = 256
"""The token that ends a text of a stub that generates; those before it are bytes."""
_END_TEXT = "<|end|>"
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
    widths = {"dense": spec.stub.dense, "sparse": spec.stub.sparse, "multivector": spec.stub.multivector}
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
        similarity="cosine" if spec.stub.dense else "dot" if spec.stub.sparse else "maxsim",
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
    )
    return ModelCard(
        id=name, kind="stub", architecture="stub", outputs=("generate",), max_sequence_length=stub.max_tokens,
        vocab_size=END_OF_TEXT + 1, stub=stub, generate=rule,
    )  # fmt: skip


def _stub_rule(name: str) -> TensorRule:
    """Return what a stub shows of itself: the first of its inputs, in the plainest form that it may have."""
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
    """Return how many tokens a text of num_bytes UTF-8 bytes costs: one for each four begun, 1 to max_tokens."""
    return min(max(1, -(-num_bytes // BYTES_PER_TOKEN)), max_tokens)


def adapted_text(text: bytes, lora: str) -> bytes:
    """Return the UTF-8 that stands for a text under an adapter."""
    return b"lora" + lora.encode() + b"\0" + text
