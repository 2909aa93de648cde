"""The image that `make image-tar` has built, mounted once for all tests."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.image.container import Image
from tools.image.__main__ import ARCHIVE, IMAGE
from tools.image.buildah import alone, buildah


@pytest.fixture(scope="session")
def image() -> Iterator[Image]:
    if os.getuid() != 0 or not ARCHIVE.exists() or not shutil.which("runc"):
        pytest.skip("needs root, runc, and the archive that `make image-tar` writes")
    with alone():
        container = buildah("from", f"docker-archive:{ARCHIVE}:docker.io/library/{IMAGE}")
        try:
            described = json.loads(buildah("inspect", container))
            yield Image(Path(buildah("mount", container)), described["OCIv1"]["config"])
        finally:
            buildah("rm", container)
