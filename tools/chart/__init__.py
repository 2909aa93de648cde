"""Writes the templates of the Helm chart from the kustomize base and its components (`make chart`)."""
