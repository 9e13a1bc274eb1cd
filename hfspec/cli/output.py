"""How every command talks: tables and JSON on standard output, errors as one panel on standard error."""

import json
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

#: The `--json` option that every command has.
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]


def print_json(value: Mapping[str, Any]) -> None:
    """Print one JSON object and nothing else."""
    typer.echo(as_text(value))


def as_text(value: Mapping[str, Any]) -> str:
    """One JSON object, for people to read, too."""
    return json.dumps(value, indent=2, ensure_ascii=False)


def print_pairs(title: str, pairs: Mapping[str, object]) -> None:
    """Print names and values under a title."""
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in pairs.items():
        table.add_row(Text(name), Text(say(value)))
    Console().print(table)


def print_error(error: Exception) -> None:
    """Print what went wrong and the way out, without a traceback."""
    title = f"hfspec: {type(error).__name__}"
    Console(stderr=True).print(Panel(Text(str(error)), title=title, title_align="left", border_style="red"))


def say(value: object) -> str:
    """A value as a person would write it."""
    match value:
        case None:
            return "–"
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:.2f}"
        case list() | tuple():
            return ", ".join(map(str, value)) or "none"
        case _:
            return str(value)
