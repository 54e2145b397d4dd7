"""Settings: one tree, four sources, and errors that name the wrong key."""

from __future__ import annotations

import os
import tomllib
import typing
from pathlib import Path

import msgspec
import pytest

from sie.config.display import render_json, render_markdown, render_text, render_toml
from sie.config.settings import Settings, all_keys, load_settings
from sie.config.sources import Key, SettingsError

ROOT = Path(__file__).parents[3]
TEMPORARY = f"/tmp/sie-{os.getuid()}"
BY_NAME = {key.name: key for key in all_keys()}


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "sie.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_names_are_unique_over_the_tree():
    assert len(BY_NAME) == len(all_keys())


@pytest.mark.parametrize("key", all_keys(), ids=lambda key: key.name)
def test_every_setting_has_a_doc_a_type_and_a_default_that_it_accepts(key: Key):
    assert key.doc.endswith(".")
    assert msgspec.convert(key.default, key.annotation) == key.default


@pytest.mark.parametrize("key", [k for k in all_keys() if type(k.default) in (int, float)], ids=lambda key: key.name)
def test_every_number_is_refused_on_both_sides_of_its_bounds(key: Key):
    meta = typing.get_args(key.annotation)[1]
    for allowed in (meta.ge, meta.le):
        assert msgspec.convert(allowed, key.annotation) == allowed
    for refused in (meta.ge - 1, meta.le + 1, float("nan"), float("inf")):
        with pytest.raises(SettingsError, match=f"{key.flag}: .* is not "):
            load_settings(None, {}, {key.name: str(refused)})


def test_a_flag_beats_a_variable_beats_the_file_beats_the_default(tmp_path: Path):
    path = write(tmp_path, "[server]\nport = 1\nbacklog = 200\nfrontends = 3\n")
    loaded = load_settings(path, {"SIE_PORT": "2", "SIE_BACKLOG": "300"}, {"port": "3"})
    server = loaded.settings.server
    assert (server.port, server.backlog, server.frontends, server.host) == (3, 300, 3, "127.0.0.1")
    shown = [str(loaded.sources[name]) for name in ("port", "backlog", "frontends", "host")]
    assert shown == ["flag --port", "environment SIE_BACKLOG", f"file {path}", "default"]


def test_lists_come_from_repeated_flags_and_from_white_space_in_a_variable(tmp_path: Path):
    assert load_settings(None, {}, {"model": ["a=stub:", "b"]}).settings.models.preload == ("a=stub:", "b")
    spec = "a=stub:dense=4,latency_ms=5"
    assert load_settings(None, {"SIE_MODEL": f"{spec}  b"}, {}).settings.models.preload == (spec, "b")
    assert load_settings(write(tmp_path, '[models]\nmodel = ["c"]'), {}, {}).settings.models.preload == ("c",)


