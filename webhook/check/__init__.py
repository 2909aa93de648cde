"""Decides manifests without a cluster: `vcuda-webhook check`. `files` reads what it and `--standalone` decide by."""
