"""Reviews manifests without a cluster, for the command `vcuda-webhook check`.

`files` reads the quota, nodes and stored objects from files, also for `vcuda-webhook serve --standalone`.
"""
