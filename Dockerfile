# One image for all processes of perdure; the command selects the process: `docker run perdure worker`.
# PERDURE_DATABASE_URL and PERDURE_REDIS_URL name the servers, which are not in the image.

FROM python:3.13-slim AS build
WORKDIR /source
RUN python -m venv /opt/perdure
# The pinned dependencies change rarely, so their layer comes first. pip checks each file against its hash.
COPY constraints.txt ./
RUN sed '/^# end of run$/q' constraints.txt > /tmp/pins.txt \
    && /opt/perdure/bin/pip install --no-cache-dir --require-hashes --requirement /tmp/pins.txt
COPY . ./
RUN /opt/perdure/bin/pip install --no-cache-dir --no-deps --no-build-isolation .

FROM python:3.13-slim
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
