"""Await a state of stored objects: LIST, then a real WATCH from there; never a sleep and another look."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Generator
from contextlib import closing
from http import HTTPStatus

from tests.e2e.rest import Json, Rest
from vcuda.kube import Kube


def await_collection(
    rest: Rest, path: str, predicate: Callable[[list[Json]], bool], timeout: float, **selectors: str
) -> list[Json]:
    """The objects at collection ``path`` once ``predicate`` holds for them all together.

    ``selectors``: labelSelector, fieldSelector. Asked after the LIST and again after each watch event.
    Raises TimeoutError after ``timeout`` seconds, with the objects as last seen.
    """
    last: list[Json] = []
    with closing(states(rest, path, time.monotonic() + timeout, selectors)) as every:
        for last in every:
            if predicate(last):
                return last
    raise TimeoutError(
        f"{path} {selectors or ''} not as awaited after {timeout:g} s; last seen:\n{json.dumps(last, indent=1)}"
    )


def states(rest: Rest, path: str, deadline: float, selectors: dict[str, str]) -> Generator[list[Json]]:
    """The collection after each change, until ``deadline`` of the monotonic clock. A watch that ends is begun anew."""
    while (left := deadline - time.monotonic()) > 0:
        listing = rest.get(path, **selectors)
        objects = {item["metadata"]["uid"]: item for item in listing["items"]}
        yield list(objects.values())
        version = listing["metadata"]["resourceVersion"]
        with closing(rest.watch(path, left, resourceVersion=version, **selectors)) as events:
            for event in events:
                if expired(event):
                    break
                follow(objects, event)
                yield list(objects.values())


def follow(objects: dict[str, Json], event: Json) -> None:
    """Apply one watch event to the objects by uid."""
    uid = event["object"]["metadata"]["uid"]
    if event["type"] == "DELETED":
        objects.pop(uid, None)
    else:
        objects[uid] = event["object"]


def expired(event: Json) -> bool:
    """Whether the watch fell out of etcd's history, so that a new LIST is due; RuntimeError for another ERROR."""
    if event["type"] != "ERROR":
        return False
    if event["object"].get("code") == HTTPStatus.GONE:
        return True
    raise RuntimeError(f"the watch ended with {event['object']}")


def streams_lists(kube: Kube) -> bool:
    """Whether the API server's feature gate WatchList is on: by default it is in 1.32, and from 1.34 on."""
    return bool(re.search(rb'kubernetes_feature_enabled\{name="WatchList",stage="\w*"\} 1', kube.get("/metrics")))
