"""Reviews manifests without a cluster, for the command `vcuda-webhook check`.

`files` reads the quota, nodes and stored objects from files. `standalone` serves the webhook with them, for the
command `vcuda-webhook serve --standalone`.
"""
