"""The command `sie top`: a live view of a running server in the terminal.

Its imports happen when it runs, because every other `sie` command imports this file too.
"""

from __future__ import annotations

import sys
from contextlib import closing

import click

from sie.commands.target_options import named_target, target_options, url_option
from sie.commands.terminal import fail


@click.command()
@url_option("http[s]://HOST:PORT[/PATH] or unix:PATH.")
@target_options
def top(*, url: str, **access: str) -> int:
    """Watch a running server: its load, models, workers and GPUs, once a second.

    `sie ps` prints the same figures once. The dashboard at the server's `/` shows them in a browser.
    """
    from sie.commands.http_client import ServerError, frames
    from sie.loadgen.target import TargetError

    try:
        target = named_target(url, **access)
        with closing(frames(target)) as feed:
            next(feed, b"")  # report a server that cannot be watched before the terminal is cleared
    except (TargetError, ServerError) as error:
        return fail(str(error))
    if not sys.stdout.isatty():
        return fail("`sie top` needs a terminal; `sie ps` prints the state once")
    from sie.commands.top_view import TopView

    TopView(target).run()
    return 0
