"""`hfspec`: puts the commands together and turns errors made for users into a panel, or JSON, and exit code 2.

Exit codes of all commands: 0 done (`check`: a speed-up is possible), 1 not possible, 2 an error.
"""

from typing import Any

import typer
from typer.core import TyperGroup

from hfspec.cli.bench import bench
from hfspec.cli.check import check
from hfspec.cli.demo import demo
from hfspec.cli.env import env
from hfspec.cli.output import print_error, print_json
from hfspec.errors import HfspecError

_WANTS_JSON = "hfspec.wants_json"
#: What a wrong command line raises.
_USAGE_ERROR: Any = typer.BadParameter.__base__


class ErrorPanels(TyperGroup):
    """Commands whose errors for users end in a panel, or in JSON; any other error is a bug and keeps its traceback."""

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """Note how the command is to answer, also where it cannot begin."""
        ctx.meta[_WANTS_JSON] = "--json" in args
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the chosen command."""
        try:
            return super().invoke(ctx)
        except (HfspecError, OSError) as error:
            if ctx.meta[_WANTS_JSON]:
                print_json({"error": type(error).__name__, "message": str(error)})
            else:
                print_error(error)
            raise typer.Exit(2) from error
        except _USAGE_ERROR as error:  # they exit with 2, too
            if not ctx.meta[_WANTS_JSON]:
                raise
            print_json({"error": type(error).__name__, "message": error.format_message()})
            raise typer.Exit(2) from error


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
