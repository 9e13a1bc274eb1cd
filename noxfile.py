"""The supported transformers releases, each in its own environment.

`nox` runs the host contract on the older releases; `nox -s suite` runs everything offline on all of them.
"""

from pathlib import Path

import nox

OLDER_RELEASES = ("4.57.6", "5.17.0")
NEWEST_RELEASE = "5.24.0"

nox.options.default_venv_backend = "venv"
nox.options.reuse_venv = "yes"
nox.options.sessions = ["host"]


@nox.session
@nox.parametrize("transformers", OLDER_RELEASES)
def host(session: nox.Session, transformers: str) -> None:
    """What hfspec takes for granted about transformers, and the same tokens on it, for every architecture."""
    _install(session, transformers)
    parts = ("tests/contract", "tests/lossless", "tests/zoo/test_zoo.py")
    session.run("pytest", "-n", "auto", "--maxprocesses", "4", *parts, "-q", *session.posargs)


@nox.session
@nox.parametrize("transformers", (*OLDER_RELEASES, NEWEST_RELEASE))
def suite(session: nox.Session, transformers: str) -> None:
    """Every test that needs no downloaded model."""
    _install(session, transformers)
    session.run("pytest", "-n", "auto", "--maxprocesses", "4", "-m", "not real_pair", "-q", *session.posargs)


def _install(session: nox.Session, transformers: str) -> None:
    """Install hfspec and its tests at the tested versions, but for transformers itself."""
    pins = Path("constraints.txt").read_text().splitlines()
    others = Path(session.create_tmp()) / "constraints.txt"
    others.write_text("\n".join(pin for pin in pins if not pin.startswith("transformers==")) + "\n")
    session.install("-c", str(others), "-e", ".[bench,test]", f"transformers=={transformers}")
