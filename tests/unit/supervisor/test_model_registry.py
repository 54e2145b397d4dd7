from __future__ import annotations

import pytest

from sie.catalog.spec import ModelSpec
from sie.ipc.messages import ModelEntry, ModelReport
from sie.supervisor.lifecycle import Event, LifeStage
from sie.supervisor.model_registry import ModelRegistry, is_refused
from sie.values.card import ModelCard
from sie.values.errors import Internal, WireError, to_wire
from sie.values.fallbacks import Fallback

RETRY_S = 30.0


def failure(error_class: str = "UNKNOWN") -> WireError:
    return to_wire(Internal("it broke", extras={"error_class": error_class, "detail": "kept"}))


class Book:
    """One model `m` and the workers that report on it."""

    def __init__(self, *, preload: bool = False, is_wanted: bool = True, is_strict: bool = True) -> None:
        self.registry = ModelRegistry(RETRY_S, is_strict=is_strict)
        self.record = self.registry.add(ModelSpec(id="m"), preload, ModelCard(id="m", kind="encoder"))
        if is_wanted and not preload:
            assert self.registry.want("m", 0.0) is self.record

    def report(self, state, slot=0, now_s=1.0, error_class="ENGINE", **details) -> None:
        error = failure(error_class) if state == "failed" else None
        self.registry.report(slot, ModelReport("m", state, f"cpu-{slot}", error=error, **details), now_s)

    @property
    def entry(self) -> ModelEntry:
        (entry,) = self.registry.entries()
        return entry

    @property
    def view(self) -> tuple[str, tuple[int, ...], bool]:
        return self.entry.state, self.entry.workers, self.entry.recovering


@pytest.fixture
def lazy():
    return Book()


def test_lazy_model_is_available_until_somebody_wants_it():
    lazy = Book(is_wanted=False)
    assert lazy.view == ("available", (), False)
    assert lazy.registry.want("m", 1.0) is lazy.record
    assert lazy.view == ("loading", (), False)
    assert lazy.registry.want("m", 2.0) is None, "it is loading already"


def test_fallbacks_of_any_worker_are_the_model_s(lazy):
    for slot, names in ((0, ("no_graphs",)), (1, ("no_graphs", "no_kernels"))):
        fallbacks = tuple(Fallback(name, "why") for name in names)
        lazy.report("loading", slot)
        lazy.report("loaded", slot, fallbacks=fallbacks)
    assert [fallback.name for fallback in lazy.entry.fallbacks] == ["no_graphs", "no_kernels"]
    lazy.report("unloading", 1)
    lazy.report("available", 1)
    assert [fallback.name for fallback in lazy.entry.fallbacks] == ["no_graphs"]


def test_unknown_model_is_nobody_s():
    registry = ModelRegistry(RETRY_S)
    assert registry.want("x", 0.0) is None
    registry.report(0, ModelReport("x", "loaded"), 0.0)
    registry.touch(("x",), 0.0)
    assert registry.entries() == ()


def test_loaded_model_names_its_workers_in_order_their_memory_and_its_smallest_cache(lazy):
    lazy.report("loading", slot=1)
    lazy.report("loaded", slot=1, memory_bytes=10, cache_tokens=300)
    lazy.report("loaded", slot=0, memory_bytes=5, cache_tokens=200)

    assert lazy.view == ("loaded", (0, 1), False)
    assert (lazy.entry.memory_bytes, lazy.entry.device, lazy.entry.cache_tokens) == (15, "cpu-1", 200)


def test_model_is_loaded_as_soon_as_one_worker_has_it(lazy):
    lazy.report("loading", slot=0)
    lazy.report("loaded", slot=1)
    assert lazy.view == ("loaded", (1,), False)


def test_readiness_waits_for_preloaded_models_only():
    preloaded, lazy = Book(preload=True), Book()
    assert lazy.registry.is_ready()
    assert preloaded.registry.missing() == ["m"]
    preloaded.report("loaded")
    assert preloaded.registry.is_ready()