def test_the_file_can_be_named_by_a_variable_and_a_flag_wins(tmp_path: Path):
    path = write(tmp_path, "[server]\nport = 7\n")
    assert load_settings(None, {"SIE_CONFIG": path}, {}).settings.server.port == 7
    other = tmp_path / "other.toml"
    other.write_text("[server]\nport = 8\n")
    assert load_settings(str(other), {"SIE_CONFIG": path}, {}).settings.server.port == 8


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[server]\nprot = 1", "[server] prot: unknown key; did you mean port?"),
        ("[server]\nmax_items = 1", "[server] max_items: unknown key; it belongs under [limits]"),
        ("[sever]\nport = 1", "sever: unknown section; did you mean server?"),
        ("port = 1", "port: unknown section; it belongs under [server]"),
        ("server = 1", "server: a section, written [server], is expected"),
        ("[server]\nport = 'x'", "[server] port: 'x' is not an integer from 0 to 65535"),
        ("[server]\nport = true", "[server] port: 'true' is not an integer from 0 to 65535"),
        ("[server]\nport = '80'", "[server] port: '80' is not an integer from 0 to 65535"),
        ("[models]\nmodel = 'a'", "[models] model: 'a' is not ID[=DIR][@REVISION] or ID=stub:[key=value,...]"),
        ("[server]\nlog_format = 'xml'", "[server] log_format: 'xml' is not one of text, json"),
        ("[server\n", "is not TOML: "),
        ("[server]\nport = 1\nport = 2\n", "is not TOML: "),
    ],
)
def test_a_wrong_file_is_refused_with_file_key_and_reason(tmp_path: Path, text: str, message: str):
    path = write(tmp_path, text)
    with pytest.raises(SettingsError) as caught:
        load_settings(path, {}, {})
    assert str(caught.value).startswith(f"{path}: {message}")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path):
    with pytest.raises(SettingsError, match=r"missing.toml: cannot be read: No such file"):
        load_settings(str(tmp_path / "missing.toml"), {}, {})
    latin = tmp_path / "latin.toml"
    latin.write_bytes(b"[server]\nserver_name = 'caf\xe9'\n")
    with pytest.raises(SettingsError, match=r"latin.toml: is not UTF-8 text"):
        load_settings(str(latin), {}, {})


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("SIE_PORT", "", "environment: SIE_PORT: '' is not an integer from 0 to 65535"),
        ("SIE_WAIT_FOR_LOAD", "perhaps", "environment: SIE_WAIT_FOR_LOAD: 'perhaps' is not true or false"),
    ],
)
def test_a_wrong_variable_is_refused_by_name(variable: str, value: str, message: str):
    with pytest.raises(SettingsError) as caught:
        load_settings(None, {variable: value}, {})
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"KEEP_ALIVE_INTERVAL": "250"}, (250, "environment KEEP_ALIVE_INTERVAL")),
        ({"KEEP_ALIVE_INTERVAL": "often"}, (10_000, "default")),
        ({"KEEP_ALIVE_INTERVAL": "-1"}, (10_000, "default")),
        ({"KEEP_ALIVE_INTERVAL": "250", "SIE_KEEP_ALIVE_INTERVAL_MS": "300"},
         (300, "environment SIE_KEEP_ALIVE_INTERVAL_MS")),
    ],
)  # fmt: skip
def test_a_variable_of_other_servers_is_passed_over_where_it_is_wrong(environ: dict[str, str], expected: object):
    loaded = load_settings(None, environ, {})
    found = loaded.settings.generation.keep_alive_interval_ms, str(loaded.sources["keep_alive_interval_ms"])
    assert found == expected


@pytest.mark.parametrize(("section", "name"), [("access", "api_keys"), ("models", "model"), ("server", "runtime_dir")])
def test_a_text_with_a_null_character_is_refused(tmp_path: Path, section: str, name: str):
    text = '["a=/b\\u0000c"]' if BY_NAME[name].is_list else '"/b\\u0000c"'
    path = write(tmp_path, f"[{section}]\n{name} = {text}\n")
    with pytest.raises(SettingsError, match=rf"\[{section}\] {name}: .* has a null character"):
        load_settings(path, {}, {})


@pytest.mark.parametrize("name", ["request_segment_bytes", "reply_segment_bytes"])
def test_a_segment_of_a_size_that_no_pool_can_have_is_refused(name: str):
    with pytest.raises(SettingsError, match=f"{BY_NAME[name].flag}: '1048577' is not a multiple of 64 from 1048576 to"):
        load_settings(None, {}, {name: "1048577", "large_extent_bytes": "65536"})


def test_an_unknown_variable_warns_with_the_nearest():
    environ = {"SIE_URL": "http://a", "SIE_PROT": "1", "SIE_API_KEY": "k", "SIE_BACKLOG": "300", "SIE_CONFIG": ""}
    loaded = load_settings(None, environ, {})
    assert loaded.warnings == ("environment: SIE_PROT: unknown variable; did you mean SIE_PORT?",)
    assert (loaded.settings.server.port, loaded.settings.server.backlog) == (8080, 300)


def test_variables_of_others_are_left_alone():
    assert load_settings(None, {"PORT": "1", "SIERRA": "2", "_SIE_COMPLETE": "x"}, {}).settings.server.port == 8080


def test_an_unknown_flag_is_refused_with_the_nearest():
    with pytest.raises(SettingsError, match=r"^--prot: unknown flag; did you mean --port\?$"):
        load_settings(None, {}, {"prot": "1"})


def test_every_pattern_is_told_in_words():
    assert not [key.name for key in all_keys() if typing.get_args(key.annotation)[1].pattern and not key.form]


@pytest.mark.parametrize("text", ["auto", "cpu", "cpu:4", "cuda", "cuda:0", "cuda:0,cuda:1"])
def test_devices_accepts_its_forms(text: str):
    assert load_settings(None, {}, {"devices": text}).settings.devices.devices == text


