#!/usr/bin/env bash
# Improves a chat model that adds numbers badly, stage by stage, on the CPU of a laptop:
#
#   SFT -> DPO -> GRPO with LoRA -> merge -> transformers -> evaluation
#
#   uv run --extra cpu bash examples/chain_cpu.sh [new folder, default results/chain]
#
# Each stage starts from the Hugging Face folder that the stage before it exported, and prints what it changed. The
# script ends with an error as soon as a stage does not improve its own metric. docs/algorithms/chain.md explains it.
set -euo pipefail
work=${1:-results/chain}
if [ -e "$work" ]; then echo "$work exists; name a new folder, or remove it." >&2; exit 2; fi
mkdir -p "$work"
work=$(cd "$work" && pwd)
cd "$(dirname "$0")/.."
say() { printf '\n[%4ds] == %s\n' "$SECONDS" "$1"; }

say "0. how good is the model before?"
python examples/chain_data.py "$work/data"
python examples/run_eval.py --config examples/configs/evals/eval_cpu.yaml eval.save_path="$work/eval_before"

say "1. SFT: answers that write the sum out"
python examples/run_sft.py --config examples/configs/sft_cpu.yaml \
  "data.train={dataset_name: openai_format, data_path: $work/data/chats.jsonl, split_validation_size: 0.05}" \
  data.validation=null sft.max_num_steps=8 sft.val_period=8 policy.optimizer.kwargs.lr=1e-5 \
  checkpointing.checkpoint_dir="$work/sft" logger.log_dir="$work/sft/logs"
python examples/converters/convert_dcp_to_hf.py \
  --dcp-ckpt-path "$work/sft/step_8" --hf-ckpt-path "$work/sft_hf" --verify
python examples/chain_check.py validation/val_loss falls "$work/sft/logs"

say "2. DPO: rather the right carry than the wrong one"
python examples/run_dpo.py --config examples/configs/dpo_cpu.yaml policy.model_name="$work/sft_hf" \
  "data.train={dataset_name: BinaryPreferenceDataset, data_path: $work/data/pairs.jsonl, split_validation_size: 0.05}" \
  data.validation=null dpo.max_num_steps=12 dpo.val_period=12 policy.optimizer.kwargs.lr=1e-5 \
  checkpointing.checkpoint_dir="$work/dpo" logger.log_dir="$work/dpo/logs"
python examples/converters/convert_dcp_to_hf.py \
  --dcp-ckpt-path "$work/dpo/step_12" --hf-ckpt-path "$work/dpo_hf" --verify
python examples/chain_check.py validation/rewards_margin_mean rises "$work/dpo/logs"
python examples/chain_check.py validation/accuracy rises "$work/dpo/logs"

say "3. GRPO with LoRA: a reward for the right result"
python examples/run_grpo.py --config examples/configs/grpo_math_cpu.yaml policy.model_name="$work/dpo_hf" \
  policy.dtensor_cfg.lora_cfg.enabled=true policy.dtensor_cfg.lora_cfg.dim=16 policy.optimizer.kwargs.lr=1e-3 \
  grpo.max_num_steps=12 grpo.val_period=12 checkpointing.save_period=12 \
  checkpointing.checkpoint_dir="$work/grpo" logger.log_dir="$work/grpo/logs"
python examples/chain_check.py train/reward rises "$work/grpo/logs" --window 3
python examples/chain_check.py validation/accuracy rises "$work/grpo/logs"

say "4. merge the adapter into its base, and compare the merged model with the two side by side"
python examples/converters/convert_lora_to_hf.py --adapter-ckpt "$work/grpo/step_12" --base-ckpt "$work/dpo_hf" \
  --hf-ckpt-path "$work/hf" --verify

say "5. the same model in transformers"
python - "$work/hf" <<'PYTHON'
import sys

from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer, model = (kind.from_pretrained(sys.argv[1]) for kind in (AutoTokenizer, AutoModelForCausalLM))
chat = [{"role": "user", "content": "37+85="}]
prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
output = model.generate(**prompt, max_new_tokens=48, do_sample=False)
print("   ", tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True))
PYTHON

say "6. how good is it now?"
python examples/run_eval.py --config examples/configs/evals/eval_cpu.yaml \
  generation.model_name="$work/hf" eval.save_path="$work/eval_after"
python examples/chain_check.py score rises "$work/eval_before" "$work/eval_after"
say "done: $work/hf"
