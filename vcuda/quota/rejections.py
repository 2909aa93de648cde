"""Writes the words of rejections and forecasts, and recognizes them again in texts.

The owner of a rejected pod keeps only the text of the rejection, in an Event or in a condition. Programs that retry or
show the rejection can read its cause only there.
"""

import re
from collections.abc import Sequence

OVER_QUOTA = "exceeded quota"
"""The first words of a rejection that ends when quota becomes free. Kubernetes' ResourceQuota writes the same words.
Argo Workflows, Tekton, Airflow, Flyte and actions-runner-controller wait only after a 403 with these words."""

_NEVER_FITS = "larger than the GPU quota"
_MALFORMED = "malformed GPU request"
_NO_MODEL = "may use no GPU model"
UNPATCHED = "/mutate was not called, or another webhook ran after it"
_MUTATE_FAILED = "/mutate failed"

# Kubernetes' ResourceQuota begins its rejections with the same words, but continues with `requested: cpu=1`. Such a
# rejection must not match.
_SHORTAGE = rf"(?:{OVER_QUOTA}: (?![^,]{{1,253}}, requested: [^ ,=]{{1,253}}=)|{_NEVER_FITS}: )"
# The name of the webhook identifies a rejection. If the webhook was renamed, the reason's first words identify it.
_REJECTION = re.compile(
    r'admission webhook "[^"]*quota\.vcuda\.io" denied the request: (?P<reason>.*)'
    rf"|(?P<known>({_SHORTAGE}|{_MALFORMED}: ).*)",
    re.DOTALL,
)
"""Matches the text by which kube-apiserver reports a rejection (``pkg/admission/plugin/webhook/errors``)."""


def over_quota(text: str) -> str:
    return f"{OVER_QUOTA}: {text}"


def never_fits(text: str) -> str:
    """Return the message for a request that is larger than the limit of each model that it may use."""
    return f"{_NEVER_FITS}: {text}"


def malformed_request(text: str) -> str:
    return f"{_MALFORMED}: {text}"


def no_model_usable(subject: str, rest: str) -> str:
    """Return the message for an object that may use no model of its quota, for example because its node has none."""
    return f"{subject} {_NO_MODEL}{rest}"


def unpatched(undone: Sequence[str], failure: str = "") -> str:
    """Return the message for an object that lacks the changes that the webhook's path /mutate makes.

    ``failure``: why /mutate failed; empty if unknown.
    """
    cause = f"{_MUTATE_FAILED}: {failure}; " if failure else f"{UNPATCHED}: "
    return cause + "; ".join(undone)


def reports_shortage(message: str) -> bool:
    """Return whether a message, such as that of an Event, contains a rejection by this system for lack of quota."""
    return re.search(_SHORTAGE, message) is not None


def may_pass_later(message: str) -> bool:
    """Return True if a retry may succeed: the message reports a rejection for quota, or a pod that lacks a patch."""
    return reports_shortage(message) or UNPATCHED in message or _MUTATE_FAILED in message


def lacks_model(message: str) -> bool:
    """Return True if a retry may succeed after a change of a node: the message reports that no model was usable."""
    return _NO_MODEL in message


def find_rejection(message: str) -> str | None:
    """Return the text of a rejection in the message of an Event; None if it reports no rejection by this system."""
    found = _REJECTION.search(message)
    return (found["reason"] or found["known"]) if found else None


def would_be_pinned(model: str, reason: str = "") -> str:
    return f"would be pinned to {model}{reason and ': '}{reason}"


_FORECAST = re.compile(f"{would_be_pinned('')}([^ :]+)(?:: |$)")


def read_forecast(warning: str) -> str:
    """Return the GPU model in a message that `would_be_pinned` wrote; empty for any other message."""
    found = _FORECAST.match(warning)
    return found[1] if found else ""


NO_QUOTA = "not enough quota"
"""The reason why a model is passed over if it lacks quota. All other reasons are about its nodes."""


def passed_over(model: str, obstacle: str) -> str:
    """Return the part of a message about the chosen GPU model that says why another model was not chosen."""
    return f"{model} ({obstacle})"


def lacks_node(model: str, reason: str) -> bool:
    """Return whether a message about the chosen model says that ``model`` had enough quota, but no suitable node."""
    return passed_over(model, "")[:-1] in reason and passed_over(model, NO_QUOTA) not in reason
