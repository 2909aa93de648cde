"""Example data for the usage page: a company with 14 namespaces, and a cluster with hundreds of namespaces."""

import datetime
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from controller.certificates import ServedCertificate
from controller.seen_events import ReportedObject
from controller.ui.document import Document, Documents, Holder, ModelCards
from controller.ui.events import by_turns
from controller.ui.leading import without_pods
from vcuda.ledger.report import ModelUse, NamespaceUse, PodUse

NOW = datetime.datetime(2026, 3, 4, 12, tzinfo=datetime.UTC)


def ago(**span: float) -> str:
    """Return a time before `NOW` in RFC 3339. ``span``: the arguments of a timedelta."""
    return (NOW - datetime.timedelta(**span)).strftime("%Y-%m-%dT%H:%M:%SZ")


def model_use(
    model: str,
    limit: float,
    used: float = 0,
    pending: float = 0,
    memory: tuple[int, int] | None = None,
    *,
    reserved: float = 0,
) -> ModelUse:
    """Return the usage of one GPU model by a namespace. ``memory``: the used memory and its limit, in MiB."""
    memory_used, memory_limit = memory or (None, None)
    available = max(limit - used - reserved, 0)
    return ModelUse(model, limit, used, pending, available, memory_limit, memory_used, reserved=reserved)


def namespace_use(name: str, *models: ModelUse, mode: str = "enforce", unpinned: tuple[str, ...] = ()) -> NamespaceUse:
    return NamespaceUse(name, mode, models, unpinned)


@dataclass
class Sample:
    """The data that a usage page shows. A test can change it between two renderings of the page."""

    uses: dict[str, NamespaceUse] = field(default_factory=dict)
    holders: dict[str, Sequence[Holder]] = field(default_factory=dict)
    models: Sequence[ModelCards] = ()
    rejections: Sequence[ReportedObject] | None = ()
    removals: Sequence[ReportedObject] | None = None
    certificates: Sequence[ServedCertificate] | None = None
    beyond: Sequence[ReportedObject] = ()
    docs: str = ""
    grafana: str = ""

    def report(self, *uses: NamespaceUse) -> None:
        """Replace the usage reports of these namespaces."""
        self.uses = {**self.uses, **{use.namespace: use for use in uses}}

    def document(self) -> Document:
        uses = [without_pods(use) for _, use in sorted(self.uses.items())]
        rejections = None if self.rejections is None else by_turns(self.rejections)
        lists = (rejections, self.removals, self.certificates, self.beyond)
        return Document(uses, self.models, *lists, self.docs, self.grafana)

    def documents(self, now: datetime.datetime = NOW) -> Documents:
        return Documents(self.document, lambda name: self.holders.get(name, ()), now=lambda: now)


