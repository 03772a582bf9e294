#!/usr/bin/env bash
# Everything that only an NVIDIA GPU shows, in about eight minutes: its tests, then training and sampling speed in short.
#
#     bash benchmarks/gpu.sh OUT       compare OUT/*.json with benchmarks/results
#
# It needs torch for CUDA, pytest, OmegaConf and PyYAML, but neither Ray nor MLflow. The GPU tests that need Ray, those
# below tests/pipelines, are not among them: `make gpu` runs them too.
set -uo pipefail
out=${1:?usage: bash benchmarks/gpu.sh OUT}
mkdir -p "$out"
status=0
timeout 280 python3 -m pytest -q -m gpu tests/spn --durations=10 2>&1 | tee "$out/tests.txt" || status=1
timeout 130 python3 benchmarks/train.py --config imagenet32 --stage baseline --batch 128 --out "$out" || status=1
timeout 130 python3 benchmarks/train.py --config celebahq256 --stage depth_upscale --batch 128 --out "$out" || status=1
timeout 60 python3 benchmarks/sample.py --config imagenet32 --batch 1 16 --out "$out" || status=1
exit $status
