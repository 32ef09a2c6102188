"""Runs `lockstep bench`."""

import json
import subprocess
import tempfile
from collections.abc import Sequence
from typing import Any


def bench(
    binary: str,
    options: Sequence[str],
    lines: Sequence[Sequence[int]] | None = None,
    cache_dir: str | None = None,
    launcher: Sequence[str] = (),
) -> dict[str, Any]:
    """Its report: over so many rows of each expert, where `lines` are given, a line each."""
    command = [*launcher, binary, "bench", "--json", *options, *(["--cache-dir", cache_dir] if cache_dir else [])]
    with tempfile.NamedTemporaryFile("w", suffix=".json") as counts:
        if lines is not None:
            json.dump(lines, counts)
            counts.flush()
            command += ["--counts", counts.name]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)