def test_a_start_is_lost_once_a_model_that_it_waits_for_has_failed_for_good():
    book = Book(preload=True)
    book.registry.add(ModelSpec(id="lazy"), False, None)
    book.report("failed", error_class="NETWORK")
    assert not book.registry.lost_causes(), "it is tried again"
    book.report("failed", error_class="NOT_FOUND")
    (error,) = book.registry.lost_causes()
    assert is_refused(error)
    book.registry.dismiss(book.record)
    assert not book.registry.lost_causes(), "readiness does not wait for a model that an administrator unloaded"


def test_without_strict_readiness_failed_models_are_left_out_while_another_can_serve():
    book = Book(preload=True, is_strict=False)
    other = book.registry.add(ModelSpec(id="other"), True, ModelCard(id="other", kind="encoder"))
    book.report("failed", error_class="GATED")
    assert (book.registry.missing(), book.registry.left_out()) == (["other"], ["m"])
    book.registry.report(0, ModelReport("other", "loaded", "cpu-0"), 1.0)
    assert book.registry.is_ready()
    book.registry.demand(book.record, 2.0)
    assert book.registry.is_ready(), "a new try does not take the server out of service"
    book.report("loaded")
    assert not book.registry.left_out()
    book.registry.forget_worker(0, 3.0, blame=False)
    assert book.registry.missing() == ["m", "other"], "a restarted worker loads both again"
    for record in (book.record, other):
        book.registry.fail(record, failure("GATED"), 4.0)
    assert book.registry.missing() == ["m", "other"], "nothing could be served"
    book.registry.add(ModelSpec(id="lazy"), False, None)
    assert book.registry.left_out() == ["m", "other"], "a request may load this one"
    book.registry.reconfigure(RETRY_S, is_strict=True)
    assert book.registry.missing() == ["m", "other"]


def test_without_strict_readiness_a_start_is_lost_once_every_model_has_failed_for_good():
    book = Book(preload=True, is_strict=False)
    book.report("failed", error_class="NETWORK")
    assert not book.registry.lost_causes(), "it is tried again"
    book.report("failed", error_class="NOT_FOUND")
    (error,) = book.registry.lost_causes()
    assert is_refused(error)
    lazy = book.registry.add(ModelSpec(id="lazy"), False, None)
    assert not book.registry.lost_causes(), "another model may be loaded"
    lazy.preload = True
    book.registry.fail(lazy, failure("ENGINE"), 1.0)
    assert not book.registry.lost_causes()
    for _ in range(7):
        book.registry.fail(lazy, failure("ENGINE"), 1.0)
    assert [is_refused(error) for error in book.registry.lost_causes()] == [True, False]
    book.report("loaded")
    assert not book.registry.lost_causes()


def test_what_readiness_waits_for_is_said_with_its_reason():
    book = Book(preload=True)
    assert book.registry.missing_reasons() == "m (loading)"
    book.registry.records["m"].apply(Event.SHORT)
    assert book.registry.missing_reasons() == "m (waits for memory)"
    error = to_wire(Internal("Model 'm' cannot be loaded: no such file:\n/srv/models/m/weights.bin"))
    book.registry.fail(book.registry.records["m"], error, 0.0)
    reason = book.registry.missing_reasons()
    assert reason == "m (failed: Model 'm' cannot be loaded: no such file: .../weights.bin)"
    assert len(missing_of("x" * 10_000)) < 400
    book.report("loaded")
    assert book.registry.missing_reasons() == ""


def missing_of(text: str) -> str:
    book = Book(preload=True)
    book.registry.fail(book.registry.records["m"], to_wire(Internal(text)), 0.0)
    return book.registry.missing_reasons()


# --- failures ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error_class", "expected"),
    [
        ("NETWORK", [30, 60, 120, 240, 480, 960, 1800]),
        ("PLACEMENT", [30, 60, 120, 240, 480, 960, 1800]),
        ("OOM", [60, 120, 240, 480, 960, 1800, 1800]),
        ("UNKNOWN", [600, 1200, 1800, 1800, 1800, 1800, 1800]),
    ],
)
def test_failed_load_is_cooled_down_twice_as_long_each_time(lazy, error_class, expected):
    now_s, waits = 0.0, []
    for _ in range(7):
        lazy.report("failed", now_s=now_s, error_class=error_class)
        assert lazy.view == ("failed", (), False)
        waits.append(lazy.record.retry_at_s - now_s)
        assert lazy.registry.want("m", lazy.record.retry_at_s - 0.1) is None
        now_s = lazy.record.retry_at_s
        assert lazy.registry.want("m", now_s) is lazy.record
    assert waits == expected


