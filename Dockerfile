# docker build -t distflash_jax:cuda13 .          (--build-arg CUDA=cuda12 for CUDA 12)
# docker run --gpus all --shm-size 16g -v "$PWD/runs:/distflash/runs" distflash_jax:cuda13 python -m train.llama --mesh seq=8
# The folder runs of the host has to be writable for user 1000.
FROM python:3.12-slim
ARG CUDA=cuda13
RUN useradd --create-home --uid 1000 distflash
WORKDIR /distflash
# What decides the packages comes first, so that a change of the trainer installs nothing anew.
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY distflash_jax distflash_jax
COPY pallas_kernels pallas_kernels
RUN pip install --no-cache-dir -c constraints.txt -e ".[train,plot,${CUDA}]"
COPY models models
COPY train train
COPY benchmarks benchmarks
RUN mkdir runs && chown distflash runs
USER 1000
CMD ["python", "-m", "train.doctor"]
