"""The usage page: who uses how much of which GPU model, read-only, for people with a browser."""
