from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
import tokenizers

from sie.frontend.models.model_table import ModelTable
from sie.ipc.messages import ModelEntry, Models, WorkerEntry
from sie.values.card import ModelCard
from sie.values.errors import Internal, ModelLoadFailed, NotFound, SieError, Unavailable, to_wire
from sie.values.fallbacks import Fallback

FAILURE = to_wire(Internal("no such weights", extras={"error_class": "STORAGE", "attempts": 2, "permanent": False}))


def entry(model="m", state="loaded", tokenizer_file="", **details) -> ModelEntry:
    return ModelEntry(
        card=ModelCard(id=model, kind="encoder", tokenizer_file=str(tokenizer_file)), state=state, **details
    )


def message(*entries: ModelEntry, ready: bool = True) -> Models:
    worker = WorkerEntry(slot=0, device="cpu", pid=1, state="ready", restarts=0)
    return Models(entries, ready=ready, reason="" if ready else "loading", workers=(worker,))


@pytest.fixture
def pool():
    with ThreadPoolExecutor(1) as made:
        yield made


@pytest.fixture
def asked():
    return []


@pytest.fixture
def table(pool, asked):
    return ModelTable(pool, asked.append)


def save_tokenizer(path) -> None:
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]")).save(str(path))


def test_update_replaces_everything_in_the_supervisor_s_order(table):
    table.update(message(entry("z"), entry("a"), ready=False))
    assert (list(table.entries), table.is_ready, table.reason) == (["z", "a"], False, "loading")
    assert "z" in table
    table.update(message(entry("a")))
    assert (list(table.entries), table.is_ready, table.find("z")) == (["a"], True, None)
    assert [worker.slot for worker in table.workers] == [0]


def test_reasons_of_fallbacks_have_no_paths_of_the_server(table):
    reason = "/opt/sie/bin/gcc: Python.h: no such file"
    table.update(message(entry("a", fallbacks=(Fallback("no_kernels", reason),))))
    (shown,) = table.find("a").fallbacks
    assert shown == Fallback("no_kernels", ".../gcc: Python.h: no such file")


def test_loaded_model_serves_and_counts_as_used(table, asked):
    table.check_serving(entry(workers=(0,)))
    assert (table.used, asked) == ({"m"}, [])


def test_recovering_model_lets_requests_wait(table, asked):
    table.check_serving(entry(state="loading", recovering=True))
    assert asked == []


@pytest.mark.parametrize("state", ["available", "loading"])
def test_model_that_is_not_loaded_is_asked_for_and_told_when_to_retry(table, asked, state):
    with pytest.raises(Unavailable) as caught:
        table.check_serving(entry(state=state))
    assert (caught.value.code, caught.value.http_status, caught.value.retry_after_s) == ("MODEL_LOADING", 503, 5)
    assert asked == ["m"]


def test_unloading_model_is_refused_and_not_asked_for(table, asked):
    with pytest.raises(Unavailable) as caught:
        table.check_serving(entry(state="unloading", workers=(0,)))
    assert caught.value.code == "MODEL_NOT_LOADED"
    assert asked == []


def test_failed_model_says_why_without_a_time_to_retry_but_is_asked_for(table, asked):
    with pytest.raises(ModelLoadFailed) as caught:
        table.check_serving(entry(state="failed", error=FAILURE))
    error = caught.value
    assert "no such weights" in error.message
    assert (error.http_status, error.code, error.retry_after_s) == (502, "MODEL_LOAD_FAILED", None)
    assert error.extras["error_class"] == "STORAGE"
    assert asked == ["m"]


# --- tokenizers ----------------------------------------------------------------------------------------------------------


def test_tokenizer_is_read_as_soon_as_its_model_loads_and_then_kept(table, tmp_path):
    save_tokenizer(tmp_path / "t.json")
    loading = entry(state="loading", tokenizer_file=tmp_path / "t.json")

    async def run() -> None:
        assert table.ready_tokenizer(loading) is None
        table.update(message(loading))
        first = await table.tokenizer(loading)
        assert table.ready_tokenizer(loading) is first
        (tmp_path / "t.json").unlink()
        table.update(message(entry(tokenizer_file=tmp_path / "t.json", workers=(0,))))
        assert await table.tokenizer(loading) is first

    asyncio.run(run())


def test_model_that_nobody_loads_reads_no_tokenizer(table, tmp_path):
    async def run() -> None:
        table.update(message(entry(state="available", tokenizer_file=tmp_path / "absent.json"), entry("stub")))
        await asyncio.sleep(0)
        assert table._tokenizers == {}

    asyncio.run(run())


def test_other_tokenizer_file_is_another_tokenizer(table, tmp_path):
    old, new = (entry(tokenizer_file=tmp_path / name) for name in ("old.json", "new.json"))
    for name in ("old.json", "new.json"):
        save_tokenizer(tmp_path / name)

    async def run() -> None:
        first = await table.tokenizer(old)
        assert table.ready_tokenizer(new) is None
        assert await table.tokenizer(new) is not first

    asyncio.run(run())


