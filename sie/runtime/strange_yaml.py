"""Reads YAML that strangers write: bounded in its cost, and every fault of it is a ValueError."""

from __future__ import annotations

from typing import Final

import yaml

_MAX_DEPTH: Final = 64


def read_strange_yaml(data: bytes) -> object:
    """Return the value of a small text of YAML. Blocks. Raises ValueError with the reason.

    Aliases are refused, because a few merge keys with them make gigabytes. Nesting is bounded: the library's time grows
    with its square. The caller bounds the length.
    """
    try:
        text = data.decode()
        _check_form(text)
        return yaml.safe_load(text)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(" ".join(str(error).split())) from None
    except (AttributeError, IndexError, KeyError, TypeError, OverflowError) as error:  # the library does not check them
        raise ValueError(f"a value is not of the type that its tag names: {error}") from None


def _check_form(text: str) -> None:
    depth = 0
    for event in yaml.parse(text, yaml.SafeLoader):
        if isinstance(event, yaml.AliasEvent):
            raise yaml.YAMLError("it has aliases (`*name`), which are not read")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _MAX_DEPTH:
            raise yaml.YAMLError(f"its values are nested deeper than {_MAX_DEPTH} levels")
