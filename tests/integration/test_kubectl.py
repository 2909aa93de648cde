"""Fails if this machine has no suitable kubectl, and says what to install.

The tests that render manifests do not fail then, but are skipped.
"""

import os

from tests.kubectl import find_kubectl


def test_there_is_a_kubectl_that_renders_the_manifests() -> None:
    assert find_kubectl(os.environ.get("KUBEBUILDER_ASSETS"), os.environ.get("PATH"))
