"""Over any history of pods, directories, views, clocks and crashes: none of a pod that exists goes, all others do."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from controller.node.age import Now, ObservedAge
from controller.node.names import VM_DIRECTORIES, FileKind, Keep, KeepReason, PodPresence, keep_in_root

GRACE = 300.0
FORM = VM_DIRECTORIES["gpu-manager"]
HOUR = 3600.0

any_pod = st.integers(0, 2)


def uid_of(number: int) -> str:
    """The uid of the pod with this number: no two pods ever have the same."""
    return f"00000000-0000-4000-8000-{number:012x}"


@dataclass
class Disk:
    """Directories by name: the inode and the time of change of each."""

    directories: dict[str, tuple[int, float]] = field(default_factory=dict)
    inodes: count[int] = field(default_factory=count)

    def make(self, name: str, stamp: float) -> None:
        """Make a directory, as a device plugin does when its pod starts."""
        self.directories.setdefault(name, (next(self.inodes), stamp))


class Node(RuleBasedStateMachine):
    """A node, its pods in the API and in kubelet, and an agent that decides as `controller.node.sweep` does."""

    def __init__(self) -> None:
        super().__init__()
        self.disk = Disk()
        self.api: set[str] = set()
        self.kubelet: set[str] = set()
        self.seen: frozenset[str] = frozenset()  # as the agent's watch knows it, which may lag
        self.steady, self.offset = 0.0, 1.7e9
        self.fresh = count()
        self.agent = ObservedAge(GRACE, 2)
        self.last_there: dict[str, float] = {}
        self.waited: list[float] = []  # how long after the end of its pod each directory went, in seconds

    @property
    def now(self) -> Now:
        """The time by both clocks."""
        return Now(self.steady + self.offset, self.steady)

    @rule(kubelet=st.booleans())
    def a_pod_starts(self, kubelet: bool) -> None:
        uid = uid_of(next(self.fresh))
        self.api.add(uid)
        if kubelet:
            self.kubelet.add(uid)
        self.disk.make(uid, self.now.wall)

    @rule(which=any_pod, api=st.booleans(), kubelet=st.booleans())
    def a_pod_ends(self, which: int, api: bool, kubelet: bool) -> None:
        """It leaves the API, or kubelet's directory, or both."""
        if api:
            self.api.discard(uid_of(which))
        if kubelet:
            self.kubelet.discard(uid_of(which))

    @rule(which=any_pod)
    def a_plugin_makes_the_directory_of_a_pod_again(self, which: int) -> None:
        if uid_of(which) in self.api | self.kubelet:
            self.disk.directories.pop(uid_of(which), None)
            self.disk.make(uid_of(which), self.now.wall)

    @rule()
    def the_watch_catches_up(self) -> None:
        self.seen = frozenset(self.api)

    @rule(seconds=st.sampled_from([1.0, 60.0, GRACE, HOUR]))
    def time_passes(self, seconds: float) -> None:
        self.steady += seconds

    @rule(seconds=st.sampled_from([-1e8, -HOUR, HOUR, 1e8]))
    def the_wall_clock_is_set(self, seconds: float) -> None:
        self.offset += seconds

    @rule()
    def the_agent_is_killed_and_started_again(self) -> None:
        self.agent = ObservedAge(GRACE, 2)
        self.seen = frozenset(self.api)

    @rule(fails=st.booleans(), killed_after=st.sampled_from([0, 1, 100]))
    def it_sweeps(self, fails: bool, killed_after: int) -> None:
        self.sweep(PodPresence(self.seen, frozenset(self.kubelet)), fails=fails, most=killed_after)

    @rule(times=st.integers(1, 3))
    def it_sweeps_again_and_again(self, times: int) -> None:
        for _ in range(times):
            self.the_watch_catches_up()
            self.it_sweeps(fails=False, killed_after=100)
            self.steady += 60

    @rule()
    def it_sweeps_without_a_view(self) -> None:
        self.sweep(PodPresence(frozenset(), None, Keep(KeepReason.PODS_UNKNOWN)), fails=False, most=100)

    @rule()
    def it_sweeps_without_kubelet_s_word(self) -> None:
        self.sweep(PodPresence(self.seen, None, Keep(KeepReason.KUBELET_UNKNOWN)), fails=False, most=100)

    def sweep(self, presence: PodPresence, *, fails: bool, most: int) -> None:
        """Decide as the agent does, the last look at API and kubelet included; it may die after some moves."""
        if presence.unknown is None:
            self.agent.begin(self.now)
        for name, (inode, stamp) in list(self.disk.directories.items()):
            if keep_in_root(FORM, name, FileKind.DIRECTORY, presence) or self.agent.hold(name, inode, stamp):
                continue
            if name in self.api or name in self.kubelet:
                continue
            if fails:
                self.agent.put_off(name, Keep(KeepReason.ERROR))
                continue
            if most == 0:
                self.the_agent_is_killed_and_started_again()
                return
            most -= 1
            assert presence.unknown is None
            del self.disk.directories[name]
            self.waited.append(self.steady - self.last_there[name])

    @invariant()
    def no_directory_of_a_pod_that_exists_or_has_just_gone_is_removed(self) -> None:
        there = self.api | self.kubelet
        self.last_there.update(dict.fromkeys(there, self.steady))
        assert there <= set(self.disk.directories)
        assert all(seconds >= GRACE for seconds in self.waited)

    def teardown(self) -> None:
        """Let the cluster come to rest: in the end just the directories of pods that exist are there."""
        self.the_watch_catches_up()
        for _ in range(10):
            self.steady += HOUR
            self.sweep(PodPresence(self.seen, frozenset(self.kubelet)), fails=False, most=1000)
        assert set(self.disk.directories) == self.api | self.kubelet


TestNode = Node.TestCase
TestNode.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)
