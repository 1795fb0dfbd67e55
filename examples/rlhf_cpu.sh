#!/usr/bin/env bash
# Teaches a chat model what readers prefer, from pairs of answers, on the CPU of a laptop:
#
#   SFT -> reward model -> GRPO with that reward model -> rewards computed again -> win rate by the true preference
#
#   uv run --extra cpu bash examples/rlhf_cpu.sh [new folder, default results/rlhf]
#
# The true preference is a function of the data (examples/rlhf_data.py), which no stage sees. The script ends with an
# error as soon as a stage does not improve its own metric. docs/environments/judges.md explains it.
set -euo pipefail
work=${1:-results/rlhf}
if [ -e "$work" ]; then echo "$work exists; name a new folder, or remove it." >&2; exit 2; fi
mkdir -p "$work"
work=$(cd "$work" && pwd)
cd "$(dirname "$0")/.."
say() { printf '\n[%4ds] == %s\n' "$SECONDS" "$1"; }

say "1. SFT: answers in two styles, with and without the work"
python examples/rlhf_data.py "$work/data"
python examples/run_sft.py --config examples/configs/sft_cpu.yaml \
  "data.train={dataset_name: openai_format, data_path: $work/data/chats.jsonl, split_validation_size: 0.05}" \
  data.validation=null sft.max_num_steps=60 sft.val_period=60 sft.val_at_start=true \
  checkpointing.save_period=60 checkpointing.checkpoint_dir="$work/sft" logger.log_dir="$work/sft/logs"
python examples/chain_check.py validation/val_loss falls "$work/sft/logs"
sft="$work/sft/step_60/policy/weights/model"

say "2. a reward model from pairs of answers"
python examples/run_rm.py --config examples/configs/rm_cpu.yaml policy.model_name="$sft" \
  "data.train={dataset_name: BinaryPreferenceDataset, data_path: $work/data/pairs.jsonl, split_validation_size: 0.1}" \
  data.validation=null rm.max_num_steps=60 rm.val_period=60 \
  checkpointing.save_period=60 checkpointing.checkpoint_dir="$work/rm" logger.log_dir="$work/rm/logs"
python examples/chain_check.py validation/accuracy rises "$work/rm/logs"

say "3. GRPO: the reward is the score of the reward model"
python examples/run_grpo.py --config examples/configs/grpo_rm_cpu.yaml policy.model_name="$sft" \
  env.reward_model.model_name="$sft" env.reward_model.checkpoint_path="$work/rm/step_60" \
  checkpointing.checkpoint_dir="$work/grpo" logger.log_dir="$work/grpo/logs"
python examples/chain_check.py train/reward rises "$work/grpo/logs" --window 3
python examples/chain_check.py validation/accuracy rises "$work/grpo/logs"

say "4. what do readers prefer?"
python examples/rlhf_check.py "$work/grpo/logs"
say "done: $work/grpo"