def company() -> Sample:
    """Return fourteen namespaces with four GPU models, and data for every part of the page."""
    sample = Sample()
    sample.report(
        namespace_use("ads-ranking", model_use("A100-80G", 16, 15, 1), model_use("T4", 24, 9.5)),
        namespace_use("asr-batch", model_use("T4", 16, 16), model_use("M40", 8, 6)),
        namespace_use("chat-serving", model_use("A100-80G", 24, 18.5, 0.5, (1_228_800, 1_966_080))),
        namespace_use("ci", model_use("T4", 4, 0.6), model_use("M40", 4, 1.25)),
        namespace_use("fraud", model_use("V100", 12, 5), model_use("T4", 8, 3.2)),
        namespace_use("genomics", model_use("V100", 32, 28), model_use("A100-80G", 8, 2)),
        namespace_use("interns", model_use("M40", 6, 0), model_use("T4", 2, 0.4), model_use("A100-80G", 0)),
        namespace_use("maps-vision", model_use("V100", 16, 18), model_use("T4", 12, 4), mode="warn"),
        namespace_use(
            "notebooks", model_use("T4", 20, 13.45, 0.25, reserved=1.5), model_use("M40", 12, 8.1), unpinned=("lab-7",)
        ),
        namespace_use("recsys", model_use("A100-80G", 12, 6), model_use("V100", 24, 17)),
        namespace_use("robotics", model_use("V100", 4, 0), model_use("M40", 4, 0)),
        namespace_use("search-index", model_use("T4", 10, 7.5), model_use("V100", 8, 3)),
        namespace_use("speech-research", model_use("A100-80G", 8, 8), model_use("M40", 10, 2)),
        namespace_use("video-upscale", model_use("T4", 30, 21), model_use("M40", 6, 5.5), mode="audit"),
    )
    sample.models = (
        ModelCards("A100-80G", 64, 49.5, 68),
        ModelCards("M40", 40, 22.85, 50),
        ModelCards("T4", 160, 75.65, 126),
        ModelCards("V100", 96, 71, 96),
    )
    sample.holders["notebooks"] = (
        Holder("pod", "jupyter-anna-0", "T4", 0.5, 8192, "gpu-t4-03", ago(days=2)),
        Holder("pod", "jupyter-bo-0", "T4", 0.25, 4096, "gpu-t4-03", ago(hours=5)),
        Holder("pod", "jupyter-chen-0", "M40", 0.1, 2048, "gpu-m40-1", ago(minutes=42)),
        Holder("pod", "lab-7", None, 1, 0, "", ago(days=9)),
        Holder("pod", "sweep-4xq2m", "T4", 4, 0, "gpu-t4-08", ago(hours=19)),
        Holder("pod", "sweep-9kd7c", "T4", 4, 0, "gpu-t4-11", ago(hours=19)),
        Holder("pod", "sweep-zz81p", "T4", 0.25, 4096, "", ago(seconds=8)),
    )
    t4 = "requested: 2 cards, used: 16 (0 pending), limited: 16, 2 more needed"
    a100 = "requested: 1 card, used: 8 (0 pending), limited: 8, 1 more needed"
    over = f"exceeded quota: A100-80G in namespace speech-research, {a100}"
    cores = "spec.containers[0].resources.limits[tencent.com/vcuda-core]"
    odd = f"malformed GPU request: {cores}: 150 is more than one card but not whole cards; write 100 or 200"
    full = f"exceeded quota: T4 in namespace asr-batch, {t4}"
    sample.rejections = (
        ReportedObject("asr-batch", "Job", "transcode-0304", full, ago(seconds=50), 3),
        ReportedObject("speech-research", "ReplicaSet", "whisper-eval-6d9f8b7c4", over, ago(minutes=11), 9),
        ReportedObject("fraud", "ReplicaSet", "scorer-58c4d9", odd, ago(minutes=34)),
    )
    gone = "the stale allocation of gpu-manager was removed: node gpu-t4-02 does not exist (tencent.com/predicate-node)"
    lock = "the stale allocation of hami was removed: its lock is 9 minutes old (hami.io/mutex.lock)"
    sample.removals = (
        ReportedObject("ci", "Pod", "unit-tests-8f2", gone, ago(minutes=7)),
        ReportedObject("", "Node", "gpu-m40-1", lock, ago(minutes=48)),
    )
    sample.certificates = (
        ServedCertificate("10.0.0.7:8443", end=NOW + datetime.timedelta(days=85, hours=12)),
        ServedCertificate("10.0.0.8:8443", end=NOW + datetime.timedelta(days=85, hours=12)),
    )
    return sample


def crowd(namespaces: int = 500, models: int = 8) -> Sample:
    """Return data with hundreds of namespaces, which all use every GPU model. Each call returns equal data."""
    figures = random.Random(6)  # noqa: S311  # random figures, not secrets
    names = [f"MODEL-{number}" for number in range(models)]
    sample = Sample()
    sample.report(*(_crowded(f"team-{number:04}", names, figures) for number in range(namespaces)))
    used = dict.fromkeys(names, 0.0)
    for use in (use for report in sample.uses.values() for use in report.models):
        used[use.model] += use.used
    sample.models = tuple(ModelCards(name, 4096, round(used[name], 2), 8.0 * namespaces) for name in names)
    return sample


def _crowded(namespace: str, models: Sequence[str], figures: random.Random) -> NamespaceUse:
    pods = tuple(PodUse(f"{namespace}-train-{number}", 50, 8192) for number in range(10))
    uses = [figures.randint(0, 800) / 100 for _ in models]
    of_models = zip(models, uses, strict=True)
    shown = (ModelUse(model, 8, used, 0.5, 8 - used, 65536, int(used * 8192), pods) for model, used in of_models)
    return NamespaceUse(namespace, "enforce", tuple(shown))
