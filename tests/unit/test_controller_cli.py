"""What `vcuda-controller run` takes for bad input, before it talks to anybody."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from controller.cli import main


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        pytest.param(
            ["--storable-seconds", "301"],
            "--full-pass-seconds: 600 is less than twice --storable-seconds, 301.",
            id="charges that would be forgotten to be pending",
        ),
        pytest.param(["--full-pass-seconds", "239"], "--full-pass-seconds: 239 is less than", id="passes too often"),
        pytest.param(
            ["--full-pass-seconds", "240", "--quota-configmap", "/"], "'/' is not NAMESPACE/NAME", id="just so often"
        ),
        pytest.param(
            ["--quota-configmap", "gpuquota"], "--quota-configmap: 'gpuquota' is not NAMESPACE/NAME.", id="no name"
        ),
    ],
)
def test_bad_input(flags: list[str], message: str) -> None:
    result = CliRunner().invoke(main, ["run", *flags])
    assert result.exit_code == 2
    assert message in result.stderr
