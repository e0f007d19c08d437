# An image that serves a model: docker build -t enginery .   For NVIDIA GPUs: docker build -t enginery --build-arg DEVICE=cuda .
# There it computes in Triton's kernels; FlashInfer, which needs nvcc, is not in it.
ARG BASE=python:3.12-slim-bookworm

FROM ${BASE} AS build
ARG DEVICE=cpu
RUN apt-get update && apt-get install -y --no-install-recommends make && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/enginery
COPY Makefile pyproject.toml constraints.txt README.md LICENSE ./
COPY core core
COPY plugins plugins
RUN make venv VENV=/opt/venv DEVICE=${DEVICE} && /opt/venv/bin/python -m compileall -q core plugins /opt/venv/lib

FROM ${BASE}
ARG DEVICE=cpu
# Triton compiles what launches its kernels.
RUN if [ "$DEVICE" = cuda ]; then apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*; fi
RUN useradd --create-home --uid 1000 enginery
COPY --from=build /opt/venv /opt/venv
COPY --from=build /opt/enginery /opt/enginery
USER enginery
WORKDIR /opt/enginery
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1
EXPOSE 8000
HEALTHCHECK --interval=15s --timeout=5s --start-period=10m CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health/ready', timeout=4)"]
# Settings: flags after the image's name, ENGINERY_* variables, or --config FILE.
ENTRYPOINT ["engine", "serve", "--host", "0.0.0.0"]
