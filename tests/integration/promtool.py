"""Evaluates PromQL expressions and alert rules with promtool."""

import json
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest


def fault_of_value(
    directory: Path, expression: str, series: Mapping[str, str], expected: float, *, at: str, rules: object = None
) -> str:
    """Return an empty text if the expression has the expected value at time ``at``, and otherwise promtool's output."""
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("no promtool on PATH: install Debian's package prometheus")
    test = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {"expr": expression, "eval_time": at, "exp_samples": [{"labels": "{}", "value": expected}]}
        ],
    }
    (directory / "rules.yaml").write_text(json.dumps(rules or {"groups": []}))
    tests = {"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": [test]}
    (directory / "test.yaml").write_text(json.dumps(tests))
    command = (program, "test", "rules", directory / "test.yaml")
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    return "" if done.returncode == 0 else done.stdout + done.stderr
