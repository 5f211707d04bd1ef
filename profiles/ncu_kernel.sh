#!/usr/bin/env bash
# A rank of a training run, under Nsight Compute for chosen kernels of one step; ranks not chosen run plain.
#
#   KERNEL=logit_fold torchrun --nproc-per-node 8 --no-python profiles/ncu_kernel.sh --config my_run.yaml --max_steps 3
#
# Settings are variables of the environment:
#   KERNEL=...     regular expression over kernel names; without it, every kernel
#   RANKS=0        ranks to profile, separated by commas
#   STEP=3         the step to profile, from 1
#   COUNT=20       launches to measure: each is run again for every set of counters
#   OUT=profiles   where ncu_rankR_stepN.ncu-rep and ncu_rankR_stepN.csv go; summarize.py reads the second
#   DRY_RUN=1      print the commands and stop
set -euo pipefail
. "$(dirname "$0")/chosen_rank.bash"
count=${COUNT:-20}
[[ $count =~ ^[1-9][0-9]*$ ]] || refuse "COUNT must be a number from 1, got $count"

# --clock-control none: times at the clocks that the run has, not at the base clock that ncu sets by default.
do_or_show ncu --export "$report" --force-overwrite --clock-control none --target-processes all \
  --nvtx --nvtx-include "fastrl_fast@step $step" --kernel-name "regex:${KERNEL:-.*}" --launch-count "$count" \
  --metrics "$(tr -d ' \n' <<<'gpu__time_duration.sum, dram__bytes.sum,
    smsp__sass_thread_inst_executed_op_fadd_pred_on.sum, smsp__sass_thread_inst_executed_op_fmul_pred_on.sum,
    smsp__sass_thread_inst_executed_op_ffma_pred_on.sum, sm__ops_path_tensor_src_bf16_dst_fp32.sum')" "${train[@]}"
if [ -n "${DRY_RUN:-}" ]; then
  do_or_show ncu --import "$report.ncu-rep" --page raw --csv --print-units base
else
  ncu --import "$report.ncu-rep" --page raw --csv --print-units base >"$report.csv"
fi
