from __future__ import annotations

import random

import pytest

from sie.workers.scheduling.ceilings import lower_ceiling
from sie.workers.scheduling.scheduler import State, own_name, plan_step
from sie.workers.scheduling.waiting import Budget, Step, WaitingItem

NEVER_NS = 1 << 62
BUDGET = Budget(max_tokens=100, max_items=8, max_age_ns=1000)


def item(
    num_tokens: int, *, arrival_ns: int = 0, deadline_ns: int = NEVER_NS, request=None, alone=False
) -> WaitingItem:
    return WaitingItem(request or object(), 0, num_tokens, arrival_ns, deadline_ns, alone)


def state_of(*items: WaitingItem, model: str = "m") -> State:
    state = State()
    for one in items:
        state.add(model, one)
    return state


def take(state: State, budget: Budget = BUDGET, now_ns: int = 0) -> Step:
    """Plan a step, apply it and charge for it, as the loop does; a token takes a nanosecond."""
    step = plan_step(state, budget, now_ns)
    assert step is not None
    state.remove(step)
    state.charge(step.model, step.num_tokens)
    return step


def sizes(step: Step | None) -> list[int]:
    assert step is not None
    return [one.num_tokens for one in step.items]


def test_empty_state_has_no_step():
    assert plan_step(State(), BUDGET, 0) is None
    assert not State()


def test_lone_item_starts_at_once():
    assert sizes(plan_step(state_of(item(5, arrival_ns=7)), BUDGET, 7)) == [5]


def test_plan_changes_nothing():
    state = state_of(item(60), item(60))
    assert plan_step(state, BUDGET, 0) == plan_step(state, BUDGET, 0)
    assert len(state.queues["m"]) == 2


def test_budget_that_is_met_exactly_is_used_whole():
    state = state_of(item(50), item(30), item(20), item(1))
    step = take(state)
    assert sum(sizes(step)) <= BUDGET.max_tokens
    assert sizes(plan_step(state_of(item(50), item(30), item(20)), BUDGET, 0)) == [50, 30, 20]
    assert sizes(plan_step(state_of(item(50), item(30), item(21)), BUDGET, 0)) == [21, 30]


def test_item_larger_than_the_budget_runs_by_itself():
    state = state_of(item(101))
    assert sizes(take(state)) == [101]
    state = state_of(item(500), item(10), item(10))
    assert [sizes(take(state)), sizes(take(state))] == [[10, 10], [500]]


def test_number_of_items_is_bounded_too():
    state = state_of(*[item(1) for _ in range(20)])
    assert [len(take(state).items) for _ in range(3)] == [8, 8, 4]
    assert not state


def test_items_without_tokens_are_bounded_by_their_number():
    assert len(take(state_of(*[item(0) for _ in range(20)])).items) == 8


def test_all_that_fits_is_taken_in_order_of_arrival():
    assert sizes(take(state_of(item(30), item(10), item(20)))) == [30, 10, 20]


def test_shorter_items_overtake_longer_ones_when_not_all_fit():
    state = state_of(item(90), item(20), item(60), item(10))
    assert [sizes(take(state)) for _ in range(2)] == [[20, 10, 60], [90]]


def test_items_that_arrive_later_overtake_with_three_times_a_longer_one_s_work_at_most():
    state = state_of(item(20), *[item(1) for _ in range(100)])
    order = [one.num_tokens for _ in range(20) if state for one in take(state).items]
    assert order.index(20) == 3 * 20 - 4, "the next one is behind it by as much as it is shorter"


def test_item_that_leads_goes_before_every_shorter_one():
    request = object()
    leader = WaitingItem(request, 0, 90, 0, NEVER_NS, leads=True)
    followers = [WaitingItem(request, index, 10, 0, NEVER_NS) for index in (1, 2)]
    state = state_of(item(5), leader, *followers, item(4))
    assert take(state).items[0] is leader
    assert sizes(take(state)) == [10, 10]


