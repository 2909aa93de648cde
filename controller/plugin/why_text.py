"""The text that ``kubectl gpuquota why`` prints for people."""

from collections.abc import Iterator

from controller.plugin.why import Missing, Why
from vcuda.cli import aligned
from vcuda.quota.terms import CORES_PER_CARD


def why_lines(why: Why) -> Iterator[str]:
    """Yield the lines of text: the recent rejections, the decision about a pod now, and the missing quota."""
    yield f"{why.object} in namespace {why.namespace}"
    yield ""
    yield "Rejected in the last hour:" if why.rejected else "No rejection in the last hour."
    for each in why.rejected:
        yield f"  {each.at}  {each.kind}/{each.name}, {each.count} times: {each.message}"
    yield ""
    yield "Now:" if why.now else "Now: the workload creates no pods."
    for verdict in why.now:
        yield f"  {verdict.object} {verdict.decision}: {verdict.reason}"
    for missing in why.missing:
        yield ""
        yield from _missing_lines(missing)


def _missing_lines(missing: Missing) -> Iterator[str]:
    yield missing.sentence()
    if missing.held_by:
        rows = [
            (
                "  claim" if each.claim else "  pod",
                each.name,
                f"{each.cores / CORES_PER_CARD:g}",
                str(each.memory or ""),
            )
            for each in missing.held_by
        ]
        yield from aligned([("  HELD BY", "NAME", "CARDS", "MEMORY MiB"), *rows])
