"""Python in a process of its own, at the root of the repository."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.warm.worker import warm_python

ROOT = Path(__file__).parents[1]


def python(
    *arguments: object, timeout_s: float = 280, is_warm: bool = True, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Returns how `python ARGUMENTS` ended and what it printed; environment: on top of that of this process.

    is_warm: it starts with torch and transformers loaded, and so do the ranks that it launches.
    """
    own = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment}
    program = warm_python() if is_warm else sys.executable
    return subprocess.run(
        [program, *map(str, arguments)],
        cwd=ROOT,
        env=own | {"PYTHON_EXEC": program},  # torch.distributed.run starts its ranks with it
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def torchrun(
    module: str, *arguments: object, num_ranks: int = 2, is_warm: bool = True
) -> subprocess.CompletedProcess[str]:
    """Returns how `python -m MODULE ARGUMENTS` ended on several ranks, or on one without a launcher."""
    launcher = ("-m", "torch.distributed.run", "--nproc_per_node", num_ranks, "--standalone") if num_ranks > 1 else ()
    return python(*launcher, "-m", module, *arguments, is_warm=is_warm)
