"""Every architecture of the installed release that writes text, each as a tiny random model, with and without hfspec.

`python -m tests.zoo --write docs/zoo.md` writes the table; `test_zoo.py` checks that it still holds.
"""
