# One image for all parts: the command says which one runs, as in `vcuda-webhook serve` or `vcuda-controller run`.
FROM python:3.11-slim-bookworm AS build
WORKDIR /src
COPY setup.cfg pyproject.toml README.md LICENSE ./
COPY vcuda vcuda
COPY webhook webhook
COPY controller controller
COPY certs certs
RUN python -m venv /opt/vcuda && /opt/vcuda/bin/pip install --no-cache-dir .

FROM python:3.11-slim-bookworm
COPY --from=build /opt/vcuda /opt/vcuda
ENV PATH=/opt/vcuda/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
# A number, so that Kubernetes can tell that it is not root. Nothing is written below /: the root may be read-only.
USER 65532:65532
CMD ["vcuda-webhook", "--help"]
