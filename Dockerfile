# docker build -t serried .
# docker run -p 8000:8000 -v ~/.cache/huggingface:/home/serried/.cache/huggingface serried serve Qwen/Qwen3-0.6B -tp 2
# Ranks meet in memory of their own, not in /dev/shm: no --shm-size, no --ipc=host.

FROM python:3.12-slim AS build
# Debian keeps no old versions that could be pinned; the compiler stays in this stage.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY pyproject.toml CMakeLists.txt README.md LICENSE ./
COPY csrc csrc
COPY serried serried
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.12-slim
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels pip install --no-cache-dir /wheels/*.whl
# By number, so that Kubernetes can tell that it is not root.
RUN useradd --uid 10001 --create-home serried && mkdir -p /home/serried/.cache/huggingface && chown -R serried /home/serried/.cache
USER 10001
WORKDIR /home/serried
# Inside a container all addresses are its own; what is published is decided outside.
ENV SERRIED_HOST=0.0.0.0
EXPOSE 8000
HEALTHCHECK --interval=30s --timeout=5s --start-period=10s \
  CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["serried"]
CMD ["serve", "--help"]
