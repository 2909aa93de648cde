"""Fails if this machine has no suitable kubectl, and says what to install.

Without kubectl, the tests that render manifests are skipped.
"""

import os

from tests.kubectl import find_kubectl


def test_there_is_a_kubectl_that_renders_the_manifests() -> None:
    """Without kubectl, all tests of the manifests are skipped and do not fail."""
    assert find_kubectl(os.environ.get("KUBEBUILDER_ASSETS"), os.environ.get("PATH"))
