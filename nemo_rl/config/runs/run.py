"""Define the base of all master configurations, of training and of evaluation."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import PrivateAttr

from nemo_rl.config.base.section import Section
from nemo_rl.config.rules.broken_rules import Findings, report_findings
from nemo_rl.config.rules.files import PathKey, check_files
from nemo_rl.config.rules.models import check_own_code, trust_models
from nemo_rl.config.rules.topology import Role
from nemo_rl.config.schema.cluster import ClusterConfig
from nemo_rl.config.schema.model.policy import PolicyConfig
from nemo_rl.config.schema.named_part import NamedPartConfig

INHERITED = "data.default"
"""Section with defaults of data entries. Its keys are checked in the entries."""


class RunConfig(Section):
    """Base of all master configurations."""

    _hidden: dict[tuple[str | int, ...], str] = PrivateAttr(default_factory=dict)

    cpu_config: ClassVar[str]
    """Example configuration that runs on a CPU. Errors about missing GPUs name it."""
    samples: ClassVar[bool] = False
    """Whether engines sample answers and environments reward them."""
    generation_key: ClassVar[str] = "policy.generation"
    """Dotted key of the engines' section."""
    read_by_defaults: ClassVar[Mapping[str, Any]] = {}
    """Sections that the configuration does not have, but that defaults of its other sections refer to."""

    if TYPE_CHECKING:  # pydantic puts fields of a base class first
        cluster: ClusterConfig

        @property
        def policy(self) -> PolicyConfig:
            """The model that is trained or evaluated."""

    @property
    def hidden_places(self) -> Mapping[tuple[str | int, ...], str]:
        """Return the text that replaces each secret of this configuration, by its place (`base.hidden_values`)."""
        return self._hidden

    def hide(self, places: Mapping[tuple[str | int, ...], str]) -> None:
        """Set `hidden_places`."""
        self._hidden = dict(places)

    @property
    def models(self) -> dict[str, Role]:
        """Return the models with ranks, by name. There are none if only engines hold a model."""
        return {}

    def rows_of(self, model: str) -> int:
        """Return the number of rows per training sample of a model: 2 for pairs of answers."""
        return 1

    @property
    def model_cluster(self) -> ClusterConfig:
        """Return the part of the cluster for models and engines."""
        return self.cluster

    @property
    def keeps_reference(self) -> bool:
        """Return True if the policy's initial weights are kept for reference log-probabilities."""
        return False

    @property
    def named_parts(self) -> Mapping[str, NamedPartConfig]:
        """Return the sections of parts that are chosen by name and constructed in the controller, by dotted key."""
        return {}

    def model_keys(self) -> Iterator[tuple[str, str, PolicyConfig]]:
        """Yield, for each model, the keys of its name and of its tokenizer's name, and its section."""
        for name, role in self.models.items():
            yield f"{name}.model_name", f"{name}.tokenizer.name", role.section

    def env_entries(self) -> Iterator[tuple[str, str | None]]:
        """Yield the key and the environment's name of each data entry whose answers are rewarded."""
        yield from ()

    def unused(self) -> Iterator[tuple[str, Sequence[str], str]]:
        """Yield keys that the run does not use, with the reason and the keys that make them unused."""
        yield from ()

    def path_keys(self) -> Iterator[PathKey]:
        """Yield the keys that may name files or folders to read."""
        raise NotImplementedError

    def findings(self) -> Findings:
        """Yield errors of keys that are individually valid. Subclasses add the rules of their algorithm."""
        raise NotImplementedError

    def missing_files(self) -> Findings:
        """Yield errors of missing files and folders that keys name, if these can only be local, and of own code."""
        files = check_files(path for path in self.path_keys() if path.place != INHERITED)
        return chain(files, check_own_code(self.model_keys(), self.cluster))

    def notes(self) -> Iterator[str]:
        """Yield hints for the user before the run starts. They are not errors."""
        yield from ()

    def check(self) -> None:
        """Check keys against each other and that the files that they name exist, and trust the code that they name.

        Raises:
            ConfigError: a key contradicts another one or names a missing file. The message lists all findings.
        """
        report_findings(chain(self.findings(), self.missing_files()))
        trust_models(self.model_keys())
