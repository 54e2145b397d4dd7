"""Knows the tasks of Donut: the prompt of each, and the fields in its answer.

An answer is text with tags: `<s_menu><s_nm>Tea</s_nm></s_menu>`, with `<sep/>` between the values of a list. Source:
transformers 5.23 processing_donut.py, token2json; SIE API reference, section 19, for the fields of an answer.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Final, TypeAlias

from sie.values.errors import BadRequest
from sie.values.extract import Entity, Extraction

TASKS: Final = ("<s_cord-v2>", "<s_docvqa>", "<s_rvlcdip>")
"""Those of the authors' checkpoints; a request without a task gets the first that the checkpoint has."""
_QUESTION: Final = "<s_docvqa>"
_CLASS: Final = "<s_rvlcdip>"
_BEFORE_ANSWER: Final = "<s_answer>"
_TASK: Final = re.compile(r"<s_[^<>\s]+>")
_MAX_DEPTH: Final = 32
_Field: TypeAlias = "str | Mapping[str, _Field] | Sequence[_Field]"
_SEPARATOR: Final = "<sep/>"
_NEXT: Final = re.compile(r"\s*<sep/>")


def check_task(model_id: str, name: str | None) -> None:
    """Raise BadRequest for a task that is not one tag of the form `<s_name>`."""
    if name is not None and not _TASK.fullmatch(name):
        raise BadRequest(f"Model '{model_id}' has no task {name!r}, as in {TASKS[0]!r} - at `$.params.options.task`")


def prompt_of(name: str, instruction: str | None) -> str:
    """Return the prompt of a task. Raises BadRequest for a question that is missing, or that no answer follows."""
    has_text = bool(instruction and instruction.strip())
    if has_text != (name == _QUESTION):
        does = "takes no instruction" if has_text else "needs an instruction"
        raise BadRequest(f"Task {name!r} {does} - at `$.params.instruction`")
    if not has_text or instruction is None:
        return name
    return f"{name}<s_question>{instruction.strip()}</s_question>{_BEFORE_ANSWER}"


def read_answer(name: str, text: str, added: Collection[str]) -> Extraction:
    """Return the fields of an answer, each with its path as label; added are the tokenizer's added tokens."""
    fields = _read((_BEFORE_ANSWER if name == _QUESTION else "") + text, added, 0)
    found = _leaves(fields, "") if fields else [("text_sequence", text.strip())]
    labels = {"class": "document_class"} if name == _CLASS else {}
    return Extraction(entities=[Entity(labels.get(path, path), text=value) for path, value in found])


def _read(text: str, added: Collection[str], depth: int) -> Sequence[Mapping[str, _Field]]:
    """Return the fields of a text: one object, or several with separators between them."""
    objects: list[dict[str, _Field]] = []
    fields: dict[str, _Field] = {}
    at = 0
    while (start := text.find("<s_", at)) >= 0 and (end := text.find(">", start)) >= 0:
        name = text[start + len("<s_") : end]
        tag = f"</s_{name}>"
        close = text.find(tag, end + 1)
        if close < 0:
            at, text = start, text[:start] + text[start:].replace(f"<s_{name}>", "")
            continue
        value = _value(text[end + 1 : close].strip(), added, depth)
        if value:
            fields[name] = value[0] if len(value) == 1 else value
        at = close + len(tag)
        if (separator := _NEXT.match(text, at)) is not None:
            at = separator.end()
            objects.append(fields)
            fields = {}
    return [*objects, *([fields] if fields else [])]


def _value(content: str, added: Collection[str], depth: int) -> Sequence[_Field]:
    """Return the values between two tags: texts, or objects if there are tags inside."""
    if depth < _MAX_DEPTH and "<s_" in content and "</s_" in content:
        return _read(content, added, depth + 1)
    return [_leaf(leaf.strip(), added) for leaf in content.split(_SEPARATOR)]


def _leaf(leaf: str, added: Collection[str]) -> str:
    """Return a value; a class is one token such as `<invoice/>`."""
    return leaf[1:-2] if leaf.startswith("<") and leaf.endswith("/>") and leaf in added else leaf


def _leaves(value: _Field, path: str) -> Iterator[tuple[str, str]]:
    """Yield each text with its path, such as `menu[0].nm`. A list of one value is that value."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, Mapping):
        for name, own in value.items():
            yield from _leaves(own, f"{path}.{name}" if path else name)
    elif not path and len(value) == 1:
        yield from _leaves(value[0], path)
    else:
        for index, own in enumerate(value):
            yield from _leaves(own, f"{path}[{index}]")
