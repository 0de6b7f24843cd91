# docker build -t leash .                               for the CPU
# docker build -t leash --build-arg TORCH=cu130 .       for a GPU: any name under download.pytorch.org/whl
# docker run --rm [--gpus all] -v $PWD/outputs:/leash/outputs leash experiment=grpo_tiny
FROM python:3.11-slim
ARG TORCH=cpu
RUN apt-get update -qq && apt-get install -qq -y --no-install-recommends make \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /leash
# Torch first: a change of the code does not fetch it again.
COPY constraints.txt .
ENV UV_TORCH_BACKEND=$TORCH UV_NO_CACHE=1 UV_COMPILE_BYTECODE=1
RUN python3.11 -m venv .venv && .venv/bin/pip install --no-cache-dir -q -c constraints.txt uv \
    && .venv/bin/uv pip install -q -p .venv/bin/python -c constraints.txt torch
COPY . .
RUN make setup
VOLUME /leash/outputs
ENTRYPOINT [".venv/bin/python", "train.py"]
