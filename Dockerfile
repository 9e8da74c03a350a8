# One image for all processes of perdure; the command selects the process: `docker run perdure worker`.
# PERDURE_DATABASE_URL and PERDURE_REDIS_URL name the servers, which are not in the image.

FROM python:3.13-slim@sha256:8d9d0b8bcf6506481eae4907c18f5e3e7902e629f5f6d684f9e7c32e85e3ddf0 AS build
WORKDIR /source
ENV VIRTUAL_ENV=/opt/perdure UV_NO_CACHE=1 UV_COMPILE_BYTECODE=1
COPY .ci/uv.txt .ci/
# The environment has no pip. The one of the base image installs into it: `pip --python /opt/perdure install`.
RUN pip install --no-cache-dir --require-hashes --requirement .ci/uv.txt && uv venv "$VIRTUAL_ENV"
# The pinned dependencies change rarely, so their layer comes first. uv checks each file against its hash.
COPY constraints.txt pyproject.toml ./
RUN uv pip install --require-hashes --constraints constraints.txt --requirement pyproject.toml --group build
COPY . ./
RUN uv pip install --no-deps --no-build-isolation .

FROM python:3.13-slim@sha256:8d9d0b8bcf6506481eae4907c18f5e3e7902e629f5f6d684f9e7c32e85e3ddf0
RUN useradd --system --uid 10001 --create-home --home-dir /var/lib/perdure perdure
COPY --from=build /opt/perdure /opt/perdure
ENV PATH=/opt/perdure/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PERDURE_DATA_DIR=/var/lib/perdure
USER perdure
WORKDIR /var/lib/perdure
VOLUME /var/lib/perdure
EXPOSE 8080
STOPSIGNAL SIGTERM
ENTRYPOINT ["perdure"]
CMD ["--help"]
