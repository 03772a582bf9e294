# The pipeline in a container, on CPUs. For GPUs: --build-arg TORCH_INDEX=https://pypi.org/simple, and run with --gpus all.
#   docker build -t spn .
#   docker run --rm --shm-size 1g -v "$PWD/runs:/spn/runs" spn                                              the demo
#   docker run --rm --shm-size 1g -v "$PWD/runs:/spn/runs" -v PHOTOS:/photos:ro spn \
#       --config docs/own_data.yaml data.root=/photos
FROM python:3.12-slim
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore PYTHONUNBUFFERED=1
WORKDIR /spn
# Dependencies first: their layer stays when the code changes.
COPY pyproject.toml .ci/constraints.txt ./
RUN pip install "$(grep ^torch== constraints.txt)" --index-url "$TORCH_INDEX" \
 && python -c "import tomllib; project = tomllib.load(open('pyproject.toml', 'rb'))['project']; print(*project['dependencies'], *project['optional-dependencies']['pipelines'], sep=chr(10))" > requirements.txt \
 && pip install -r requirements.txt -c constraints.txt
COPY docs/own_data.yaml docs/own_data.yaml
COPY spn spn
COPY data_prep data_prep
COPY pipelines pipelines
ENTRYPOINT ["python", "pipelines/full_multidim.py"]
