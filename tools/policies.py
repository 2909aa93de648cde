"""Writes vcuda/policies.json: the policies of manifests/base, with which the controller compares the stored policies.

Run by `make chart`. A unit test fails if the file is outdated.
"""

import json
from pathlib import Path

import yaml

from vcuda.registration import POLICY, comparable

ROOT = Path(__file__).parents[1]
SOURCES = ("policies.yaml", "usage-policy.yaml")
WRITTEN = ROOT / "vcuda" / "policies.json"


def declared() -> str:
    """Return the content of the file."""
    texts = ((ROOT / "manifests" / "base" / name).read_text(encoding="utf-8") for name in SOURCES)
    manifests = [manifest for text in texts for manifest in yaml.safe_load_all(text) if manifest["kind"] == POLICY]
    specs = {manifest["metadata"]["name"]: comparable(manifest["spec"]) for manifest in manifests}
    return json.dumps(specs, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    WRITTEN.write_text(declared(), encoding="utf-8")