def test_eighth_failure_is_permanent(lazy):
    for _ in range(8):
        assert not (lazy.entry.error and lazy.entry.error.extras["permanent"])
        lazy.report("failed", now_s=1e9)
        lazy.registry.want("m", 1e9 + 1e6)
        lazy.record.stage = LifeStage.LOADING
    assert lazy.record.error.extras == {
        "error_class": "ENGINE", "detail": "kept", "attempts": 8, "permanent": True,
    }  # fmt: skip


def test_without_a_wait_before_retries_the_first_failure_is_permanent(lazy):
    lazy.registry.reconfigure(0.0, is_strict=True)
    lazy.report("failed", now_s=1e9)
    assert lazy.entry.error.extras["permanent"]
    assert lazy.registry.want("m", 1e9 + 1e6) is None


@pytest.mark.parametrize("error_class", ["GATED", "NOT_FOUND", "DEPENDENCY", "CONFIG"])
def test_fault_that_trying_again_cannot_mend_is_permanent_at_once(lazy, error_class):
    lazy.report("failed", error_class=error_class)
    assert lazy.registry.want("m", 1e12) is None
    error = lazy.entry.error
    assert (error.code, error.http_status, error.extras["permanent"]) == ("MODEL_LOAD_FAILED", 502, True)
    assert error.message == "it broke"


@pytest.mark.parametrize("error_class", ["OOM", "STORAGE", "NETWORK", "TIMEOUT", "UNKNOWN"])
def test_fault_that_may_pass_is_not(lazy, error_class):
    lazy.report("failed", error_class=error_class)
    assert lazy.registry.want("m", 1e6) is lazy.record
    assert lazy.entry.error is None, "the old failure says nothing about the new try"


def test_success_forgets_failures(lazy):
    lazy.report("failed")
    lazy.registry.want("m", 1e6)
    lazy.report("loaded")
    assert lazy.entry.error is None
    lazy.report("failed", now_s=0.0)
    lazy.registry.forget_worker(0, 0.0, blame=False)
    assert lazy.record.retry_at_s == RETRY_S


def test_load_that_failed_on_several_workers_is_one_attempt(lazy):
    for slot in range(3):
        lazy.report("loading", slot=slot)
    for slot in range(3):
        lazy.report("failed", slot=slot)
    assert lazy.entry.error.extras["attempts"] == 1
    assert lazy.view == ("failed", (), False)


@pytest.mark.parametrize("order", [("loaded", "failed"), ("failed", "loaded")])
def test_worker_that_cannot_load_does_not_take_the_model_from_the_one_that_has_it(lazy, order):
    for slot in range(2):
        lazy.report("loading", slot=slot)
    for slot, state in enumerate(order):
        lazy.report(state, slot=slot)

    assert lazy.view == ("loaded", (order.index("loaded"),), False)
    assert lazy.registry.want("m", 1e6) is None


def test_model_that_loaded_after_all_is_wanted_again(lazy):
    """One worker said failed before the other one said that it had begun."""
    lazy.report("failed", slot=0)
    lazy.report("loading", slot=1)
    lazy.report("loaded", slot=1)
    assert lazy.view == ("loaded", (1,), False)


def test_preloaded_model_is_tried_again_without_a_request():
    preloaded = Book(preload=True)
    preloaded.report("failed", now_s=0.0)
    assert preloaded.registry.due_again(RETRY_S - 0.1) == []
    assert preloaded.registry.due_again(RETRY_S) == [preloaded.record]
    assert preloaded.registry.due_again(RETRY_S) == []
    assert preloaded.view == ("loading", (), False)


def test_lazy_or_permanently_failed_model_is_not_tried_without_a_request(lazy):
    lazy.report("failed", now_s=0.0)
    preloaded = Book(preload=True)
    preloaded.report("failed", error_class="CONFIG")
    assert lazy.registry.due_again(1e9) == preloaded.registry.due_again(1e9) == []