@pytest.mark.parametrize("text", ["", "gpu", "cpu:0", "cpu:", "cuda:", "cuda:0,", "cuda:0,1", "cpu,cuda", "cpu\n"])
def test_devices_refuses_anything_else(text: str):
    with pytest.raises(SettingsError, match="--devices"):
        load_settings(None, {}, {"devices": text})


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"ring_capacity": "100"}, "ring_capacity (from flag --ring-capacity): must be a power of two"),
        ({"large_extent_bytes": "99999999"}, "large_extent_bytes (from flag --large-extent-bytes): must fit into"),
        ({"max_body_bytes": "1024"}, "max_item_text_bytes (from default): must not be over max_body_bytes (1024)"),
    ],
)
def test_values_that_do_not_fit_one_another_are_refused(flags: dict[str, str], message: str):
    with pytest.raises(SettingsError) as caught:
        load_settings(None, {}, flags)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("environ", "runtime_dir", "cache_dir"),
    [
        ({}, TEMPORARY, "/.cache/sie"),
        ({"TMPDIR": "/scratch"}, f"/scratch/sie-{os.getuid()}", "/.cache/sie"),
        ({"HOME": "/home/a"}, TEMPORARY, "/home/a/.cache/sie"),
        ({"XDG_RUNTIME_DIR": "/run/user/1", "XDG_CACHE_HOME": "/c"}, "/run/user/1/sie", "/c/sie"),
        ({"RUNTIME_DIRECTORY": "/run/sie:/run/b", "CACHE_DIRECTORY": "/var/cache/sie"}, "/run/sie", "/var/cache/sie"),
        ({"RUNTIME_DIRECTORY": "/run/sie", "SIE_RUNTIME_DIR": "/r", "SIE_CACHE_DIR": "/c"}, "/r", "/c"),
    ],
)
def test_directories_follow_the_system_unless_they_are_set(environ: dict[str, str], runtime_dir: str, cache_dir: str):
    settings = load_settings(None, environ, {}).settings
    assert (settings.server.runtime_dir, settings.models.cache_dir) == (runtime_dir, cache_dir)


@pytest.mark.parametrize(
    ("environ", "state_dir"),
    [
        ({"HOME": "/home/a"}, "/home/a/.local/state/sie"),
        ({"HOME": "/home/a", "XDG_STATE_HOME": "/s"}, "/s/sie"),
        ({"XDG_STATE_HOME": "/s", "STATE_DIRECTORY": "/var/lib/sie:/var/lib/b"}, "/var/lib/sie"),
        ({"STATE_DIRECTORY": "/var/lib/sie", "SIE_STATE_DIR": "/own"}, "/own"),
    ],
)
def test_state_lies_where_the_system_keeps_it(environ: dict[str, str], state_dir: str):
    assert load_settings(None, environ, {}).settings.server.state_dir == state_dir


def test_settings_survive_being_handed_to_another_process():
    settings = load_settings(None, {}, {"model": ["a"], "server_name": "x", "wait_for_load": "1"}).settings
    assert msgspec.json.decode(msgspec.json.encode(settings), type=Settings) == settings


def test_default_segments_of_one_frontend_and_one_worker_stay_modest():
    memory = Settings().memory
    reserved = memory.request_segment_bytes + memory.reply_segment_bytes + 3 * memory.counter_page_bytes
    assert reserved + 2 * 64 * memory.ring_capacity < 400 << 20


def test_toml_view_loads_back_to_the_same_settings(tmp_path: Path):
    flags = {"port": "9", "model": ["a=stub:dense=4,load_ms=1", "b"], "server_name": 'q"uo\\te\t', "idle_unload_s": "5"}
    loaded = load_settings(None, {}, {**flags, "wait_for_load": "true"})
    text = render_toml(loaded)
    assert load_settings(write(tmp_path, text), {}, {}).settings == loaded.settings
    uncommented = "\n".join(line.removeprefix("# ") for line in text.splitlines())
    assert load_settings(write(tmp_path, uncommented), {}, {}).settings == loaded.settings
    assert set(tomllib.loads(uncommented)) == set(Settings.__struct_fields__)


def test_toml_view_leaves_out_what_only_this_login_session_has():
    text = render_toml(load_settings(None, {"XDG_RUNTIME_DIR": "/run/user/1000"}, {}))
    assert "\n# runtime_dir = " in text


def test_views_show_every_value_with_its_source():
    loaded = load_settings(None, {"SIE_PORT": "9"}, {})
    lines = render_text(loaded).splitlines()
    assert any(line.split() == ["port", "9", "environment", "SIE_PORT"] for line in lines)
    tree = msgspec.json.decode(render_json(loaded))
    assert tree["server"]["port"] == {"value": 9, "source": "environment SIE_PORT"}
    assert {name for section in tree.values() for name in section} == set(BY_NAME)


def test_documentation_page_is_current():
    page = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    assert page == render_markdown(), "run `make fix`, which writes docs/settings.md"
