"""One module per subcommand, each with ``add_command(commands)``; the work is done elsewhere."""

from __future__ import annotations
