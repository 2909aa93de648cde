"""One test fails where no kubectl can render the manifests, and says what to install; all others are then skipped."""

import os

from tests.kubectl import find_kubectl


def test_there_is_a_kubectl_that_renders_the_manifests() -> None:
    """Without one their tests prove nothing: install it, or set KUBEBUILDER_ASSETS."""
    assert find_kubectl(os.environ.get("KUBEBUILDER_ASSETS"), os.environ.get("PATH"))
