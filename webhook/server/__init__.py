"""The HTTPS server of the webhook: gunicorn with this project's worker class, and the ASGI application.

`worker` accepts a connection and reads a request. `app` routes the request to `webhook.admission`. `server` builds the
worker and the application.
"""
