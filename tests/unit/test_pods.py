"""What is told of the pods that the watch has seen."""

from collections.abc import Mapping
from typing import cast

from controller.pods import PodInformer
from tests.api_double import ApiDouble
from tests.builders import LABELS, stored_pod, view
from vcuda.allocations.stored_pods import StoredPod, read_stored
from vcuda.kube import Key, Reflector
from vcuda.placement.placement import Nodes


class Busy:
    """A reflector that sees one more pod of a card stored each time that it is asked anything."""

    _version = 0

    @property
    def resource_version(self) -> str:
        self._version += 1
        return str(self._version)

    def snapshot(self) -> Mapping[Key, StoredPod]:
        self._version += 1
        found = read_stored(view(stored_pod({"tencent.com/vcuda-core": 100})), LABELS)
        assert found
        return {Key(found.namespace, f"pod-{number}"): found for number in range(self._version)}


def test_a_view_counts_all_that_its_version_has_though_pods_come_while_it_is_made(api: ApiDouble) -> None:
    """A count that claimed to be newer would leave out, for good, the charge of a pod that came between."""
    watch = PodInformer(api.kube, LABELS, lambda _: None)
    watch.reflector = cast("Reflector[StoredPod]", Busy())
    [home] = watch.namespaces()
    seen = watch.observed(home, Nodes(LABELS))
    assert seen.committed["M40"].cores >= 100 * int(seen.resource_version)
