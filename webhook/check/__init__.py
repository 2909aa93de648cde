"""Reviews manifests without a cluster, for the command `vcuda-webhook check`.

`files` reads the quota, the nodes and the stored objects from files, for this command and for `--standalone`.
"""
