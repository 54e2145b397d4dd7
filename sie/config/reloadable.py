"""Lists the settings that a running server applies at a reload. The others wait for a restart. Pure."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from sie.config.settings import Settings, all_keys

LIVE: Final = frozenset(
    {
        "log_level", "access_log", "drain_timeout_s", "admin_from",
        "model", "lazy_model", "catalog", "pinned_model", "default_model", "wait_for_load", "load_timeout_s",
        "load_retry_s", "idle_unload_s", "strict_readiness",
        "max_body_bytes", "max_items", "max_candidates", "max_item_text_bytes", "max_depth", "max_queued_tokens",
        "max_labels", "max_label_pairs", "max_label_chars", "max_prompt_tokens", "max_text_windows",
        "max_schema_depth", "max_schema_values", "max_tensor_strings", "request_timeout_s", "body_idle_timeout_s",
        "min_body_bytes_per_s", "unread_timeout_s", "max_held_bytes",
        "start_timeout_s", "watchdog_s", "tick_timeout_s", "restart_budget", "restart_window_s", "restart_backoff_s",
        "device_retry_s",
    }
)  # fmt: skip
"""Reloadable settings by name. The others size memory, place processes or were shown to clients: they need a restart."""


class Plan(msgspec.Struct, frozen=True):
    """The result of a reload: the new settings, the changed names, and the names that wait for a restart."""

    settings: Settings
    changed: tuple[str, ...]
    waiting: tuple[str, ...]


def plan_reload(running: Settings, wanted: Settings) -> Plan:
    """Return the plan to reload a server from the settings `running` to `wanted`."""
    changed: list[str] = []
    waiting: list[str] = []
    sections: dict[str, dict[str, Any]] = {}
    for key in all_keys():
        value = getattr(getattr(wanted, key.section), key.attribute)
        if value == getattr(getattr(running, key.section), key.attribute):
            continue
        if key.name in LIVE:
            changed.append(key.name)
            sections.setdefault(key.section, {})[key.attribute] = value
        else:
            waiting.append(key.name)
    replaced = {name: msgspec.structs.replace(getattr(running, name), **values) for name, values in sections.items()}
    return Plan(msgspec.structs.replace(running, **replaced), tuple(changed), tuple(waiting))
