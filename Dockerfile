# One image for all parts: the command says which one runs, as in `vcuda-webhook serve` or `vcuda-controller run`.
# The base is named by its tag, which may move. This prints the digest to pin both lines to, as in `python:…@sha256:…`:
#   docker buildx imagetools inspect python:3.11-slim-bookworm --format '{{.Manifest.Digest}}'
FROM python:3.11-slim-bookworm AS build
WORKDIR /src
COPY requirements.lock requirements-build.lock ./
# The environment gets no pip of its own: this stage's fills it.
RUN python -m venv --without-pip /opt/vcuda && python -m pip --python /opt/vcuda/bin/python install --no-cache-dir --require-hashes --requirement requirements.lock
COPY setup.cfg pyproject.toml README.md LICENSE ./
COPY vcuda vcuda
COPY webhook webhook
COPY controller controller
COPY certs certs
RUN python -m pip install --no-cache-dir --require-hashes --requirement requirements-build.lock && python -m pip wheel --no-deps --no-build-isolation --wheel-dir wheels . && python -m pip --python /opt/vcuda/bin/python install --no-cache-dir --no-deps --no-index --find-links=wheels vcuda-quota

FROM python:3.11-slim-bookworm
# Nothing that installs or builds is left in what runs.
RUN python -m pip uninstall --yes setuptools wheel pip && rm -r /usr/local/lib/python3.11/ensurepip
COPY --from=build /opt/vcuda /opt/vcuda
ENV PATH=/opt/vcuda/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
# A number, so that Kubernetes can tell that it is not root. Nothing is written below /: the root may be read-only.
USER 65532:65532
# No ENTRYPOINT: the manifests' args begin with the program.
CMD ["vcuda-webhook", "--help"]
