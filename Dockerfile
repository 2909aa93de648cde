# One image for all parts. The command selects the part, for example `vcuda-webhook serve` or `vcuda-controller run`.
# The base is named by its tag, which may move. This prints the digest to pin it to, as in `python:…@sha256:…`:
#   docker buildx imagetools inspect python:3.11-slim-bookworm --format '{{.Manifest.Digest}}'
# Another base, for example of a mirror of the registry, must have the same layout: `make image BASE=…`.
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE} AS build
WORKDIR /src
COPY requirements.lock requirements-build.lock ./
# The environment gets no pip of its own: this stage's fills it. Nothing imports kubernetes/aio, a second client of 65 MB.
RUN python -m venv --without-pip /opt/vcuda && python -m pip --python /opt/vcuda/bin/python install --no-cache-dir --require-hashes --requirement requirements.lock && rm -r /opt/vcuda/lib/python3.11/site-packages/kubernetes/aio
COPY setup.cfg pyproject.toml README.md LICENSE ./
COPY vcuda vcuda
COPY webhook webhook
COPY controller controller
COPY certs certs
RUN python -m pip install --no-cache-dir --require-hashes --requirement requirements-build.lock && python -m pip wheel --no-deps --no-build-isolation --wheel-dir wheels . && python -m pip --python /opt/vcuda/bin/python install --no-cache-dir --no-deps --no-index --find-links=wheels vcuda-quota

FROM ${BASE}
# The final stage has no installer, no build tool, and no program that runs with the rights of its owner.
RUN python -m pip uninstall --yes setuptools wheel pip && rm -r /usr/local/lib/python3.11/ensurepip && find / -xdev -type f -perm /6000 -exec chmod a-s {} +
COPY --from=build /opt/vcuda /opt/vcuda
ENV PATH=/opt/vcuda/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
# The C library returns large freed blocks, such as the body of a large review, to the system at once. By default it keeps
# them in a heap for each thread (see mallopt(3)).
ENV MALLOC_ARENA_MAX=2 MALLOC_MMAP_THRESHOLD_=262144 MALLOC_TRIM_THRESHOLD_=262144
# A numeric user, so that Kubernetes can verify that it is not root. Nothing is written below /, so the root file system
# may be read-only.
USER 65532:65532
# There is no ENTRYPOINT, because the args in the manifests begin with the program.
CMD ["vcuda-webhook", "--help"]
