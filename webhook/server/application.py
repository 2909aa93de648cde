"""The gunicorn application, as far as its worker uses it. `webhook.server.server` builds it."""

import threading

from gunicorn.app.base import BaseApplication

from vcuda.tls import ServingCertificate
from webhook.admission import Service


class ServedApplication(BaseApplication):
    """The gunicorn application that `WebhookWorker` serves.

    ``certificate``: of new connections. ``service``: it answers reviews; None before the worker has started.
    ``stopping``: set when the worker stops. ``drain``: seconds from the failing readiness check to the last accepted
    connection.
    """

    certificate: ServingCertificate
    service: Service | None
    stopping: threading.Event
    drain: float
