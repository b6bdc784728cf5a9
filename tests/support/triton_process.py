"""A process of its own for Triton, which reads TRITON_INTERPRET when it is imported."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.support.harness import ROOT


def run_here(module: str, call: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the function `call` of `module`, and return what it printed."""
    command = [sys.executable, "-c", f"from {module} import {call}; {call}()"]
    return subprocess.run(
        command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=300
    )
