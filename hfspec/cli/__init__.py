"""The command line: one file a command, each printing a table or, with `--json`, the same as JSON."""
