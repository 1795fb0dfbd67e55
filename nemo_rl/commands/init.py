"""Define `nemo_rl init`, which writes a configuration and a reward to start from.

Invariant: the two files can be trained without changes, and no file is replaced.
"""

import argparse
import sys
from pathlib import Path

NAME = "init"
SUMMARY = "write a configuration and a reward of your own to start from"
DESCRIPTION = """Write my_run.yaml and my_reward.py into a folder; existing files are kept.

They train as they are: nemo_rl grpo --config my_run.yaml"""

_REWARD = '''"""The reward of my_run.yaml."""


def my_reward(answer: str, row: dict) -> float:
    """Return the reward of one answer.

    `row` has the columns of the data set's row. With the parameters `answers, rows` the function gets lists and returns
    a list; it may also be `async def`.
    """
    return float(row["ground_truth"] in answer)
'''

_CONFIG = """# A GRPO run with a reward of your own. In this folder:
#     nemo_rl grpo --config my_run.yaml                    # trains
#     nemo_rl grpo --config my_run.yaml --dry-run          # shows the whole run, starts nothing
#     nemo_rl grpo --config my_run.yaml grpo.seed=1        # any key can be set here too
# Keys that are not written here are those of the base file, then the defaults of the configuration reference.
defaults: {base}

grpo:
  max_num_steps: 20
  num_prompts_per_step: 8
  num_generations_per_prompt: 8        # answers to each prompt, which are compared with each other
  val_period: 10                       # steps between two validations; 0: none

policy:
  model_name: tiny-chat                # a folder or a Hugging Face id; tiny-chat is a model of the library
  max_total_sequence_length: 128       # tokens of prompt and answer
  optimizer:
    kwargs:
      lr: 1.0e-4

data:
  _override_: true                     # drop the data of the base file
  num_workers: 0
  train:
    dataset_name: arithmetic           # generated sums. For your own rows, with the columns prompt and answer:
    num_samples: 5000                  #   dataset_name: PromptDataset and data_path: my_rows.jsonl, without num_samples
  validation:
    dataset_name: arithmetic
    num_samples: 64
    seed: 2
  default:
    env_name: reward                   # the environment below

env:
  _override_: true
  reward:
    # my_reward.py in the folder where the run is started; several: {{right: my_reward.right, short: my_reward.short}}
    function: my_reward.my_reward

checkpointing:
  checkpoint_dir: results/my_run       # the same command continues from the newest checkpoint
  save_period: 10

logger:
  log_dir: logs/my_run                 # nemo_rl report logs/my_run shows the run
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options to a parser."""
    parser.add_argument("folder", type=Path, nargs="?", default=Path(), help="folder of the files (default: this one)")


def main(arguments: argparse.Namespace) -> int:
    """Write the files and return the exit status."""
    from nemo_rl.launch import command_line
    from nemo_rl.launch.programs import PROGRAMS
    from nemo_rl.utils.errors import ConfigError

    base = PROGRAMS["grpo"].config_for_this_machine().name
    files = {"my_run.yaml": _CONFIG.format(base=base), "my_reward.py": _REWARD}

    def work() -> int:
        folder: Path = arguments.folder
        present = [name for name in files if (folder / name).exists()]
        if present:
            raise ConfigError(f"{folder.absolute()} has {' and '.join(present)} already. Choose another folder.")
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
        change = "" if folder.absolute() == Path.cwd() else f"cd {folder} && "
        sys.stdout.write(f"Wrote {' and '.join(files)}. Train with:\n  {change}nemo_rl grpo --config my_run.yaml\n")
        return 0

    return command_line.exit_status(work)
