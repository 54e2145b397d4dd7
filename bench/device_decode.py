"""Measure how fast a decoder of 8 billion random weights generates on a device, as shares of its limits.

Without a server, in two ways: a step begins when the one before has been read, or before that, as the engine begins steps
on a GPU. Each step reads all weights and the keys and values of every stream, so the memory's bandwidth bounds it until many
streams share the weights.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

import click

from bench.device import Session, build_random, device_options, linear_weights, load_built
from bench.local_generation import SieSteps
from bench.report import print_table
from bench.timed_generation import make_prompts, now

_SHAPE: Final = {
    "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192, "rope_theta": 500000.0,
    "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip
_TINY: Final = {
    **_SHAPE, "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
_ROUNDS = 3
_STEP_TOKENS = 4096
"""What `max_prefill_tokens` is on a GPU by default."""


class Round(NamedTuple):
    """Seconds of the prompts, and of the other tokens in steps alone and in steps ahead; whether both gave the same."""

    read_s: float
    alone_s: float
    ahead_s: float
    is_same: bool


class Plan(NamedTuple):
    """Streams at once, tokens of each prompt, and tokens of each answer."""

    streams: tuple[int, ...]
    prompt: int
    tokens: int

    @property
    def context(self) -> int:
        """Tokens of one stream at its end, rounded up to whole blocks of any size."""
        return self.prompt + self.tokens + 256


_FULL, _QUICK = Plan((1, 8, 64), 1024, 65), Plan((1, 4), 32, 6)


@click.command()
@device_options
def main(*, device: str, quick: bool, folder: Path | None, is_saved: bool) -> None:
    """Measure decoding on a device as shares of its limits."""
    plan = _QUICK if quick else _FULL
    session = Session.start(
        f"Decoding on {device}",
        f"a Llama of 8 billion random weights in bf16; {_ROUNDS} rounds; prompts of {plan.prompt} tokens, {plan.tokens} "
        "tokens a stream, of which all but the first count, in steps alone and then the same in steps ahead; the likeliest "
        "token each time; medians of the rounds; the limit is a launch, and the larger of weights, keys and values by the measured bandwidth, and products by the measured rate",
        device,
        is_quick=quick,
    )
    runner, weights = _load(session, plan)
    figures = [_measure(session, runner, weights, plan, streams) for streams in plan.streams]
    columns = ("streams", "ms/step", "tokens/s", "of the limit", "ahead ms/step", "tokens/s", "of the limit", "same tokens",
               "bound by", "prompt tokens/s", "of products")  # fmt: skip
    print_table(columns, [_cells(row) for row in figures])
    print(f"CUDA graphs: {'yes' if runner._graphs is not None else 'no'}; in place: {runner.reads_in_place}")
    session.keep("device-decode", {"decode": figures}, folder, is_saved=is_saved)
    if device != "cpu" and runner._graphs is None:
        raise click.ClickException("decode steps run without CUDA graphs")


def _load(session: Session, plan: Plan) -> tuple[Any, int]:
    """Return the runner, and how many weights its linear layers have."""
    from sie.config.generation_settings import Generation
    from sie.values.card import ModelCard
    from sie.values.generate import GenerateRule
    from sie.workers.loading.loader import load_generator

    model = build_random("llama", _TINY if session.is_quick else _SHAPE, session.device, "AutoModelForCausalLM")
    weights = linear_weights(model)  # counted before the load replaces layers
    card = ModelCard(
        id="llama-8b", kind="generator", outputs=("generate",),
        generate=GenerateRule(context_length=plan.context, eos_token_ids=(2,)),
    )  # fmt: skip
    settings = Generation(max_sequences=max(plan.streams))
    runner = load_built(model, load_generator, card, session.device, "bfloat16", settings)
    if session.device == "cpu":
        runner.decoder = None  # a compiled step takes its tokens from the host
    return runner, weights


def _measure(session: Session, runner: Any, weights: int, plan: Plan, streams: int) -> dict[str, Any]:
    room = runner.num_blocks // streams * runner.block_tokens
    if room < plan.prompt + plan.tokens:
        return {"streams": streams, "absent": f"room for {room} tokens a stream"}
    steps = SieSteps(runner, _STEP_TOKENS)
    prompts = make_prompts({"streams": streams, "prompt": plan.prompt}, runner.vocab_size)
    _round(steps, prompts, plan.tokens - 1)  # compiles and chooses what it needs
    rounds = [_round(steps, prompts, plan.tokens - 1) for _ in range(1 if session.is_quick else _ROUNDS)]
    step_s, ahead_s = (median(times) / (plan.tokens - 1) for times in zip(*(one[1:3] for one in rounds), strict=True))
    read_s = median(one.read_s for one in rounds)
    context = plan.prompt + plan.tokens / 2
    floor_s, bound = session.limits.floor_s(
        2.0 * weights * streams, runner.read_bytes + streams * context * _token_bytes(runner.model)
    )
    read_flop = 2.0 * weights * streams * plan.prompt
    return {
        "streams": streams, "prompt": plan.prompt, "step_s": step_s, "tokens_per_s": streams / step_s,
        "share_of_limit": floor_s / step_s, "ahead_step_s": ahead_s, "ahead_tokens_per_s": streams / ahead_s,
        "ahead_share_of_limit": floor_s / ahead_s, "is_same": all(one.is_same for one in rounds), "bound_by": bound, "prompt_tokens_per_s": streams * plan.prompt / read_s,
        "prompt_share_of_products": read_flop / read_s / session.limits.flops,
    }  # fmt: skip


def _round(steps: SieSteps, prompts: Any, count: int) -> Round:
    """Read the prompts, and take `count` steps alone and the same steps again ahead."""
    began = now()
    steps.read(prompts)
    read, first = now(), list(steps.last)
    for _ in range(count):
        steps.step()
    alone, found = now(), list(steps.last)
    steps.rewind(count, first)
    began_ahead = now()
    steps.step_ahead(count)
    ahead_s = now().since(began_ahead).wall_s
    return Round(read.since(began).wall_s, alone.since(read).wall_s, ahead_s, steps.last == found)


def _token_bytes(model: Any) -> int:
    """Return the bytes of a token's keys and values in all layers, in 16 bits."""
    config = model.config
    width = config.hidden_size // config.num_attention_heads
    return 2 * 2 * config.num_hidden_layers * config.num_key_value_heads * width


def _cells(row: dict[str, Any]) -> list[str]:
    if "absent" in row:
        return [str(row["streams"]), row["absent"], *[""] * 9]
    return [
        str(row["streams"]), f"{row['step_s'] * 1e3:.3f}", f"{row['tokens_per_s']:,.0f}", f"{row['share_of_limit']:.1%}",
        f"{row['ahead_step_s'] * 1e3:.3f}", f"{row['ahead_tokens_per_s']:,.0f}", f"{row['ahead_share_of_limit']:.1%}",
        "yes" if row["is_same"] else "no", row["bound_by"], f"{row['prompt_tokens_per_s']:,.0f}", f"{row['prompt_share_of_products']:.1%}",
    ]  # fmt: skip


if __name__ == "__main__":
    main()
