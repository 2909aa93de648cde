"""Without a kubectl that can render the manifests, one test fails and says what to install. All others are skipped."""

import os

from tests.kubectl import find_kubectl


def test_there_is_a_kubectl_that_renders_the_manifests() -> None:
    """Without one the tests of the manifests prove nothing. Install kubectl, or set KUBEBUILDER_ASSETS."""
    assert find_kubectl(os.environ.get("KUBEBUILDER_ASSETS"), os.environ.get("PATH"))
