"""Builds the container image with buildah, and writes it into an archive (`make image-tar`)."""