def test_item_over_its_age_goes_before_every_shorter_one():
    old, new = item(90, arrival_ns=0), [item(10, arrival_ns=500) for _ in range(20)]
    assert sizes(plan_step(state_of(old, *new), BUDGET, 1000)) == [10] * 8
    assert sizes(plan_step(state_of(old, *new), BUDGET, 1001)) == [90, 10]


def test_overdue_items_keep_their_order_among_each_other():
    state = state_of(item(60), item(50), item(40))
    assert [sizes(take(state, now_ns=5000)) for _ in range(2)] == [[60], [50, 40]]


def test_items_past_their_deadline_are_named_and_not_run():
    late, good = item(5, deadline_ns=10), item(6, deadline_ns=11)
    state = state_of(late, good)
    step = take(state, now_ns=10)
    assert step.expired == [late]
    assert step.items == [good]
    assert not state


def test_step_may_hold_expired_items_only():
    state = state_of(item(5, deadline_ns=1))
    step = take(state, now_ns=1)
    assert (step.items, len(step.expired), step.num_tokens) == ([], 1, 0)
    assert plan_step(state, BUDGET, 1) is None


def test_only_the_oldest_items_are_compared():
    budget = Budget(max_tokens=100, max_items=8, max_age_ns=1000, window_items=3)
    state = state_of(*[item(50) for _ in range(5)], item(1))
    assert 1 not in sizes(plan_step(state, budget, 0))


def test_alone_request_shares_no_step_with_others():
    suspect = object()
    mine = [item(1, request=suspect, alone=True) for _ in range(3)]
    state = state_of(item(2), *mine, item(3))
    steps = [take(state) for _ in range(2)]
    assert [sizes(step) for step in steps] == [[2, 3], [1, 1, 1]]


def test_alone_request_with_more_than_a_step_holds_stays_alone():
    suspect = object()
    state = state_of(*[item(60, request=suspect, alone=True) for _ in range(3)], item(3))
    assert [sizes(take(state)) for _ in range(4)] == [[60], [60], [60], [3]]


def test_two_alone_requests_do_not_share_either():
    state = state_of(item(1, alone=True), item(1, alone=True))
    assert [sizes(take(state)) for _ in range(2)] == [[1], [1]]


def test_alone_request_is_not_starved_by_short_ones_that_keep_coming():
    suspect = item(1, alone=True)
    state = state_of(item(90), suspect)
    for now_ns in range(0, 5000, 100):
        for _ in range(20):
            state.add("m", item(10, arrival_ns=now_ns))
        if suspect in take(state, now_ns=now_ns).items:
            return
    pytest.fail("the alone request never ran")


def test_long_item_waits_no_longer_than_its_age_and_what_came_before_it():
    """1,000 steps under an overload of short texts."""
    budget = Budget(max_tokens=100, max_items=8, max_age_ns=50)
    state, waits = State(), []
    for now_ns in range(1000):
        num_waiting = len(state.queues.get("m", ()))
        for _ in range(min(9, 200 - num_waiting)):  # admission bounds a queue
            state.add("m", item(10, arrival_ns=now_ns))
        if now_ns % 100 == 0:
            state.add("m", item(95, arrival_ns=now_ns))
        step = take(state, budget, now_ns)
        waits += [now_ns - one.arrival_ns for one in step.items if one.num_tokens == 95]
    assert len(waits) >= 9
    assert max(waits) <= 50 + 200 // 8 + 2


def test_items_put_back_are_first_again_in_order():
    state = state_of(item(40), item(30), item(20), item(99))
    step = plan_step(state, BUDGET, 0)
    assert sizes(step) == [20, 40, 30]
    state.remove(step)
    state.requeue("m", step.items)
    assert [one.num_tokens for one in state.queues["m"]] == [20, 40, 30, 99]


def test_items_can_be_put_back_when_nothing_else_waits():
    state = state_of(item(40))
    step = take(state)
    assert not state
    state.requeue("m", step.items)
    assert sizes(take(state)) == [40]


def test_items_of_a_lost_client_leave_every_queue():
    state = state_of(item(1, request="gone"), item(2, request="here"))
    state.add("n", item(3, request="gone"))
    assert sorted(one.num_tokens for one in state.drop_where(lambda request: request == "gone")) == [1, 3]
    assert list(state.queues) == ["m"]
    assert sizes(take(state)) == [2]


