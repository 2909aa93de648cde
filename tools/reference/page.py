"""The whole page."""

from __future__ import annotations

from collections.abc import Iterator

from tools.reference import claims, events, flags, keys, metrics, nodes, others, outcomes, pods, quotas
from tools.reference.sources import ROOT
from tools.reference.told import Chapter

PATH = ROOT / "docs" / "reference.md"
HEAD = """# Reference
Every flag, metric, Event, annotation, label and message. `make reference` writes this page from the code, and a test
fails where it differs: do not edit it. How to run the system is in [operations](operations.md).

[Flags](#flags) · [Metrics](#metrics) · [Label values](#label-values) · [Events](#events) ·
[Annotations and labels](#annotations-and-labels) · [Messages](#messages)"""
FLAGS = """Each can be set by the environment variable beside it; what is given on the command line comes first. Of
`kubectl gpuquota` only `--kubeconfig` has one, which is kubectl's own. `--help` has examples, and `--version` of each
program says which release it is of."""
METRICS = """`_bucket`, `_sum` and `_count` stand behind the name of a histogram. Cores are hundredths of a card.
What to alert on is in `manifests/components/prometheus/rules.yaml`."""
EVENTS = """On the object that each is about, so `kubectl describe` shows it."""
KEYS = """A name that ends in `-` or `/` stands for every key that begins with it."""
MESSAGES = """Each as the code says it, of made-up objects."""


def render() -> str:
    """Return the text of docs/reference.md."""
    parts = (
        HEAD,
        "## Flags\n\n" + FLAGS,
        flags.sections(),
        "## Metrics\n\n" + METRICS,
        metrics.sections(),
        "## Label values",
        outcomes.section(),
        "## Events\n\n" + EVENTS,
        events.section(),
        "## Annotations and labels\n\n" + KEYS,
        keys.section(),
        "## Messages\n\n" + MESSAGES,
        *(chapter.section() for chapter in chapters()),
    )
    return "\n\n".join(parts) + "\n"


def chapters() -> Iterator[Chapter]:
    """Yield every chapter of messages."""
    yield from pods.chapters()
    yield from claims.chapters()
    yield from quotas.chapters()
    yield from others.chapters()
    yield from nodes.chapters()
