"""From a configuration to the parts of an on-policy distillation run.

As `assemble` does for GRPO, and with the same order: everything that can be refused without a worker (tokenizers,
data, loss, whether the teacher fits), then Ray and the workers, then what connects them.
"""

from nemo_rl.algorithms.distillation import DistillationRun
from nemo_rl.algorithms.rollout.assemble import RolloutPlan, start_rollouts
from nemo_rl.algorithms.rollout.teacher import Teacher, check_teacher_fits
from nemo_rl.algorithms.runtime.run_folders import open_folders
from nemo_rl.config import DistillationMasterConfig
from nemo_rl.data.datasets.setup import setup_response_data
from nemo_rl.data.tokenizer import get_tokenizer
from nemo_rl.losses.distillation import DistillationLossFn
from nemo_rl.utils.seed import set_seed


def assemble_distillation(config: DistillationMasterConfig, started_at: float = 0.0) -> DistillationRun:
    """Build a distillation run.

    Args:
        config: a checked configuration.
        started_at: `time.perf_counter()` at process start, to report the time to the first step.

    Raises:
        ConfigError, DataError: the configuration, the data or the teacher cannot be used; raised before Ray starts.
        ResourceInsufficientError: the cluster lacks what is asked for.
    """
    set_seed(config.distillation.seed)
    tokenizer = get_tokenizer(config.policy.tokenizer)
    vocab_size = check_teacher_fits(config, tokenizer)
    data = setup_response_data(tokenizer, config.data, config.env)
    folders = open_folders(config, len(data.train))
    plan = RolloutPlan(tokenizer, data, folders, teacher=config.teacher, started_at=started_at)
    parts = start_rollouts(config, plan)
    assert parts.workers.teacher is not None, "the plan asks for it"
    assert config.policy.generation is not None, "the configuration was checked"
    return DistillationRun(
        session=parts.session,
        refitter=parts.refitter,
        probe=parts.probe,
        source=parts.source,
        teacher=Teacher(
            parts.workers.teacher,
            config.distillation.topk_logits_k,
            vocab_size,
            temperature=config.policy.generation.temperature,
        ),
        policy=parts.workers.policy,
        loss_fn=DistillationLossFn(config.loss_fn),
        trajectory_log=parts.trajectory_log,
        pad_token_id=tokenizer.pad_token_id,
        mask_truncated=config.distillation.overlong_filtering,
        closers=parts.closers,
    )
