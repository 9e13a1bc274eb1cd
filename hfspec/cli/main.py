"""`hfspec`: puts the commands together and turns errors made for users into a panel and exit code 1."""

from typing import Any

import typer
from typer.core import TyperGroup

from hfspec.cli.bench import bench
from hfspec.cli.check import check
from hfspec.cli.demo import demo
from hfspec.cli.env import env
from hfspec.cli.output import print_error
from hfspec.errors import HfspecError


class ErrorPanels(TyperGroup):
    """Commands whose `HfspecError`s end in a panel; any other error is a bug and keeps its traceback."""

    def invoke(self, ctx: Any) -> Any:
        """Run the chosen command."""
        try:
            return super().invoke(ctx)
        except HfspecError as error:
            print_error(error)
            raise typer.Exit(1) from error


app = typer.Typer(
    cls=ErrorPanels,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Faster Hugging Face generate() by speculative decoding, with the same tokens.\n\n"
    "Start with `hfspec demo`: it fetches a small pair of models and shows the speed-up on this machine. "
    "`hfspec check MODEL` says whether your own model can be sped up.",
)
for command in (demo, bench, check, env):
    app.command()(command)
