# What the scripts beside this one begin with: settings checked, and a rank that is not a chosen one trained plain.
ranks=${RANKS:-0} step=${STEP:-3} out=${OUT:-profiles} rank=${RANK:-0}
train=("${PYTHON:-python3}" -m fastrl_fast.train "$@")

refuse() { echo "$1" >&2; exit 2; }
do_or_show() { if [ -n "${DRY_RUN:-}" ]; then printf '%q ' "$@"; echo; else "$@"; fi; }

[[ $step =~ ^[1-9][0-9]*$ ]] || refuse "STEP must be a step from 1, got $step"
[[ $ranks =~ ^[0-9]+(,[0-9]+)*$ ]] || refuse "RANKS must be ranks separated by commas, got $ranks"
if [[ ",$ranks," != *",$rank,"* ]]; then
  do_or_show "${train[@]}"
  exit
fi
tool=$(basename "$0" | cut -d_ -f1)
[ -n "${DRY_RUN:-}" ] || command -v "$tool" >/dev/null || refuse "$tool is not on PATH"
report=$out/${tool}_rank${rank}_step$step
mkdir -p "$out"