# --- between models ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_two_busy_models_are_served_alike_to_within_one_step(seed: int):
    """Over 1,000 steps; one model has long items and the other short ones, one is often caught with an empty queue."""
    rng = random.Random(seed)
    state, served = State(), {"m": 0, "n": 0}
    for now_ns in range(1000):
        if len(state.queues.get("m", ())) < 3:
            state.add("m", item(rng.randint(50, 100), arrival_ns=now_ns))
        while len(state.queues.get("n", ())) < 20:
            state.add("n", item(rng.randint(1, 10), arrival_ns=now_ns))
        step = take(state, now_ns=now_ns)
        served[step.model] += step.num_tokens
        assert abs(served["m"] - served["n"]) <= BUDGET.max_tokens


def _serve_busy_model(state: State, num_steps: int) -> None:
    for _ in range(num_steps):
        while len(state.queues.get("busy", ())) < 10:
            state.add("busy", item(20))
        take(state)


@pytest.mark.parametrize("is_caught_empty", [False, True])
def test_model_that_wakes_has_saved_up_no_claim(is_caught_empty: bool):
    """Whether or not the busy model's queue is empty at that moment, which it is whenever its step took all."""
    state = state_of(item(10), model="quiet")
    take(state)
    _serve_busy_model(state, 100)
    if is_caught_empty:
        while state:
            take(state)
    for _ in range(50):
        state.add("quiet", item(100))
    for _ in range(50):
        state.add("busy", item(100))
    order = [take(state).model for _ in range(20)]

    assert 9 <= order.count("busy") <= 11


def test_model_that_wakes_is_served_next_but_one():
    state = State()
    _serve_busy_model(state, 100)
    state.add("quiet", item(10))
    assert "quiet" in (take(state).model, take(state).model)


def test_items_that_could_not_run_cost_their_model_nothing():
    state = state_of(*[item(100) for _ in range(30)], model="blocked")
    for _ in range(30):
        step = plan_step(state, BUDGET, 0)
        state.remove(step)
        state.requeue("blocked", step.items)
    for _ in range(30):
        state.add("other", item(100))
    order = [take(state).model for _ in range(20)]

    assert order.count("blocked") == 10


def rows(
    batch_key: object, num_rows: int = 1, *, max_rows: int = 4, num_tokens: int = 1, alone: bool = False
) -> WaitingItem:
    return WaitingItem(
        object(), 0, num_tokens, 0, NEVER_NS, alone, batch_key=batch_key, num_rows=num_rows, max_rows=max_rows
    )


def test_only_alike_items_share_a_step_with_the_oldest():
    a, b, c, d = rows("x"), rows("y"), rows("x"), rows("y")
    state = state_of(a, b, c, d)
    assert take(state).items == [a, c]
    assert take(state).items == [b, d]


def test_rows_of_a_step_are_bounded_and_smaller_items_fill_it():
    a, b, c, d = rows("x", 3), rows("x", 2), rows("x", 1), rows("x", 1)
    state = state_of(a, b, c, d)
    assert take(state).items == [a, c]
    assert take(state).items == [b, d]


def test_an_item_of_more_rows_than_a_step_may_have_still_runs():
    assert take(state_of(rows("x", 9), rows("x"))).num_tokens == 1


def test_tokens_do_not_bound_a_step_of_alike_items_but_their_number_does():
    many = [rows("x", max_rows=100, num_tokens=1000) for _ in range(10)]
    assert len(take(state_of(*many)).items) == BUDGET.max_items


def test_a_model_whose_steps_took_too_long_has_smaller_steps_of_alike_items():
    many = [rows("x", max_rows=100, num_tokens=10) for _ in range(10)]
    state = state_of(*many)
    state.max_tokens["m"] = 40.5
    assert len(take(state).items) == 4
    state.max_tokens["m"] = 1.0
    assert len(take(state).items) == 1
    del state.max_tokens["m"]
    assert len(take(state).items) == 5