def test_load_that_takes_too_long_is_overdue_until_its_worker_is_gone(lazy):
    lazy.report("loading", slot=1, now_s=100.0, progress=0.0)
    lazy.report("loading", slot=1, now_s=150.0, progress=0.5)
    assert lazy.registry.overdue(60.0, 160.0) == []
    assert lazy.registry.overdue(60.0, 160.1) == [(lazy.record, 1)]
    lazy.registry.forget_worker(1, 0.0, blame=False)
    assert lazy.registry.overdue(60.0, 1e9) == []


# --- death and recovery --------------------------------------------------------------------------------------------------


def test_model_whose_worker_died_is_recovering_until_it_is_loaded_again(lazy):
    lazy.report("loaded")
    lazy.registry.forget_worker(0, 0.0, blame=False)
    assert lazy.view == ("loading", (), True)
    lazy.report("loading")
    assert lazy.view == ("loading", (), True)
    lazy.report("loaded")
    assert lazy.view == ("loaded", (0,), False)


def test_second_device_lost_in_a_row_during_its_load_fails_the_model(lazy):
    for num_lost in (1, 2):
        lazy.report("loading", progress=0.0)
        lazy.registry.forget_worker(0, 100.0, blame=False, is_lost=True)
        assert (lazy.view[0] == "failed") == (num_lost == 2)
    assert lazy.entry.error.message == "Model 'm' cannot be loaded: workers lost their device while it loaded"
    assert lazy.record.retry_at_s == 100.0 + 4 * RETRY_S
    assert lazy.registry.want("m", 101.0) is None


def test_devices_lost_while_another_worker_serves_the_model_are_not_its_fault(lazy):
    lazy.report("loading", slot=1)
    lazy.report("loaded", slot=1)
    for _ in range(5):
        lazy.report("loading", progress=0.0)
        lazy.registry.forget_worker(0, 100.0, blame=False, is_lost=True)
    assert (lazy.view, lazy.entry.error) == (("loaded", (1,), False), None)


def test_devices_lost_before_and_after_a_load_do_not_count_against_it(lazy):
    lazy.report("loading", progress=0.0)
    lazy.registry.forget_worker(0, 0.0, blame=False, is_lost=True)
    lazy.report("loading", progress=0.0)
    lazy.report("loaded")
    lazy.registry.forget_worker(0, 0.0, blame=False, is_lost=True)
    lazy.report("loading", progress=0.0)
    lazy.registry.forget_worker(0, 0.0, blame=False, is_lost=True)
    assert (lazy.view[0], lazy.entry.error) == ("loading", None)


def test_model_that_another_worker_still_has_is_not_recovering(lazy):
    lazy.report("loaded", slot=0)
    lazy.report("loaded", slot=1)
    lazy.registry.forget_worker(0, 0.0, blame=False)
    assert lazy.view == ("loaded", (1,), False)


def test_model_that_was_never_loaded_is_not_recovering(lazy):
    lazy.report("loading")
    lazy.registry.forget_worker(0, 0.0, blame=False)
    assert lazy.view == ("loading", (), False)


def test_model_that_cannot_be_loaded_again_is_not_recovering_and_neither_is_its_next_try(lazy):
    lazy.report("loaded")
    lazy.registry.forget_worker(0, 0.0, blame=False)
    lazy.report("failed")
    assert lazy.view == ("failed", (), False)
    lazy.registry.want("m", 1e6)
    assert lazy.view == ("loading", (), False)


# --- idle models ---------------------------------------------------------------------------------------------------------


def test_model_is_idle_when_unused_for_so_long(lazy):
    lazy.report("loaded", now_s=100.0)
    assert lazy.registry.idle(10.0, 110.0) == []
    assert lazy.registry.idle(10.0, 110.1) == [lazy.record]
    lazy.registry.touch(("m",), 110.0)
    assert lazy.registry.idle(10.0, 119.0) == []


def test_preloaded_model_is_never_idle():
    preloaded = Book(preload=True)
    preloaded.report("loaded")
    assert preloaded.registry.idle(1.0, 1e9) == []


def test_model_that_loads_somewhere_is_not_idle_but_a_failed_worker_does_not_matter(lazy):
    lazy.report("loaded", slot=0)
    lazy.report("loading", slot=1)
    assert lazy.registry.idle(1.0, 1e9) == []
    lazy.report("failed", slot=1)
    assert lazy.registry.idle(1.0, 1e9) == [lazy.record]


