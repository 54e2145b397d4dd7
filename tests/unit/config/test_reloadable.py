"""The settings that a reload changes, and those that need a restart."""

from __future__ import annotations

import msgspec

from sie.config.reloadable import LIVE, plan_reload
from sie.config.settings import Settings, all_keys, load_settings


def settings(**flags: str) -> Settings:
    return load_settings(None, {"HOME": "/h"}, flags).settings


def test_every_live_setting_exists():
    assert {key.name for key in all_keys()} >= LIVE


def test_what_did_not_change_is_no_news():
    running = settings()
    plan = plan_reload(running, settings())
    assert (plan.settings, plan.changed, plan.waiting) == (running, (), ())


def test_live_settings_are_taken_over_and_the_others_named():
    wanted = settings(max_items="7", log_level="debug", port="9", ring_capacity="8")
    plan = plan_reload(settings(), wanted)
    assert plan.changed == ("log_level", "max_items")
    assert plan.waiting == ("port", "ring_capacity")
    assert plan.settings == settings(max_items="7", log_level="debug")


def test_what_waits_for_a_restart_is_named_until_there_is_one():
    wanted = settings(port="9")
    first = plan_reload(settings(), wanted)
    assert plan_reload(first.settings, wanted).waiting == ("port",)


def test_every_live_setting_is_taken_over():
    """Whatever its section: a plan for a tree in which each differs leaves none behind."""
    running = settings()
    other = Settings()
    for key in all_keys():
        section = getattr(other, key.section)
        changed = msgspec.structs.replace(section, **{key.attribute: object()})
        other = msgspec.structs.replace(other, **{key.section: changed})
    plan = plan_reload(running, other)
    assert set(plan.changed) == LIVE
    assert set(plan.changed) | set(plan.waiting) == {key.name for key in all_keys()}
