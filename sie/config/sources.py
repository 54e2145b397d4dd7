"""Reads the values of settings from a TOML file, from environment variables and from flags.

Contains no setting's name: `sie.config.settings` passes the keys. An unknown or wrong value raises SettingsError, whose
message has the place, the value and the expected value. An unknown variable only warns, because it may belong to a
client on the same host.
"""

from __future__ import annotations

import contextlib
import difflib
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Meta
from msgspec.structs import FieldInfo

ENV_PREFIX = "SIE_"
CONFIG_VARIABLE = "SIE_CONFIG"
"""Names the TOML file when `--config` does not."""
URL_VARIABLE = "SIE_URL"
"""Names the server for client commands."""
KEY_VARIABLE = "SIE_API_KEY"
"""Has the key of client commands. It protects no server: `api_keys` does."""


class SettingsError(Exception):
    """A setting that stops the start; the message names its source, the key and the reason."""


class Key(msgspec.Struct, frozen=True):
    """One setting, with the data for flags, variables, TOML and documentation."""

    section: str
    attribute: str
    name: str
    annotation: Any
    default: Any
    doc: str
    expects: str
    """The expected value, in words that follow "not": `an integer from 0 to 65535`."""
    form: str = ""
    """The form of a structured text: `auto, cpu, cpu:N, ...`."""
    known_as: str = ""
    """The variable's name in other servers of an API; its wrong values are ignored, as those servers do."""

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return ENV_PREFIX + self.name.upper()

    @property
    def is_list(self) -> bool:
        return isinstance(self.default, tuple)


class Source(msgspec.Struct, frozen=True):
    """The source of a value; name is the file, variable or flag. A default's name is the source it follows, if any."""

    kind: Literal["default", "file", "environment", "flag"]
    name: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.name}".rstrip()


Keys = tuple[Key, ...]
Found = Iterator[tuple[Key, Any, Source]]


def describe_key(section: str, item: FieldInfo) -> Key:
    """Return the key declared by the field `item` of the struct for `section`.

    Its type is `Annotated[type, Meta(description=...)]`. `extra={"form": ...}` describes in words the values that a
    pattern accepts, and `"known_as"` names another variable.
    """
    plain: Any
    meta: Meta
    plain, meta = typing.get_args(item.type)
    form: str = (meta.extra or {}).get("form", "")
    return Key(
        section=section,
        attribute=item.name,
        name=item.encode_name,
        annotation=item.type,
        default=item.default,
        doc=meta.description or "",
        expects=form or _expected(plain, meta),
        form=form,
        known_as=(meta.extra or {}).get("known_as", ""),
    )


def read_file(keys: Keys, path: str) -> Found:
    """Yield the values in the TOML file at `path`, in its order."""
    known = {(key.section, key.name): key for key in keys}
    sections = list(dict.fromkeys(key.section for key in keys))
    for section, table in read_toml(path).items():
        if section not in sections:
            home = next((key.section for key in keys if key.name == section), None)
            hint = f"; it belongs under [{home}]" if home else did_you_mean(section, sections)
            raise SettingsError(f"{path}: {section}: unknown section{hint}")
        if not isinstance(table, dict):
            raise SettingsError(f"{path}: {section}: a section, written [{section}], is expected")
        for name, raw in typing.cast("dict[str, Any]", table).items():
            key = known.get((section, name))
            if key is None:
                raise SettingsError(f"{path}: [{section}] {name}: unknown key{_hint_for_key(keys, section, name)}")
            yield key, _convert(key, raw, f"{path}: [{section}] {name}", from_text=False), Source("file", path)


def _hint_for_key(keys: Keys, section: str, name: str) -> str:
    home = next((key.section for key in keys if key.name == name), None)
    if home is not None:
        return f"; it belongs under [{home}]"
    return did_you_mean(name, [key.name for key in keys if key.section == section])