def test_a_model_whose_steps_took_too_long_has_smaller_steps_of_texts():
    state = state_of(item(30), item(30), item(30))
    for max_tokens, expected in ((60.9, [30, 30]), (1.0, [30]), (1e9, [30, 30, 30])):
        state.max_tokens.update(m=max_tokens, other=1.0)
        assert sizes(plan_step(state, BUDGET, 0)) == expected


def test_a_model_that_found_no_memory_has_smaller_steps_of_alike_items():
    state = state_of(*[rows("x", max_rows=100, num_tokens=10) for _ in range(10)])
    state.ceilings["m"] = lower_ceiling(None, 60, 0)
    assert len(take(state).items) < 6


def test_an_item_that_must_run_alone_shares_no_step_with_those_like_it():
    first, suspect, last = rows("x"), rows("x", alone=True), rows("x")
    state = state_of(first, suspect, last)
    assert take(state).items == [first, last]
    assert take(state).items == [suspect]


# --- models that decide themselves what their step runs -----------------------------------------------------------------


ONE_ITEM = Budget(max_tokens=1, max_items=1, max_age_ns=10**12)


@pytest.mark.parametrize("other", ["e", "g"])
def test_model_that_stands_shares_the_time_with_items_that_wait_its_own_among_them(other):
    state = State()
    state.activate("g")
    order = ""
    for number in range(30):
        state.add(other, WaitingItem(None, number, 1, number, 10**9))
    for _ in range(30):
        step = plan_step(state, ONE_ITEM, 100)
        assert step.model == ("g" if step.is_own else other)
        order += "o" if step.is_own else "i"
        if not step.is_own:
            state.remove(step)
        state.charge(own_name("g") if step.is_own else other, 10 if step.is_own else 20)
    assert order.count("o") == 20
    assert "ii" not in order


def test_model_that_stands_late_has_saved_up_nothing():
    state = State()
    state.activate("a")
    for _ in range(10):
        state.charge(own_name("a"), 100)
    state.activate("b")
    order = ""
    for _ in range(6):
        step = plan_step(state, ONE_ITEM, 0)
        order += step.model
        state.charge(own_name(step.model), 100)
    assert order == "bababa"


def test_state_is_true_while_a_model_stands():
    state = State()
    assert not state
    state.activate("g")
    assert state
    state.deactivate("g")
    assert plan_step(state, ONE_ITEM, 0) is None


def running(num: int) -> list[WaitingItem]:
    items = [item(0) for _ in range(num)]
    for one in items:
        one.is_running = True
    return items


def test_items_that_have_begun_go_into_every_step_and_cost_nothing():
    begun = running(3)
    state = state_of(*begun, item(70), item(70), item(30))
    assert sizes(take(state)) == [0, 0, 0, 30, 70]
    state.requeue("m", begun)
    assert sizes(take(state)) == [0, 0, 0, 70]


def test_those_that_have_begun_leave_less_room_for_others():
    begun = running(BUDGET.max_items - 2)
    state = state_of(*begun, *(item(1) for _ in range(4)))
    step = take(state)
    assert len(step.items) == BUDGET.max_items
    for one in step.items:
        one.is_running = True
    state.requeue("m", step.items)
    assert len(take(state).items) == BUDGET.max_items, "the others wait"


def test_a_large_item_joins_those_that_have_begun():
    assert sizes(take(state_of(*running(2), item(500)))) == [0, 0, 500]
    assert sizes(take(state_of(*running(2)))) == [0, 0]


def test_an_item_that_runs_alone_waits_for_those_that_have_begun_and_for_no_other():
    begun = running(2)
    state = state_of(item(7), *begun, item(5, alone=True), item(7))
    assert sizes(take(state)) == [0, 0, 7, 7]
    state.requeue("m", begun)
    for _ in range(3):
        state.add("m", item(9))
        assert sizes(take(state)) == [0, 0]
        state.requeue("m", begun)
    state.remove(Step("m", begun, 0, []))
    assert sizes(take(state)) == [5]
    assert sizes(take(state)) == [9, 9, 9]
