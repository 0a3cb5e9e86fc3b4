"""`python -m jax_mxfp4_moe`. Without the [cli] extra only `doctor` works: it must, to say what is missing."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit status, or raises SystemExit with it."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if importlib.util.find_spec("typer") is not None:
        from jax_mxfp4_moe.cli import app

        return app(arguments, prog_name="python -m jax_mxfp4_moe") or 0
    command, flags = (arguments[0], set(arguments[1:])) if arguments else ("", set())
    if command == "doctor" and flags <= {"--json", "--support", "--aiter-releases"}:
        from jax_mxfp4_moe import doctor

        return doctor.run(
            as_json="--json" in flags, support="--support" in flags, aiter_releases="--aiter-releases" in flags
        )
    print(
        "The command line needs typer: pip install 'jax_mxfp4_moe[cli]'\n"
        "Without it there is only: python -m jax_mxfp4_moe doctor [--json] [--support] [--aiter-releases]",
        file=sys.stderr,
    )
    return 2


if __name__ == "__main__":
    sys.exit(main())