def read_toml(path: str) -> dict[str, Any]:
    """Return the tables of a TOML file. Raises SettingsError, with the path, if it cannot be read."""
    import tomllib  # imported here, so that only users of a file load the parser

    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise SettingsError(f"{path}: is not UTF-8 text") from None
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"{path}: is not TOML: {error}") from None


def read_environment(keys: Keys, environ: Mapping[str, str]) -> Found:
    """Yield the values of the `known_as` variables, then of `SIE_*` variables; white space separates a list."""
    for key in keys:
        if key.known_as in environ:
            with contextlib.suppress(SettingsError):
                value = _convert(key, environ[key.known_as], key.known_as, from_text=True)
                yield key, value, Source("environment", key.known_as)
    known = {key.variable: key for key in keys}
    for variable in sorted(environ.keys() & known.keys()):
        key, text = known[variable], environ[variable]
        raw = text.split() if key.is_list else text
        yield key, _convert(key, raw, f"environment: {variable}", from_text=True), Source("environment", variable)


def unknown_variables(keys: Keys, environ: Mapping[str, str]) -> Iterator[str]:
    """Yield a warning for each `SIE_*` variable that neither a setting nor a client command reads."""
    known = [*(key.variable for key in keys), CONFIG_VARIABLE]
    for variable in sorted(environ.keys() - {*known, URL_VARIABLE, KEY_VARIABLE}):
        if variable.startswith(ENV_PREFIX):
            hint = did_you_mean(variable, known, prefix=ENV_PREFIX)
            yield f"environment: {variable}: unknown variable{hint}"


def read_flags(keys: Keys, flags: Mapping[str, Any]) -> Found:
    """Yield the values of flags; flags maps key names to a text or, for a list, a sequence of texts."""
    known = {key.name: key for key in keys}
    for name, raw in flags.items():
        key = known.get(name)
        if key is None:
            flag = "--" + name.replace("_", "-")
            raise SettingsError(f"{flag}: unknown flag{did_you_mean(flag, [key.flag for key in known.values()])}")
        yield key, _convert(key, raw, key.flag, from_text=True), Source("flag", key.flag)


def _expected(plain: Any, meta: Meta) -> str:
    if typing.get_origin(plain) is Literal:
        return "one of " + ", ".join(typing.get_args(plain))
    if plain in (int, float):
        kind = (
            "a number" if plain is float else f"a multiple of {meta.multiple_of}" if meta.multiple_of else "an integer"
        )
        return f"{kind} from {meta.ge} to {meta.le}"
    if plain is bool:
        return "true or false"
    if meta.min_length:
        return "a text of at least one character"
    return f"a text of at most {meta.max_length} characters" if meta.max_length else "a text"


def is_utf8(text: str) -> bool:
    """Return whether a text of the command line or the environment was UTF-8. Python stands in for other bytes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _convert(key: Key, raw: Any, where: str, *, from_text: bool) -> Any:
    if from_text and not isinstance(raw, bool) and not is_utf8(raw if isinstance(raw, str) else "".join(raw)):
        raise SettingsError(f"{where}: {raw!r} is not UTF-8 text")
    try:
        value = msgspec.convert(raw, key.annotation, strict=not from_text)
    except msgspec.ValidationError:
        shown = raw if isinstance(raw, str) else msgspec.json.encode(raw, enc_hook=str).decode()
        raise SettingsError(f"{where}: {shown!r} is not {key.expects}") from None
    if any("\0" in text for text in (value if key.is_list else [value]) if isinstance(text, str)):
        raise SettingsError(f"{where}: {raw!r} has a null character")
    return value


def did_you_mean(wrong: str, known: Sequence[str], *, prefix: str = "") -> str:
    """Return `; did you mean X?` for the nearest name in `known`, or empty without a near name.

    prefix is shared by all names and is ignored in the comparison.
    """
    names = [name.removeprefix(prefix) for name in known]
    near = difflib.get_close_matches(wrong.removeprefix(prefix), names, n=1, cutoff=0.6)
    return f"; did you mean {prefix}{near[0]}?" if near else ""
