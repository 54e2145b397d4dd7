"""Defines the tree of settings, and loads it from file, environment and flags.

A key `max_body_bytes` of the section `limits` is the flag `--max-body-bytes`, the variable `SIE_MAX_BODY_BYTES`, the
TOML key `max_body_bytes` under `[limits]` and a row of docs/settings.md. Names are unique in the whole tree. Order:
default < file < environment < flag. An unknown or bad key stops the start; an unknown variable only warns. No other
module reads the environment, and only a reload changes settings after the start (`sie.config.reloadable`). Never imports
slow modules, because every `sie` command waits for it. `sie.config.sections`, `sie.config.generation_settings`,
`sie.config.agent_settings`, `sie.config.store_settings`, `sie.config.grpc_limits` and `sie.config.limits` define the keys, each in one place; `sie.config.sources` reads the
values.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from sie.config.agent_settings import Agents
from sie.config.cluster_settings import Cluster
from sie.config.generation_settings import Generation
from sie.config.grpc_limits import Grpc
from sie.config.limits import Limits
from sie.config.sections import (  # fmt: skip
    Access,
    Devices,
    Memory,
    Models,
    Scheduler,
    Server,
    Status,
    Supervisor,
    Testing,
    Tracing,
)
from sie.config.sources import (
    CONFIG_VARIABLE,
    ENV_PREFIX,
    Key,
    SettingsError,
    Source,
    describe_key,
    read_environment,
    read_file,
    read_flags,
    unknown_variables,
)
from sie.config.store_settings import Store


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole tree. msgspec can encode it, to send it to a process."""

    server: Server = Server()
    access: Access = Access()
    models: Models = Models()
    devices: Devices = Devices()
    limits: Limits = Limits()
    grpc: Grpc = Grpc()
    memory: Memory = Memory()
    scheduler: Scheduler = Scheduler()
    generation: Generation = Generation()
    agents: Agents = Agents()
    store: Store = Store()
    supervisor: Supervisor = Supervisor()
    status: Status = Status()
    tracing: Tracing = Tracing()
    cluster: Cluster = Cluster()
    testing: Testing = Testing()

    @property
    def store_dir(self) -> str:
        """The directory of the files, skills and sessions of clients."""
        return self.store.store_dir or self.server.state_dir

    @property
    def agent_dir(self) -> Path:
        """The directory below which the agent process has the working directories of sessions."""
        return Path(self.agents.agent_dir or Path(self.server.state_dir, "agents"))


class Loaded(msgspec.Struct, frozen=True):
    """The settings, and the source of each by key name."""

    settings: Settings
    sources: dict[str, Source]
    warnings: tuple[str, ...] = ()
    """Faults that do not stop the start, for the operator to know."""

    def value(self, key: Key) -> Any:
        """Return the value of `key`."""
        return getattr(getattr(self.settings, key.section), key.attribute)


@functools.cache
def all_keys() -> tuple[Key, ...]:
    """Return every setting in the order of the tree."""
    return tuple(
        describe_key(section.name, item)
        for section in msgspec.structs.fields(Settings)
        for item in msgspec.structs.fields(section.type)
    )


def load_settings(config_file: str | None, environ: Mapping[str, str], flags: Mapping[str, Any]) -> Loaded:
    """Return the settings from file, environment and flags together.

    config_file may be None: then `SIE_CONFIG` names it, if set. flags maps key names to texts (lists: a sequence of
    texts) from the command line. Raises SettingsError for the first unknown or wrong value.
    """
    keys = all_keys()
    path = config_file or environ.get(CONFIG_VARIABLE)
    values: dict[str, dict[str, Any]] = {section: {} for section in Settings.__struct_fields__}
    sources = {key.name: Source("default") for key in keys}
    layers = (read_file(keys, path) if path else (), read_environment(keys, environ), read_flags(keys, flags))
    for key, value, source in itertools.chain(*layers):
        values[key.section][key.attribute] = value
        sources[key.name] = source
    for key, directory, source in _system_directories(keys, environ):
        if not values[key.section].get(key.attribute):
            values[key.section][key.attribute] = directory
            sources[key.name] = source
    sections = {section.name: section.type(**values[section.name]) for section in msgspec.structs.fields(Settings)}
    settings = Settings(**sections)
    _check_together(settings, sources)
    return Loaded(settings, sources, tuple(unknown_variables(keys, environ)))


def default_settings(environ: Mapping[str, str]) -> Settings:
    """Return this host's defaults: only the variables that name the system's directories count."""
    system = {name: value for name, value in environ.items() if not name.startswith(ENV_PREFIX)}
    return load_settings(None, system, {}).settings


def _system_directories(keys: tuple[Key, ...], environ: Mapping[str, str]) -> Iterator[tuple[Key, str, Source]]:
    """Yield the default of each directory setting; systemd's variables may contain several, colon-separated.

    The last fallback for runtime_dir is in a directory that every user may write to. The code that creates it must
    refuse one with another owner.
    """
    by_name = {key.name: key for key in keys}
    shared = Path(environ.get("TMPDIR") or "/tmp")  # noqa: S108  # the system's own name for it
    home = Path(environ.get("HOME") or "/")
    for name, systemd, user, fallback in (
        ("runtime_dir", "RUNTIME_DIRECTORY", "XDG_RUNTIME_DIR", shared / f"sie-{os.getuid()}"),
        ("cache_dir", "CACHE_DIRECTORY", "XDG_CACHE_HOME", home / ".cache/sie"),
        ("state_dir", "STATE_DIRECTORY", "XDG_STATE_HOME", home / ".local/state/sie"),
    ):
        if environ.get(systemd):
            yield by_name[name], environ[systemd].split(":")[0], Source("default", systemd)
        elif environ.get(user):
            yield by_name[name], f"{environ[user]}/sie", Source("default", user)
        else:
            yield by_name[name], str(fallback), Source("default")


def _check_together(settings: Settings, sources: Mapping[str, Source]) -> None:
    """Raise SettingsError for values that are allowed alone but not together."""
    memory, limits, access = settings.memory, settings.limits, settings.access
    smallest = min(memory.request_segment_bytes, memory.reply_segment_bytes)
    problems = (
        ("ring_capacity", memory.ring_capacity & (memory.ring_capacity - 1) != 0, "must be a power of two"),
        ("large_extent_bytes", memory.large_extent_bytes > smallest, f"must fit into every segment ({smallest} bytes)"),
        (
            "max_item_text_bytes",
            limits.max_item_text_bytes > limits.max_body_bytes,
            f"must not be over max_body_bytes ({limits.max_body_bytes})",
        ),
        ("tls_cert", bool(access.tls_cert) and not access.tls_key, "needs tls_key beside it"),
        ("tls_key", bool(access.tls_key) and not access.tls_cert, "needs tls_cert beside it"),
        ("tls_client_ca", bool(access.tls_client_ca) and not access.tls_cert, "needs tls_cert and tls_key beside it"),
        ("uds", bool(access.uds) and bool(access.tls_cert), "a Unix socket takes no TLS; leave tls_cert out"),
        ("failpoints", bool(settings.testing.failpoints) and not settings.testing.test, "are refused without `test`"),
        (
            "max_queued_images",
            limits.max_queued_images < limits.max_images,
            f"must not be under max_images ({limits.max_images}), or such a request would never be taken",
        ),
    )
    for name, is_wrong, reason in problems:
        if is_wrong:
            raise SettingsError(f"{name} (from {sources[name]}): {reason}")