def test_released_model_unloads_and_can_be_wanted_again(lazy):
    lazy.report("loaded")
    lazy.registry.release(lazy.record)
    assert lazy.view == ("unloading", (0,), False)
    lazy.report("unloading")
    assert lazy.view == ("unloading", (), False)
    lazy.report("available")
    assert lazy.view == ("available", (), False)
    assert lazy.registry.want("m", 1e3) is lazy.record


def test_released_model_whose_worker_dies_is_not_recovering(lazy):
    lazy.report("loaded")
    lazy.registry.release(lazy.record)
    lazy.registry.forget_worker(0, 0.0, blame=False)
    assert lazy.view == ("available", (), False)


def test_models_keep_the_order_in_which_they_were_named():
    registry = ModelRegistry(RETRY_S)
    for name in ("z", "a", "k"):
        registry.add(ModelSpec(id=name), True, None)
    assert [entry.card.id for entry in registry.entries()] == ["z", "a", "k"]


def test_load_that_killed_its_worker_has_failed_and_cools_down(lazy):
    lazy.report("loading", progress=0.5)
    lazy.registry.forget_worker(0, 10.0, blame=True)
    assert lazy.entry.state == "failed"
    assert lazy.entry.error is not None
    assert "died while it loaded" in lazy.entry.error.message
    assert lazy.registry.want("m", 10.0 + RETRY_S - 1) is None
    assert lazy.registry.want("m", 10.0 + RETRY_S) is lazy.record


def test_load_that_waited_behind_another_is_not_to_blame_for_a_death(lazy):
    lazy.report("loading")
    lazy.registry.forget_worker(0, 10.0, blame=True)
    assert lazy.entry.state == "loading", "the restarted worker will load it"


def test_load_is_overdue_from_its_own_start_not_from_the_queue(lazy):
    lazy.report("loading", now_s=0.0)
    assert lazy.registry.overdue(60.0, 1000.0) == []
    lazy.report("loading", now_s=1000.0, progress=0.0)
    assert lazy.registry.overdue(60.0, 1059.0) == []
    assert lazy.registry.overdue(60.0, 1061.0) == [(lazy.record, 0)]


def test_preload_that_failed_is_due_again_after_its_cool_down():
    preload = Book(preload=True)
    preload.report("failed", now_s=5.0)
    assert preload.registry.due_again(5.0 + RETRY_S - 1) == []
    assert preload.registry.due_again(5.0 + RETRY_S) == [preload.record]
    assert preload.view[0] == "loading"


def test_a_model_that_was_not_fetched_yet_is_offered_with_its_profiles_and_not_judged():
    registry = ModelRegistry(RETRY_S)
    spec = ModelSpec(id="BAAI/bge-m3", profiles={"short": {"max_seq_length": 64}})
    record = registry.add(spec, False, None)
    (entry,) = registry.entries()
    assert not entry.is_read
    assert set(entry.card.profiles) == {"default", "sparse", "multivector", "short"}
    record.card = ModelCard(id="BAAI/bge-m3", kind="encoder")
    (entry,) = registry.entries()
    assert entry.is_read


def test_model_that_was_let_go_is_not_brought_back_by_a_report_that_crossed(lazy):
    lazy.report("loaded", 0)
    lazy.report("loading", 1)
    lazy.registry.release(lazy.record)  # to make room on the first worker's device
    lazy.report("loaded", 1)
    for slot in range(2):
        lazy.report("unloading", slot)
        lazy.report("available", slot)
    assert lazy.view == ("available", (), False)
    assert lazy.registry.want("m", 2.0) is lazy.record, "it can be loaded again"


def test_model_that_is_wanted_again_after_an_unload_on_request_serves_where_it_loaded(lazy):
    lazy.registry.dismiss(lazy.record)
    assert lazy.registry.want("m", 1.0) is lazy.record
    lazy.report("loading", 0, progress=0.0)
    lazy.report("loading", 1, progress=0.0)
    lazy.registry.forget_worker(0, 2.0, blame=True)
    lazy.report("loaded", 1, 3.0)
    assert lazy.view == ("loaded", (1,), False)
