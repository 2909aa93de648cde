"""The interface that the gunicorn application offers to its worker. `webhook.server.server` implements it."""

import threading

from gunicorn.app.base import BaseApplication

from vcuda.tls import ServingCertificate
from webhook.admission import Service


class ServedApplication(BaseApplication):
    """The gunicorn application that `WebhookWorker` serves."""

    certificate: ServingCertificate
    """The certificate for new connections."""
    service: Service | None
    """The service that answers reviews; None before the worker has started."""
    stopping: threading.Event
    """An event that is set when the worker stops."""
    drain: float
    """When the server stops, it accepts connections for this many seconds after its readiness check begins to fail."""
