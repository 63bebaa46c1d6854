#!/usr/bin/env bash
# Makes the environment of the engines that tools/bench_peers.py compares with (default .venv-peers).
#   tools/setup_peers.sh [FOLDER]
# DeepSpeed's wheel is built without its operators (DS_BUILD_OPS=0); the last command compiles the
# two that a run needs, so that no measured one does: minutes, with g++ and libaio-dev.
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
venv=${1:-$root/.venv-peers}
export MAX_JOBS=${MAX_JOBS:-1} DS_BUILD_OPS=0 DS_ACCELERATOR=cpu PIP_DISABLE_PIP_VERSION_CHECK=1

missing=""
command -v g++ >/dev/null || missing="$missing g++"
printf '#include <libaio.h>\n' | ${CXX:-g++} -E -x c++ - >/dev/null 2>&1 || missing="$missing libaio-dev"
if [ -n "$missing" ]; then
    echo "setup_peers: async_io cannot be compiled: missing$missing; run: apt-get install -y$missing" >&2
    exit 2
fi

python=${PYTHON:-python3}
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip="$venv/bin/python -m pip install --quiet --constraint $root/configs/constraints.txt"
# torch first: DeepSpeed's setup imports it, hence no build isolation below.
$pip torch numpy setuptools wheel ninja psutil packaging
$pip 'transformers==5.24.0' 'accelerate==1.15.0' 'safetensors>=0.4.5' py-cpuinfo
$pip --no-build-isolation 'deepspeed==0.19.8'

"$venv/bin/python" - <<'PYTHON'
import os
from deepspeed.ops.op_builder.cpu import AsyncIOBuilder, ShareMemCommBuilder

AsyncIOBuilder().load()
ShareMemCommBuilder().load()
import accelerate, deepspeed, torch, transformers

print("torch", torch.__version__, "transformers", transformers.__version__,
      "accelerate", accelerate.__version__, "deepspeed", deepspeed.__version__, "operators ready")
os._exit(0)
PYTHON
