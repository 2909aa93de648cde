# One image for all parts: the command says which one runs, as in `vcuda-webhook serve` or `vcuda-controller run`.
FROM python:3.11-slim-bookworm AS build
WORKDIR /src
COPY setup.cfg pyproject.toml README.md LICENSE ./
COPY vcuda vcuda
COPY webhook webhook
COPY controller controller
COPY certs certs
# The environment gets no pip of its own: this stage's fills it.
RUN python -m venv --without-pip /opt/vcuda && python -m pip --python /opt/vcuda/bin/python install --no-cache-dir .

FROM python:3.11-slim-bookworm
# Nothing that installs or builds is left in what runs.
RUN python -m pip uninstall --yes setuptools wheel pip && rm -r /usr/local/lib/python3.11/ensurepip
COPY --from=build /opt/vcuda /opt/vcuda
ENV PATH=/opt/vcuda/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
# A number, so that Kubernetes can tell that it is not root. Nothing is written below /: the root may be read-only.
USER 65532:65532
# No ENTRYPOINT: the manifests' args begin with the program.
CMD ["vcuda-webhook", "--help"]
