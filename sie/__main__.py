"""Lets `python -m sie` be the command `sie`."""

from __future__ import annotations

import sys

from sie.commands.cli import main

sys.exit(main())
