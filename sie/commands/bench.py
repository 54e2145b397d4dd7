"""The command `sie bench`: puts a load on a running server and reports its answers.

Its imports happen when it runs, because every other `sie` command imports this file too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from sie.commands.target_options import NumberRange, named_target, target_options, url_option
from sie.commands.terminal import fail
from sie.loadgen import DIALECTS

if TYPE_CHECKING:
    from sie.loadgen.plan import Measured, Plan

_COUNT = click.IntRange(1, 100_000)
_SECONDS = NumberRange(0, 86_400)
_POSITIVE = NumberRange(0, 1_000_000, min_open=True)


@click.command()
@click.option("--model", required=True, help="Id of the model to ask.")
@url_option("http[s]://HOST:PORT, grpc[s]://HOST:PORT or unix:PATH.")
@click.option(
    "--dialect",
    type=click.Choice(DIALECTS),
    metavar="NAME",
    default=DIALECTS[0],
    show_default=True,
    help=f"Wire protocol to speak: {', '.join(DIALECTS)}.",
)
@click.option(
    "--encoding",
    type=click.Choice(["binary", "json"]),
    default="binary",
    show_default=True,
    help="binary: msgpack, base64 or raw tensors, as the dialect has it; json: plain JSON.",
)
@click.option(
    "--texts",
    default="mixed",
    show_default=True,
    help="Tokens of each text: one length, such as 12, or lengths with weights. mixed means 12:0.6,64:0.3,230:0.1.",
)
@click.option("--items", type=_COUNT, default=1, show_default=True, help="Texts in a request.")
@click.option("--label", "labels", multiple=True, help="Label to extract; repeatable.")
@click.option(
    "--connections",
    type=_COUNT,
    multiple=True,
    default=(32,),
    show_default=True,
    help="Closed loop over this number of connections; repeatable. An open loop uses the largest number.",
)
@click.option(
    "--rate",
    "rates",
    type=_POSITIVE,
    multiple=True,
    help="Open loop: requests a second, sent without waiting for answers; repeatable.",
)
@click.option(
    "--arrivals",
    type=click.Choice(["poisson", "constant"]),
    default="poisson",
    show_default=True,
    help="Open loop: the gaps between requests.",
)
@click.option(
    "--find-max",
    "find_max_ms",
    type=_POSITIVE,
    metavar="MS",
    help="Find the highest rate with p99 below MS milliseconds; begins at --rate.",
)
@click.option("--seconds", type=_SECONDS, default=10.0, show_default=True, help="Length of each load.")
@click.option("--warmup", type=_SECONDS, default=1.0, show_default=True, help="Seconds of load before the measurement.")
@click.option(
    "--within-ms", type=_POSITIVE, default=100.0, show_default=True, help="A later answer is not counted as good."
)
@click.option(
    "--distinct", type=_COUNT, default=128, show_default=True, help="Number of different requests, sent in turn."
)
@click.option(
    "--seed", type=int, default=1, show_default=True, help="Another seed gives other texts with the same lengths."
)
@target_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def bench(
    *, url: str, key: str, ca_file: str, cert_file: str, key_file: str, within_ms: float, as_json: bool, **planned: Any
) -> int:
    """Measure a running server.

    Sends requests of fixed lengths in turn, and compares each answer with the server's answer to the same request
    alone. Exit status 1: no answer was good, or one was wrong.

    \b
      sie bench --model sentence-transformers/all-MiniLM-L6-v2
      sie bench --model mine --connections 1 --connections 32 --connections 128 --texts 12
      sie bench --model mine --rate 500 --rate 1000 --within-ms 20
      sie bench --model mine --find-max 50 --dialect openai --url https://host:8443 --ca ca.pem
    """  # fmt: skip
    from sie.loadgen.dialects import WrongAnswerError
    from sie.loadgen.generator import RefusedError
    from sie.loadgen.plan import Plan, measure
    from sie.loadgen.target import TargetError

    plan = Plan(**planned)
    try:
        _check(plan, url)
        target = named_target(url, key=key, ca_file=ca_file, cert_file=cert_file, key_file=key_file)
        if not as_json:
            _print_head(plan, url)
        measured = list(measure(target, plan))
    except (TargetError, RefusedError, WrongAnswerError, ValueError) as error:
        return fail(str(error))
    _print_json(measured, plan, url, within_ms) if as_json else _print_table(measured, plan, within_ms)
    return int(not any(one.run.num_good for one in measured))


def _check(plan: Plan, url: str) -> None:
    """Raise ValueError, with the flag, for a mix that cannot be made and for a dialect that the address cannot have."""
    from sie.loadgen.sample_texts import parse_mix

    try:
        parse_mix(plan.texts)
    except ValueError as error:
        raise ValueError(f"--texts: {error}") from None
    if plan.dialect.endswith("-grpc") != url.startswith("grpc"):
        wanted = "grpc[s]://HOST:PORT" if plan.dialect.endswith("-grpc") else "http[s]://HOST:PORT or unix:PATH"
        raise ValueError(f"--dialect {plan.dialect} needs --url {wanted}, not {url!r}")


def _print_head(plan: Plan, url: str) -> None:
    from sie.loadgen.tables import describe

    click.echo(describe(plan, url) + "\n")


def _print_table(measured: list[Measured], plan: Plan, within_ms: float) -> None:
    from sie.loadgen.tables import COLUMNS, load_row, notes, render_table

    click.echo(render_table(COLUMNS, [load_row(one, plan, within_ms) for one in measured]))
    click.echo("\n" + "\n".join(notes(measured, within_ms)))


def _print_json(measured: list[Measured], plan: Plan, url: str, within_ms: float) -> None:
    import msgspec

    from sie.loadgen.tables import measured_object

    loads = [measured_object(one, plan, within_ms) for one in measured]
    page = {"url": url, "plan": plan, "within_ms": within_ms, "loads": loads}
    click.echo(msgspec.json.format(msgspec.json.encode(page)).decode())
