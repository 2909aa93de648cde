"""A state machine for team ledgers. It runs the functions of `vcuda.ledger` and of the webhook on a store in memory.

Each procedure is a generator, and other procedures may write the store wherever it yields. So each write may be late,
and a write that is never continued is lost. `tests/model/teams` explores the same rules exhaustively, with small
amounts. Here, charges have fractions and memory, and replicas hold reservations.
"""

import itertools
from collections.abc import Callable, Generator, Iterable, Mapping

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from msgspec.structs import replace

from tests.team_documents import CARD, CHARGES, MODELS, NAMESPACES, TEAMS, Conflict, Document, Pod, Store, documents
from vcuda.ledger import team as rules
from vcuda.ledger.ledger import LOST, Admitted, Ledger, Pending, Reservation, admit, charges_by_model, is_older
from vcuda.ledger.team import Allotted, Membership, TeamLedger
from vcuda.quota.model import Charge, Limit, NamespaceQuota, fits, total

REPLICA = "replica"
AGES = st.sampled_from((0, 0, 0, 1, 2))
STEPS = st.sampled_from((9, 9, 9, 0, 1, 2, 3))

Procedure = Generator[None, None, None]


class TeamMachine(RuleBasedStateMachine):
    """Namespaces, teams, and procedures that any process may begin, continue or leave unfinished."""

    def __init__(self) -> None:
        super().__init__()
        self.store = Store()
        self.documents: list[Document] = []
        # The documents from `oldest` on are in use. Version 1 is the first document.
        self.oldest = 0
        self.pods: dict[str, Pod] = {}
        # For each namespace, the document and the rest of the reservation from which a replica may still admit.
        self.spendable: dict[str, tuple[int, Allotted]] = {}
        self.running: list[tuple[int, Procedure]] = []
        self.uids = map("uid-{}".format, itertools.count())
        for namespace in NAMESPACES:
            self.store.write(namespace, Ledger(), 0)
        for team in TEAMS:
            self.store.write(team, TeamLedger(), 0)

    # The steps. ``age``: how much older than the newest document the document of the process is. ``steps``: the writes
    # of a procedure before other procedures may write.

    @initialize(document=documents())
    def begin(self, document: Document) -> None:
        self.documents.append(document)

    @rule(document=documents(), back=st.booleans())
    def edit(self, document: Document, *, back: bool) -> None:
        self.documents.append(self.documents[0] if back else document)

    @rule()
    def all_processes_read_the_newest_document(self) -> None:
        self.oldest = len(self.documents) - 1
        self.running = [each for each in self.running if each[0] >= self.oldest]
        self.spendable = {name: each for name, each in self.spendable.items() if each[0] >= self.oldest}

    @rule(
        namespace=st.sampled_from(NAMESPACES),
        model=st.sampled_from(MODELS),
        charge=st.sampled_from(CHARGES),
        reserves=st.booleans(),
        age=AGES,
        steps=STEPS,
    )
    def ask(self, namespace: str, model: str, charge: Charge, age: int, steps: int, *, reserves: bool) -> None:
        self._begin(age, steps, lambda number: self._admission(namespace, model, charge, number, reserves=reserves))

    @rule(namespace=st.sampled_from(NAMESPACES), age=AGES, steps=STEPS)
    def settle(self, namespace: str, age: int, steps: int) -> None:
        self._begin(age, steps, lambda number: self._covering(namespace, number))

    @rule(team=st.sampled_from(TEAMS), age=AGES, steps=STEPS)
    def take_back(self, team: str, age: int, steps: int) -> None:
        self._begin(age, steps, lambda number: self._lowering(team, number))

    @rule(team=st.sampled_from(TEAMS), age=AGES, steps=STEPS)
    def open_team(self, team: str, age: int, steps: int) -> None:
        self._begin(age, steps, lambda number: self._opening(team, number))

    @rule(which=st.integers(0, 9), steps=st.integers(1, 4))
    def go_on(self, which: int, steps: int) -> None:
        if self.running:
            self._advance(self.running[which % len(self.running)], steps)

    @rule(which=st.integers(0, 9))
    def end_pod(self, which: int) -> None:
        if self.pods:
            self.pods.pop([*self.pods][which % len(self.pods)])

    @rule(namespace=st.sampled_from(NAMESPACES), model=st.sampled_from(MODELS))
    def run_without_admission(self, namespace: str, model: str) -> None:
        self.pods[next(self.uids)] = Pod(namespace, model, CARD, admitted=False)

    @rule(namespace=st.sampled_from(NAMESPACES), model=st.sampled_from(MODELS))
    def spend(self, namespace: str, model: str) -> None:
        """A replica admits a card from its reservation, without a read or a write."""
        document, left = self.spendable.get(namespace, (0, {}))
        if left.get(model, Charge()).covers(CARD):
            self.spendable[namespace] = document, {**left, model: left[model] - CARD}
            uid = next(self.uids)
            self.pods[uid] = Pod(namespace, model, CARD)
            self._counts(namespace)
            self._check(uid)

    @rule(namespace=st.sampled_from(NAMESPACES), flushes=st.booleans())
    def recount(self, namespace: str, *, flushes: bool) -> None:
        """Count the pods. ``flushes``: the replica gives back its reservation. Otherwise pods may be counted twice.

        A closed ledger is opened after a wait, when nothing can be admitted from a reservation any more.
        """
        version, ledger = self.store.read(namespace)
        if flushes or ledger.lost:
            self.spendable.pop(namespace, None)
            ledger = replace(ledger, reserved={})
        self.store.write(namespace, replace(ledger, committed=self.held(namespace), pending={}), version)

    @rule(lost=st.sampled_from((*NAMESPACES, *TEAMS, *[""] * 10)))
    def lose(self, lost: str) -> None:
        """A ledger is lost. The new ledger of a namespace is closed."""
        self.store.delete(lost)
        if lost in NAMESPACES:
            self.store.write(lost, Ledger(reserved={LOST: Reservation({}, 0)}), 0)

    # The procedures

    def _admission(self, namespace: str, model: str, charge: Charge, number: int, *, reserves: bool) -> Procedure:
        """Admit a pod, as the webhook does."""
        quota, uid, asked = self.documents[number].quota(namespace), next(self.uids), Pending(model, charge)
        membership = Membership.of(quota, str(number + 1))
        version, ledger = yield from self._placed(namespace, number)
        if ledger.lost or membership.is_outdated_for(ledger):
            return
        decided = admit(ledger, uid, asked, quota, enforced=True)
        if not isinstance(decided, Admitted):
            return
        drafts = [decided.ledger]
        if reserves and not ledger.reserved:
            drafts.insert(0, replace(decided.ledger, reserved={REPLICA: Reservation({model: CARD}, 0)}))
        drafts = [each for each in drafts if _within(rules.needed(each), quota.limits)] or drafts[-1:]
        if quota.team is None:
            after: Ledger | None = drafts[0]
        elif membership.allots(drafts[0], rules.needed(drafts[0])):
            after = drafts[0]
        else:
            after = yield from self._raised(namespace, membership, drafts, asked, quota)
        if after is None:
            return
        yield
        self.store.write(namespace, after, version)
        if after.reserved != ledger.reserved:
            self.spendable[namespace] = number, after.reserved[REPLICA].charges
        self.pods[uid] = Pod(namespace, model, charge, quota.team.name if quota.team else "")
        self._counts(namespace)
        self._check(uid)

    def _raised(
        self, namespace: str, membership: Membership, drafts: list[Ledger], asked: Pending, quota: NamespaceQuota
    ) -> Generator[None, None, Ledger | None]:
        """Raise the allotment in the team ledger for the first draft that fits. Return the draft with its allotment."""
        assert membership.team
        version, stored = self.store.read(membership.team.name)
        if not _is_raisable(stored, membership.version):
            return None
        others = rules.allotted_to_others(stored, namespace)
        ledger = replace(drafts[-1], pending=dict([*drafts[-1].pending.items()][:-1]))
        if not isinstance(admit(ledger, "new", asked, quota, enforced=True, others=others), Admitted):
            return None
        draft = next(
            (each for each in drafts if rules.fits_team(membership.team, others, rules.needed(each))), drafts[-1]
        )
        raised = membership.raise_allotment(stored, namespace, draft, planned=rules.needed(draft), extra={})
        yield
        self.store.write(membership.team.name, raised.team, version)
        return raised.ledger

    def _placed(self, namespace: str, number: int) -> Generator[None, None, tuple[int, Ledger]]:
        """Put the ledger into the team of this document, unless a newer one has assigned it. Return it."""
        name, written = self.documents[number].places[namespace], str(number + 1)
        version, ledger = self.store.read(namespace)
        is_right = name in ledger.allotments if name else not ledger.allotments
        if not is_right and not is_older(written, ledger.team_version):
            moved = rules.join(ledger, name, written) if name else rules.leave(ledger, written)
            yield
            version, ledger = self.store.write(namespace, moved, version), moved
            self._counts(namespace)
        return version, ledger

    def _covering(self, namespace: str, number: int) -> Procedure:
        """Raise the allotment to the usage, as the leader does."""
        quota, written = self.documents[number].quota(namespace), str(number + 1)
        version, ledger = yield from self._placed(namespace, number)
        team = quota.team
        if team is None or team.name not in ledger.allotments or is_older(written, ledger.team_version) or ledger.lost:
            return
        known = ledger.allotments[team.name].charges
        in_use = {model: usage.in_use for model, usage in ledger.usages().items()}
        if len(ledger.allotments) == 1 and rules.covers(known, in_use):
            return
        version_of_team, stored = self.store.read(team.name)
        if not _is_raisable(stored, written):
            return
        covered = rules.cover(team, stored, namespace, recorded=known, used=rules.needed(ledger))
        raised = replace(covered.team, config_version=written)
        yield
        if not covered.fits:
            self.store.write(team.name, replace(raised, closed="closed"), version_of_team)
            return
        self.store.write(team.name, raised, version_of_team)
        yield
        after = replace(
            rules.allot(ledger, team.name, covered.charges), team_version=max(written, ledger.team_version, key=int)
        )
        self.store.write(namespace, after, version)
        self._counts(namespace)

    def _lowering(self, team: str, number: int) -> Procedure:
        """Take back what is allotted and not used, as the leader does."""
        written = str(number + 1)
        version, stored = self.store.read(team)
        if not _is_raisable(stored, written):
            return
        lowered = stored
        for namespace in stored.allotted:
            yield
            if self.documents[number].places[namespace] == team:
                yield from self._placed(namespace, number)
            ledger_version, ledger = self.store.read(namespace)
            if team not in ledger.allotments and self.documents[number].places[namespace] != team:
                lowered = rules.lowered(lowered, namespace, {})
            elif team in ledger.allotments and not ledger.lost:
                self.store.write(namespace, rules.shrunk(ledger, team), ledger_version)
                lowered = rules.lowered(lowered, namespace, rules.needed(ledger))
        yield
        if lowered != stored:
            self.store.write(team, replace(lowered, config_version=written), version)
            self._taken_back(team, number, lowered)

    def _taken_back(self, team: str, number: int, lowered: TeamLedger) -> None:
        for uid, pod in self.pods.items():
            elsewhere = self.documents[number].places[pod.namespace] != team
            if pod.team == team and elsewhere and pod.namespace not in lowered.allotted:
                self.pods[uid] = pod._replace(team="")
        self._counts(*NAMESPACES)

    def _opening(self, team: str, number: int) -> Procedure:
        """Open a closed or missing team ledger by a count of all namespaces."""
        version, stored = self.store.read(team)
        if stored is None:
            version, stored = self.store.write(team, TeamLedger(closed="new"), 0), TeamLedger(closed="new")
        if not stored.closed or is_older(str(number + 1), stored.config_version):
            return
        allotted = dict(stored.allotted)
        for namespace in NAMESPACES:
            yield
            if self.documents[number].places[namespace] == team:
                yield from self._placed(namespace, number)
            ledger_version, ledger = self.store.read(namespace)
            is_member = team in ledger.allotments or self.documents[number].places[namespace] == team
            if ledger.lost and is_member and namespace not in allotted:
                return  # wait until the ledger of the namespace is open
            if team in ledger.allotments:
                self.store.write(namespace, rules.unchecked(ledger, team), ledger_version)
                needs = rules.needed(ledger)
                allotted[namespace] = rules.largest(needs, allotted.get(namespace, {})) if ledger.lost else needs
        yield
        self.store.write(team, replace(stored, allotted=allotted, closed="", counter=stored.counter + 1), version)
        self._counts(*NAMESPACES)

    # The truth

    def held(self, *namespaces: str) -> Allotted:
        return self._charges(lambda pod: pod.namespace in namespaces)

    def _charges(self, chosen: Callable[[Pod], bool]) -> Allotted:
        return charges_by_model((pod.model, pod.charge) for pod in self.pods.values() if chosen(pod))

    def _counts(self, *namespaces: str) -> None:
        """Note which team counts the pods of these namespaces.

        A team counts the pods of a model from the moment at which the ledger of the namespace and the team ledger cover
        all of them. It counts them until a process with a newer document has taken the namespace out of the team.
        """
        for namespace in namespaces:
            ledger = self.store.read(namespace)[1]
            reserved = self.spendable.get(namespace, (0, {}))[1]
            held = charges_by_model([*self.held(namespace).items(), *reserved.items()])
            counting = {model: self._counting(namespace, ledger, model, charge) for model, charge in held.items()}
            for uid, pod in self.pods.items():
                if pod.namespace == namespace:
                    places = {*ledger.allotments, self.documents[-1].places[namespace]}
                    team = pod.team if pod.team in places else ""
                    self.pods[uid] = pod._replace(team=counting[pod.model] or team)

    def _counting(self, namespace: str, ledger: Ledger, model: str, held: Charge) -> str:
        """Return the team that counts all pods of a model; empty if none does."""
        found = ""
        for team in ledger.allotments:
            stored = self.store.read(team)[1]
            allotted = stored.allotted.get(namespace, {}) if stored and not stored.closed else {}
            needed = rules.needed(ledger).get(model, Charge())
            if allotted.get(model, Charge()).minimum(needed).covers(held):
                found = team
        return found

    def _check(self, uid: str) -> None:
        """Check an admission: all admitted and counted pods must be within the limits of a document that is in use."""
        pod, used = self.pods[uid], self.documents[self.oldest :]
        own = self._charges(lambda each: each.admitted and each[:2] == pod[:2])
        assert any(_within(own, {pod.model: each.own}) for each in used), f"{pod.namespace} uses {own}"
        if team := pod.team:
            charges = self._charges(lambda each: each.team == team)
            only = {pod.model: charges[pod.model]}
            assert any(_within(only, each.limits[team]) for each in used), f"{team} uses {charges}"
            cores = total(charges.values()).cores
            assert any(not (most := each.totals[team]) or cores <= (most.cores or 0) for each in used), (
                f"{team}: {cores}"
            )

    @invariant()
    def each_team_ledger_allots_what_the_ledgers_may_use(self) -> None:
        for team in TEAMS:
            _, stored = self.store.read(team)
            for namespace in NAMESPACES if stored and not stored.closed else ():
                allotted, ledger = stored.allotted.get(namespace, {}), self.store.read(namespace)[1]
                own = ledger.allotments[team].charges if team in ledger.allotments else {}
                pods = [pod for pod in self.pods.values() if (pod.namespace, pod.team) == (namespace, team)]
                used = charges_by_model((pod.model, pod.charge) for pod in pods)
                assert rules.covers(allotted, own), (team, namespace, allotted, own)
                assert rules.covers(allotted, used), (team, namespace, allotted, used)

    def teardown(self) -> None:
        """All processes go on with the newest document. Then exactly the usage stays allotted."""
        self.all_processes_read_the_newest_document()
        self.running, newest = [], len(self.documents) - 1
        for _ in range(4):
            for namespace in NAMESPACES:
                self.recount(namespace, flushes=True)
            for each in (
                *(self._opening(team, newest) for team in TEAMS),
                *(self._covering(namespace, newest) for namespace in NAMESPACES),
                *(self._opening(team, newest) for team in TEAMS),
                *(self._covering(namespace, newest) for namespace in NAMESPACES),
                *(self._lowering(team, newest) for team in TEAMS),
            ):
                _finish(each)
        for team in TEAMS:
            _, stored = self.store.read(team)
            assert not stored.closed
            expected = {each: self.held(each) for each in NAMESPACES if self.documents[-1].places[each] == team}
            assert {name: each for name, each in stored.allotted.items() if each} == {
                n: e for n, e in expected.items() if e
            }

    def _begin(self, age: int, steps: int, begin: Callable[[int], Procedure]) -> None:
        number = len(self.documents) - 1 - age
        if number >= self.oldest:
            procedure = number, begin(number)
            self.running.append(procedure)
            self._advance(procedure, steps + 1)

    def _advance(self, procedure: tuple[int, Procedure], steps: int) -> None:
        try:
            for _ in range(steps):
                next(procedure[1])
        except (StopIteration, Conflict):
            self.running.remove(procedure)


def _is_raisable(stored: TeamLedger | None, written: str) -> bool:
    return stored is not None and not stored.closed and not is_older(written, stored.config_version)


def _within(charges: Allotted, limits: Mapping[str, Limit]) -> bool:
    return all(fits(limits[model], charge, Charge()) for model, charge in charges.items())


def _finish(procedure: Iterable[None]) -> None:
    try:
        for _ in procedure:
            pass
    except Conflict:
        pass
