# The image that jobs on Kubernetes, SageMaker, Azure ML and Google run: every machine has the same libraries.
#
#   docker build -t registry.example/paceline:1 .
#
# torch comes first and alone, because the package index decides which wheel of it is right: give another index
# with --build-arg TORCH_INDEX=URL. All else is locked, with hashes. The user stays root: SageMaker needs that,
# and Kubernetes sets another one where a cluster wants it.
FROM python:3.12-slim-bookworm

ARG TORCH_INDEX=""
ENV PYTHONUNBUFFERED=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_ROOT_USER_ACTION=ignore \
    PIP_DISABLE_PIP_VERSION_CHECK=1

WORKDIR /opt/paceline
COPY requirements/torch.txt requirements/run.lock requirements/
RUN pip install ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} -r requirements/torch.txt
RUN pip install --no-deps --require-hashes -r requirements/run.lock
COPY pyproject.toml README.md LICENSE ./
COPY src src
COPY plugins plugins
RUN pip install --no-deps --no-build-isolation . && pip check

# Your own code, in an image that begins with FROM this one: COPY . /work
WORKDIR /work
