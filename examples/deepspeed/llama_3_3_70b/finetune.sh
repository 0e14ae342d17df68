#!/usr/bin/env bash
# ./finetune.sh superoffload            # 4 sequences per GPU
# ./finetune.sh zerooffload 8           # 8 per GPU
# what: full fine-tuning of Llama 3.3 70B on alpaca-format data, optimizer states in host memory; `superoffload`: 90% of
#       them, stepped beside backward or the next forward; `zerooffload`: all of them. A host with too little free
#       memory for that gets the highest share that it has room for, said in one line; RATIO=0.8 is taken as it is
# the block `heavylift` (DeepSpeed passes over it), which changes no bit of the results: states in 10 bytes per
#       parameter instead of 12, without which nothing fits 512 GiB; gradients that wait for their step on the GPU, in
#       room that activations have left, so that more of the states can be on the host
# hardware: 4 GPUs with 141 GB; 512 GiB of host memory
# plan, superoffload: 0.90 of the states on the host: 99.4 GiB on each GPU at the peak, 592 GiB of host memory
# plan, zerooffload: 1.00 of the states on the host: 82.9 GiB on each GPU at the peak, 658 GiB of host memory
# plan, 505 GiB free: 0.73 of the states on the host: 127.3 GiB on each GPU at the peak, 480 GiB of host memory
#       (batch 4; what does not fit is told before anything is allocated)
# duration: 4.8 s a step with 18 of the 80 layers on one GPU; not run on four (docs/log.md)
# as it stands: 10 steps on random weights and random tokens, to measure; it learns nothing, and the first loss is about
#       13.4 (examples/llama_3_3_70b_random.yaml says why). For the real thing:
#       MODEL=path/or/hub-id ./finetune.sh superoffload 4 --dataset my_data.jsonl --save_model
# everything after the batch size goes to finetune.py (finetune.py --help); environment: MODEL, NUM_GPUS, RATIO,
#       OUTPUT_DIR
# small, without a GPU: MODEL=../../shapes/tiny_llama NUM_GPUS=2 ./finetune.sh superoffload 2 --max_length 64
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

usage() {
    echo "error: $1; usage: finetune.sh superoffload|zerooffload [BATCH_SIZE] [switches of finetune.py]" >&2
    exit 2
}

mode=${1:-}
[[ $mode == superoffload || $mode == zerooffload ]] || usage "expected superoffload or zerooffload, got '$mode'"
shift
batch_size=4
if [[ $# -gt 0 && $1 != -* ]]; then
    batch_size=$1
    shift
fi
[[ $batch_size =~ ^[1-9][0-9]*$ ]] || usage "BATCH_SIZE: expected a whole number from 1, got '$batch_size'"

model=${MODEL:-$(cd "$here/../../shapes/llama_3_3_70b" && pwd)}
num_gpus=${NUM_GPUS:-4}
output_dir=${OUTPUT_DIR:-runs/llama_3_3_70b_$mode}
ratio=${RATIO:-$([[ $mode == superoffload ]] && echo 0.90 || echo 1.0)}
[[ -n ${RATIO:-} ]] || set -- --fit_ratio "$@"
# as JSON writes numbers: digits on both sides of a point
if ! [[ $ratio =~ ^(0|1|1\.0+|0\.[0-9]+)$ ]]; then
    echo "error: RATIO: expected a number from 0 to 1, like 0.85, got '$ratio'" >&2
    exit 2
fi

# -1: as many as there are
if ! [[ $num_gpus =~ ^(-1|[1-9][0-9]*)$ ]]; then
    echo "error: NUM_GPUS: expected a whole number from 1, got '$num_gpus'" >&2
    exit 2
fi

launch=(heavylift launch)
command -v heavylift > /dev/null || launch=(python3 -m heavylift launch)
for switch in "$@"; do
    if [[ $switch == -h || $switch == --help ]]; then
        exec "${launch[@]}" -q --num_gpus 1 "$here/finetune.py" --help
    fi
done

if [[ $mode == superoffload ]]; then
    placement='"ratio": '$ratio', "super_offload": true, "cpuadam_cores_perc": 0.90'
else
    placement='"ratio": '$ratio
fi

config=$output_dir/ds_config.json
switches=(
    --deepspeed_config "$config"
    --model_name "$model"
    --output_dir "$output_dir"
    --lr 1e-5
    --warmup_ratio 0.05
    --weight_decay 0.01
    --max_length 4096
    --num_train_epochs 1
    --log_interval 1
    --activation_checkpointing
    "$@"
)
# where a switch is wrong, or a file that it names is not there, nothing is written, least of all over an earlier run's
# file; a python3 without heavylift cannot tell, and finetune.py will
wrong=$(python3 "$here/arguments.py" "${switches[@]}" 2>&1 > /dev/null) || [[ $? -ne 2 ]] || { echo "$wrong" >&2; exit 2; }

if ! mkdir -p "$output_dir" 2> /dev/null; then
    echo "error: OUTPUT_DIR: cannot make the folder '$output_dir'" >&2
    exit 2
fi
if ! : 2> /dev/null > "$config"; then
    echo "error: OUTPUT_DIR: cannot write the file '$config'" >&2
    exit 2
fi
cat > "$config" <<JSON
{
  "train_micro_batch_size_per_gpu": $batch_size,
  "gradient_accumulation_steps": 1,
  "gradient_clipping": 1.0,
  "bf16": {"enabled": true},
  "zero_optimization": {
    "stage": 3,
    "offload_optimizer": {"device": "cpu", "pin_memory": true, $placement}
  },
  "heavylift": {"state_format": "split", "gradients_on": "device"}
}
JSON

exec "${launch[@]}" --num_gpus "$num_gpus" --bind_cores_to_rank "$here/finetune.py" "${switches[@]}"
