"""Re-export stand-alone evaluation under NeMo RL's path."""

from nemo_rl.config.runs.eval import EvalConfig
from nemo_rl.config.runs.eval import EvalMasterConfig as MasterConfig
from nemo_rl.evals.evaluator import Evaluation, evaluate, run_env_eval, setup
from nemo_rl.evals.report import EvalReport, consensus_at_k, format_report, make_report, pass_at_k

__all__ = [
    "EvalConfig",
    "EvalReport",
    "Evaluation",
    "MasterConfig",
    "consensus_at_k",
    "evaluate",
    "format_report",
    "make_report",
    "pass_at_k",
    "run_env_eval",
    "setup",
]
