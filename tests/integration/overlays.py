"""The overlays of the manifests, and the flags that their containers pass to our programs."""

import click
import pytest

from certs.cli import main as certs_cli
from controller.cli import main as controller_cli
from tests.rendered import EVERY, Json, container
from webhook.cli import main as webhook_cli

PROGRAMS = {"vcuda-webhook": webhook_cli, "vcuda-controller": controller_cli, "vcuda-certs": certs_cli}

every_overlay = pytest.mark.parametrize("overlay", EVERY, ids=lambda overlay: overlay.name)


def flags(workload: Json) -> Json:
    """Return the flags of a container, parsed by our program. Raises UsageError if the program rejects a flag."""
    # In a cluster, the kubelet inserts the values of the downward API into the arguments. Here the test inserts them.
    program, command, *rest = [each.replace("$(POD_IP)", "192.0.2.1") for each in container(workload)["args"]]
    group = PROGRAMS[program]
    assert isinstance(group, click.Group)
    named = group.commands[command]
    if isinstance(named, click.Group):
        command, *rest = rest
        named = named.commands[command]
    return dict(named.make_context(command, rest).params)
