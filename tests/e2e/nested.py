"""Stores objects whose JSON has more levels than our decoders can read."""

from vcuda.kube import MERGE_PATCH, Kube

DEPTH = 3_000
"""The levels of the nested field. msgspec and Python's json read about 1,000, and the API server permits 10,000."""

FIELDS = b'{"f:a":' * DEPTH + b"{}" + b"}" * DEPTH


def nest(kube: Kube, path: str, api_version: str = "v1") -> None:
    """Nest the ``managedFields`` of the object at ``path``, as every user who may update the object can do."""
    manager = b'{"manager":"nested","operation":"Update","apiVersion":"%b","fieldsType":"FieldsV1","fieldsV1":%b}'
    managed = manager % (api_version.encode(), FIELDS)
    stored = kube.patch(path, b'{"metadata":{"managedFields":[%b]}}' % managed, MERGE_PATCH)
    assert FIELDS in stored
