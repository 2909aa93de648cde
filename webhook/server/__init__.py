"""The HTTPS server: gunicorn with our worker, and the application that routes requests.

`worker` accepts a connection, and `app` routes its request to `webhook.admission`. `server` builds both.
"""
