#!/usr/bin/env bash
# A rank of a training run, under Nsight Systems for one step where the rank is a chosen one; the others run plain.
#
#   torchrun --nproc-per-node 8 --no-python profiles/nsys_step.sh --config my_run.yaml --max_steps 3
#
# Settings are variables of the environment:
#   RANKS=0      ranks to profile, separated by commas
#   STEP=3       the step to profile, from 1: the first two still allocate, compile and warm up
#   OUT=profiles where nsys_rankR_stepN.nsys-rep and its tables nsys_rankR_stepN_*.csv go; summarize.py reads these
#   DRY_RUN=1    print the commands and stop
set -euo pipefail
. "$(dirname "$0")/chosen_rank.bash"

# nsys listens for registered names alone unless told otherwise; the run goes on when the step has been recorded.
do_or_show nsys profile --output "$report" --force-overwrite true --trace cuda,nvtx,cublas,osrt --sample none \
  --capture-range nvtx --nvtx-capture "step $step@fastrl_fast" --capture-range-end stop \
  --env-var NSYS_NVTX_PROFILER_REGISTER_ONLY=0 "${train[@]}"
do_or_show nsys stats --force-export true --force-overwrite true --format csv --output "$report" \
  --report nvtx_sum --report cuda_gpu_kern_sum "$report.nsys-rep"