def test_tokenizer_that_could_not_be_read_is_tried_again(table, tmp_path, caplog):
    broken = entry(tokenizer_file=tmp_path / "t.json")

    async def run() -> None:
        with pytest.raises(Internal, match="no readable tokenizer"):
            await table.tokenizer(broken)
        assert table.ready_tokenizer(broken) is None, "its failure is no answer to the next request"
        save_tokenizer(tmp_path / "t.json")
        assert (await table.tokenizer(broken)).card.id == "m"

    asyncio.run(run())
    assert "no readable tokenizer" in caplog.text


def test_retry_after_of_a_loading_model_is_the_setting_s(pool):
    table = ModelTable(pool, lambda _model: None, loading_retry_after_s=9)
    table.update(message(entry(state="available")))
    with pytest.raises(Unavailable, match="retry in 9 s") as caught:
        table.check_serving(table.entries["m"])
    assert caught.value.retry_after_s == 9


def test_tokenizer_of_a_model_that_goes_is_read_anew(table, tmp_path):
    path = tmp_path / "tokenizer.json"
    save_tokenizer(path)

    async def run() -> None:
        table.update(message(entry(tokenizer_file=path)))
        first = await table.tokenizer(table.entries["m"])
        table.update(message(entry(tokenizer_file=path)))
        assert await table.tokenizer(table.entries["m"]) is first
        table.update(message(entry(state="unloading", tokenizer_file=path)))
        table.update(message(entry(tokenizer_file=path)))
        assert await table.tokenizer(table.entries["m"]) is not first

    asyncio.run(run())


# --- profiles ---------------------------------------------------------------------------------------------------------


def profiled(state="loaded", **details) -> ModelEntry:
    made = entry("org/m", state, **details)
    profiles = {"default": {}, "sparse": {"output_types": ["sparse"]}}
    return msgspec.structs.replace(
        made, card=msgspec.structs.replace(made.card, outputs=("dense", "sparse"), profiles=profiles)
    )


def test_every_profile_is_an_entry_with_the_state_of_its_model(table):
    table.update(message(entry("a"), profiled(workers=(0,), memory_bytes=7)))
    assert list(table.entries) == ["a", "org/m", "org/m:sparse"]
    sparse = table.find("org/m:sparse")
    assert (sparse.state, sparse.workers, sparse.card.profiles) == (
        "loaded", (0,), {"default": {"output_types": ["sparse"]}},
    )  # fmt: skip
    assert table.find("org/m:default") is table.find("org/m")
    assert table.find("org/m:other") is None


def test_a_model_without_a_default_profile_is_hosted_and_not_offered(table):
    made = entry("m", workers=(0,))
    table.update(message(msgspec.structs.replace(made, card=msgspec.structs.replace(made.card, profiles={"a": {}}))))
    assert list(table.entries) == ["m:a"]
    assert table.find("m") is None
    assert table.hosted("m").workers == (0,)
    assert table.models_for("dense") == ["m:a"]


def test_workers_and_supervisor_hear_of_the_model_alone(table, asked):
    table.update(message(profiled("available")))
    with pytest.raises(Unavailable):
        table.check_serving(table.find("org/m:sparse"))
    assert asked == ["org/m"]
    table.update(message(profiled(workers=(0,))))
    for name in ("org/m:sparse", "org/m"):
        table.check_serving(table.find(name))
    assert table.take_used() == ("org/m",)
    assert table.take_used() == ()


def test_entries_of_profiles_are_no_further_choice_for_a_request_without_a_model(table):
    table.update(message(profiled(workers=(0,))))
    assert (table.models_for("dense"), table.models_for("sparse")) == (["org/m"], ["org/m"])


def test_every_model_that_generates_is_named_and_generators_come_last_for_vectors(table):
    def generating(name, kind, *outputs):
        made = entry(name, workers=(0,))
        return msgspec.structs.replace(made, card=msgspec.structs.replace(made.card, kind=kind, outputs=outputs))

    table.update(message(generating("stub", "stub", "generate"), generating("llm", "generator", "dense", "generate")))
    assert table.models_for("generate") == ["stub", "llm"]
    assert table.default_of("generate") is None, "one of two is no default"
    assert table.models_for("dense") == ["llm"]
    table.update(message(*table.entries.values(), entry("small", workers=(0,))))
    assert table.models_for("dense") == ["small"]


def outputs(name: str, *outputs: str, state: str = "loaded", is_read: bool = True) -> ModelEntry:
    made = entry(name, state, workers=(0,), is_read=is_read)
    return msgspec.structs.replace(made, card=msgspec.structs.replace(made.card, outputs=outputs))


def test_a_default_model_that_cannot_serve_is_replaced_by_the_only_one_that_can(table):
    table.update(message(outputs("e", "dense"), outputs("f", "dense"), outputs("g", "generate")))
    table.default = "e"
    assert (table.default_of("dense"), table.default_of("generate"), table.default_of("score")) == ("e", "g", None)
    assert table.default_of() == "e"
    table.update(message(outputs("e", is_read=False), outputs("g", "generate")))
    assert table.default_of("generate") == "e", "what it gives is not known yet"
    table.update(message(outputs("e", "dense")))
    with pytest.raises(SieError, match=r"^No default model: no model gives 'score'$"):
        table.resolve_default("default", "score")
    with pytest.raises(SieError, match=r"^No default model: no served model generates text$"):
        table.resolve_default("default", "generate")


