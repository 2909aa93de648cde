"""Renders docs/reference.md from all sections."""

from __future__ import annotations

from collections.abc import Iterator

from tools.reference import claims, events, flags, keys, metrics, nodes, others, outcomes, pods, quotas
from tools.reference.sources import ROOT
from tools.reference.told import Chapter

PATH = ROOT / "docs" / "reference.md"
HEAD = """# Reference
Every flag, metric, Event, annotation, label and message. `make reference` generates this page from the code, and a test
fails if it differs. Do not edit it. How to run the system is in [operations](operations.md).

[Flags](#flags) · [Metrics](#metrics) · [Label values](#label-values) · [Events](#events) ·
[Annotations and labels](#annotations-and-labels) · [Messages](#messages)"""
FLAGS = (
    "Each flag of `vcuda-webhook`, `vcuda-controller` and `vcuda-certs` can also be set by the"
    " environment variable in the table of its command. A flag on the command line overrides the"
    " variable. `kubectl gpuquota` has only kubectl's variable, for `--kubeconfig`. `--help` of each"
    " command shows examples. `--version` prints the release of the program."
)
METRICS = (
    "The samples of a histogram have the suffixes `_bucket`, `_sum` and `_count`. The alerts on"
    " these metrics are in `manifests/components/prometheus/rules.yaml`."
)
EVENTS = "`kubectl describe` of an object shows the Events of that object."
KEYS = "In the tables of annotations and labels, a name that ends in `-` or `/` is a prefix of keys."
MESSAGES = "The code itself has produced the messages in this part, from example pods, claims and quota documents."


def render() -> str:
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
    yield from pods.chapters()
    yield from claims.chapters()
    yield from quotas.chapters()
    yield from others.chapters()
    yield from nodes.chapters()
