"""The server and the key of a client command."""

from __future__ import annotations

import click
import pytest

from sie.commands.target_options import DEFAULT_URL, named_target, target_options, url_option


@click.command()
@url_option("An address.")
@target_options
def show(*, url: str, **access: str) -> None:
    target = named_target(url, **access)
    click.echo(f"{target.url} {target.key or '-'}")


@pytest.mark.parametrize(
    ("args", "environ", "shown"),
    [
        ([], {}, f"{DEFAULT_URL} -"),
        ([], {"SIE_URL": "http://h:1", "SIE_API_KEY": "s"}, "http://h:1 s"),
        ([], {"BENCH_API_KEY": "b"}, f"{DEFAULT_URL} b"),
        (["--url", "http://h:1", "--key", "k"], {"SIE_URL": "http://i:1", "SIE_API_KEY": "s"}, "http://h:1 k"),
        ([], {"OPENAI_API_KEY": "o"}, f"{DEFAULT_URL} -"),
        ([], {"OPENAI_API_KEY": "o", "SIE_URL": "http://h:1"}, "http://h:1 o"),
        (["--url", DEFAULT_URL], {"OPENAI_API_KEY": "o"}, f"{DEFAULT_URL} o"),
        (["--url", "http://h:1"], {"OPENAI_API_KEY": "o", "SIE_API_KEY": "s"}, "http://h:1 s"),
    ],
)
def test_the_key_of_another_service_goes_only_to_a_server_that_was_named(
    args: list[str],
    environ: dict[str, str],
    shown: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    for variable in ("SIE_URL", "SIE_API_KEY", "BENCH_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in environ.items():
        monkeypatch.setenv(variable, value)
    show.main(args, standalone_mode=False)
    assert capsys.readouterr().out == f"{shown}\n"
