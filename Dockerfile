# thinwire on the CPU, without extras.
#
#   docker build -t thinwire .
#   docker run --rm -v "$PWD/runs:/work/runs" thinwire train --config laptop --run runs/first --train.steps 60
#
# On x86 the default torch for Linux brings several gigabytes of CUDA libraries along. The selector on pytorch.org (platform CPU) shows the
# package index of one without: docker build --build-arg TORCH_INDEX=ADDRESS -t thinwire .
FROM python:3.11-slim

ARG TORCH_INDEX=
WORKDIR /source
COPY constraints.txt ./
RUN pip install --no-cache-dir ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$(grep '^torch==' constraints.txt)"
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN pip install --no-cache-dir -c constraints.txt .

RUN useradd --create-home thinwire && mkdir /work && chown thinwire /work
USER thinwire
WORKDIR /work
ENTRYPOINT ["thinwire"]
CMD ["--help"]
