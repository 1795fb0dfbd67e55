"""Use parts of a run that a program passes to `setup` instead of the configured parts.

Each part is optional and replaces the configured part in the algorithm's `recipe`, so the configured part is not
loaded. Invariant: a configuration that a program made is checked like one from a file, before anything starts.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from omegaconf import DictConfig
from pydantic import BaseModel
from transformers import PreTrainedTokenizerBase

from nemo_rl.algorithms.setup.row_check import check_known_answers, check_row_fields, check_rows
from nemo_rl.config import MasterConfig, NamedPartConfig, PolicyConfig, config_of
from nemo_rl.config.runs.dependent_keys import fill_dependent_keys
from nemo_rl.config.runs.rollouts import RolloutMasterConfig
from nemo_rl.data.datasets.setup import RunData
from nemo_rl.data.datasets.user_data import given_data
from nemo_rl.data.tokenizer import ensure_pad_token, get_tokenizer
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.environments.user_errors import USER_MISTAKES, describe, user_lines
from nemo_rl.losses.loss_function import LOSSES
from nemo_rl.utils.errors import ConfigError, did_you_mean
from nemo_rl.utils.logging_setup import show_messages


@dataclass(frozen=True)
class UserParts:
    """User-supplied parts of a run. If a part is None, the configured part is used."""

    tokenizer: PreTrainedTokenizerBase | None = None
    """Tokenizer of all models and of the data."""
    dataset: Any = None
    """Training rows, in a form that `data.datasets.user_data.given_data` accepts."""
    val_dataset: Any = None
    """Validation rows. They can be given without `dataset`, together with configured training rows."""
    environments: Mapping[str, Any] = field(default_factory=dict)
    """Environments by task name, as `environments.user_environments.environment_of` accepts them. A mapping instead of
    an environment is used as its section of `env`."""
    loss_fn: Any = None
    """Loss of the policy."""

    @property
    def running_environments(self) -> dict[str, Any]:
        """Return the environments that are objects or classes. Mappings, which are sections of `env`, are left out."""
        return {name: given for name, given in self.environments.items() if not _is_section(given)}

    def checked[Config: MasterConfig](
        self, given: Config | Mapping[str, Any] | DictConfig, schema: type[Config]
    ) -> Config:
        """Return the checked configuration of the run, and show its start messages on the console.

        Args:
            given: an object of `schema`, or the content of a configuration file as a dict or OmegaConf config.
            schema: the master config class of the algorithm.

        Raises:
            ConfigError: a key, a value or a combination is wrong, or `given` belongs to another algorithm.
        """
        show_messages()
        if isinstance(given, Mapping | DictConfig):
            given = config_of(given, schema, check=False)
        if not isinstance(given, schema):
            raise ConfigError(f"setup takes a {schema.__name__} or a dict of its keys, got {type(given).__name__}.")
        config = given.model_copy()
        if self.dataset is not None:
            config.data = config.data.with_user_data()
        if self.environments and isinstance(config, RolloutMasterConfig):
            sections = {name: section for name, section in self.environments.items() if _is_section(section)}
            config["env"] = dict.fromkeys(self.environments, {}) | config.env | sections
        fill_dependent_keys(config)
        config.check()
        return config

    def tokenizer_of(self, policy: PolicyConfig) -> PreTrainedTokenizerBase:
        """Return the tokenizer of the run, with a padding token."""
        if self.tokenizer is None:
            return get_tokenizer(policy.tokenizer)
        ensure_pad_token(self.tokenizer, policy.tokenizer.name)
        return self.tokenizer

    def data(self, config: MasterConfig, load: Callable[[], RunData], *, sampled: bool = False) -> RunData:
        """Return the rows of the run, after checking that its models and engines accept them.

        Args:
            load: Function that loads the configured data.
            sampled: Whether the rows are prompts.

        Raises:
            DataError: The rows cannot be used, or their known answers never get a reward.
            ConfigError: A model or the engine does not accept the rows.
        """
        data = self._rows(config, load, sampled=sampled)
        check_rows([role.section for role in config.models.values()], data, sampled=sampled)
        if isinstance(config, RolloutMasterConfig):
            check_row_fields(config, data)
            check_known_answers(config, data, self.running_environments)
        return data

    def _rows(self, config: MasterConfig, load: Callable[[], RunData], *, sampled: bool) -> RunData:
        if self.dataset is not None:
            return given_data(self.dataset, self.val_dataset, config.data, sampled=sampled)
        configured = load()
        if self.val_dataset is None:
            return configured
        return given_data(configured.train, self.val_dataset, config.data, sampled=sampled)

    def loss[Loss](self, configured: Loss, section: NamedPartConfig, rows_per_sample: int = 1) -> Loss:
        """Return the caller's loss, the class that `loss_fn.name` names, or the built-in loss `configured`.

        Args:
            rows_per_sample: Consecutive rows that share a microbatch, for a user's loss without `rows_per_unit`.

        Raises:
            ConfigError: `loss_fn.name` or `loss_fn.kwargs` cannot be used.
        """
        own = self.loss_fn
        if own is None and LOSSES.is_own(section.name):
            own = LOSSES.make(section.name, "loss_fn", section.kwargs)
        if own is None:
            return configured
        if not hasattr(own, "rows_per_unit"):
            own.rows_per_unit = rows_per_sample
        _try_loss(own, section.name if self.loss_fn is None else type(own).__name__)
        return own


NOTHING = UserParts()

_TRIAL_TOKENS = 8


def _try_loss(loss_fn: Any, name: str) -> None:
    """Call a user's loss on made-up rows, so that its mistakes are found before anything starts.

    Losses of logits are not called, because the shape of logits depends on the model.
    """
    from nemo_rl.algorithms.setup.open_policy import try_out
    from nemo_rl.losses.loss_function import LossInputType

    if getattr(loss_fn, "input_type", None) not in (LossInputType.LOGPROB, LossInputType.VALUE):
        return
    rows = _made_up_rows(loss_fn.rows_per_unit)
    try:
        found = try_out(loss_fn, rows)
    except KeyError as error:
        near = did_you_mean(str(error.args[0]) if error.args else "", rows)
        if near:  # an algorithm may have further keys
            _refuse_loss(name, error, f" The batch has no such key.{near}")
        return
    except USER_MISTAKES as error:
        _refuse_loss(name, error)
    if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], torch.Tensor) and not found[0].dim()):
        shown = f"{type(found).__name__} {tuple(found.shape)}" if isinstance(found, torch.Tensor) else repr(found)[:200]
        raise ConfigError(f"the loss {name} returns {shown} for one row; it must return a scalar tensor and a dict.")


def _made_up_rows(num_rows: int) -> BatchedDataDict[Any]:
    """Return rows with the keys that algorithms pass to losses."""
    tokens = torch.ones(num_rows, _TRIAL_TOKENS)
    per_token = ("advantages", "returns", "values", "prev_logprobs", "generation_logprobs", "reference_policy_logprobs")
    return BatchedDataDict(
        input_ids=tokens.long(),
        input_lengths=torch.full((num_rows,), _TRIAL_TOKENS),
        token_mask=tokens.clone(),
        sample_mask=torch.ones(num_rows),
        positive_examples=torch.ones(num_rows),
        prompt_groups=torch.zeros(num_rows, dtype=torch.int64),
        **{key: torch.full_like(tokens, -1.0) for key in per_token},
    )


def _refuse_loss(name: str, error: BaseException, hint: str = "") -> NoReturn:
    lines = "\n".join(map(str, user_lines(error)[-4:]))
    raise ConfigError(
        f"the loss {name} fails on one made-up row of {_TRIAL_TOKENS} tokens.{hint}\n{lines}\n{describe(error)}"
    ) from error


def _is_section(given: Any) -> bool:
    return isinstance(given, Mapping | BaseModel)
