# docker build -t uvimg . && docker run -p 4869:4869 -v images:/data uvimg
#
# Every setting is a variable of the environment: -e UVIMG_PROCESSES=8 -e UVIMG_QUALITY=80. Where one of them moves
# /health (port, TLS, operations_listen), say where to: -e HEALTH_URL=http://127.0.0.1:9868/health. --stop-timeout 40
# leaves requests in flight their grace_s. (Kubernetes adds variables for its services: enableServiceLinks: false.)
# What runs here are scripts that the tests run too.

FROM python:3.11-slim-bookworm AS build
WORKDIR /source
COPY conf/constraints.txt conf/constraints.txt
RUN pip install --no-cache-dir -c conf/constraints.txt hatchling
COPY pyproject.toml README.md LICENSE ./
COPY src src
COPY scripts/build-wheel scripts/build-wheel
RUN scripts/build-wheel /wheels

FROM python:3.11-slim-bookworm
# jemalloc: glibc's allocator gives little back after large images. tini: a first process that buries orphans.
RUN apt-get update \
    && apt-get install -y --no-install-recommends libjemalloc2 tini \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --system --uid 4869 --home-dir /data uvimg \
    && install -d -o uvimg -g uvimg /data
COPY conf/constraints.txt /tmp/constraints.txt
COPY --from=build /wheels /tmp/wheels
RUN pip install --no-cache-dir -c /tmp/constraints.txt /tmp/wheels/*.whl && rm -r /tmp/wheels /tmp/constraints.txt
COPY scripts/healthcheck /usr/local/bin/healthcheck

# By its bare name the loader finds it whatever the machine is. Workers get it too.
ENV LD_PRELOAD=libjemalloc.so.2 \
    UVIMG_HOST=0.0.0.0 \
    UVIMG_PROCESSES=2 \
    UVIMG_STORE=local:/data
# By its number, which runAsNonRoot wants to see.
USER 4869
WORKDIR /data
VOLUME /data
EXPOSE 4869
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=6s --start-period=60s CMD ["healthcheck"]
ENTRYPOINT ["tini", "--", "uvimg", "serve"]