@pytest.mark.parametrize(
    ("models", "default"),
    [({"r": "score"}, "r"), ({"e": "dense", "r": "score"}, "e"), ({"e": "dense", "g": "generate"}, "g"),
     ({"e": "dense", "f": "dense"}, None)],
)  # fmt: skip
def test_the_default_of_no_route_in_particular_is_one_that_some_route_serves(table, models, default):
    table.update(message(*(outputs(name, output) for name, output in models.items())))
    assert table.default_of() == default


def test_entries_of_a_model_share_one_tokenizer(table, tmp_path):
    path = tmp_path / "tokenizer.json"
    save_tokenizer(path)

    async def read():
        table.update(message(profiled(workers=(0,), tokenizer_file=path)))
        read = [await table.tokenizer(table.find(name)) for name in ("org/m", "org/m:sparse")]
        return [*read, table.ready_tokenizer(table.find("org/m:sparse"))]

    first, second, third = asyncio.run(read())
    assert first is second is third


def test_tokenizer_of_a_model_that_a_reload_took_away_is_let_go(table, tmp_path):
    path = tmp_path / "tokenizer.json"
    save_tokenizer(path)

    async def run() -> None:
        table.update(message(profiled(workers=(0,), tokenizer_file=path), entry(tokenizer_file=path)))
        kept = await table.tokenizer(table.entries["m"])
        table.update(message(entry(tokenizer_file=path)))
        assert set(table._tokenizers) == {"m"}
        assert await table.tokenizer(table.entries["m"]) is kept

    asyncio.run(run())


@pytest.mark.parametrize(("padding", "expected"), [(0, []), (5 << 20, [5])])
def test_reading_a_large_tokenizer_is_announced_as_silence(table, tmp_path, padding, expected):
    said = []
    table.on_stall = said.append
    path = tmp_path / "tokenizer.json"
    save_tokenizer(path)
    path.write_text(path.read_text() + " " * padding)

    async def read():
        table.update(message(entry("m", tokenizer_file=path)))
        return await table.tokenizer(table.entries["m"])

    assert asyncio.run(read()) is not None
    assert said == expected


@pytest.mark.parametrize("state", ["available", "unloading"])
def test_lost_load_request_is_sent_again(pool, monkeypatch, state):
    """The first word is lost: a load that was asked for a moment ago had begun, and its model is gone since."""
    monkeypatch.setattr("sie.frontend.models.model_table._ASK_AGAIN_S", 0.01)
    words = []

    def hear(model):
        words.append(model)
        if len(words) == 2:
            asyncio.get_running_loop().call_soon(table.update, message(entry(workers=(0,))))

    table = ModelTable(pool, hear)

    async def wait():
        table.update(message(entry(state=state)))
        if state == "unloading":
            asyncio.get_running_loop().call_later(0.02, table.update, message(entry(state="available")))
        return await table.wait_serving(table.entries["m"], time.monotonic_ns() + 5_000_000_000)

    assert asyncio.run(wait()).state == "loaded"
    assert len(words) >= 2


def test_who_waits_for_a_model_that_is_removed_is_told_so_at_once(table):
    async def run() -> ModelEntry:
        table.update(message(entry(state="loading"), entry("other", workers=(0,))))
        asyncio.get_running_loop().call_soon(table.update, message(entry("other", workers=(0,))))
        return await table.wait_serving(table.entries["m"], time.monotonic_ns() + 60_000_000_000)

    with pytest.raises(NotFound, match="Model 'm' not found"):
        asyncio.run(run())


NOT_LOADED = Unavailable("Model 'm' is not loaded", code="MODEL_NOT_LOADED")
ACTED = Unavailable("Model 'm' is not loaded", code="MODEL_NOT_LOADED")
ACTED.may_be_repeated = False


@pytest.mark.parametrize("state", ["available", "loading", "unloading"])
def test_a_request_whose_model_made_room_for_another_is_tried_again(table, state):
    table.update(message(entry(state=state)))
    assert table.reloaded(entry(workers=(0,)), NOT_LOADED) is table.find("m")


@pytest.mark.parametrize(
    ("now", "error"),
    [
        (entry(state="available", dismissed=True), NOT_LOADED),
        (entry("other"), NOT_LOADED),
        (entry(workers=(0,)), Unavailable("Model 'm' is loading")),
        (entry(workers=(0,)), ACTED),
    ],
    ids=["unloaded by an administrator", "removed", "another error", "its tools have run"],
)
def test_a_request_whose_model_does_not_come_back_is_not_tried_again(table, now, error):
    table.update(message(now))
    with pytest.raises(Unavailable):
        table.reloaded(entry(workers=(0,)), error)
