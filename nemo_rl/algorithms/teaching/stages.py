"""Build the stages of a run that score samples with its teachers."""

from collections.abc import Callable, Mapping

from nemo_rl.algorithms.runtime.run import Stage
from nemo_rl.algorithms.teaching.projection import Projection, common_beginnings, identity, num_ids, shared_tokens
from nemo_rl.algorithms.teaching.prompts import TeacherPrompts
from nemo_rl.algorithms.teaching.self_distillation import PrivilegedPrompts, SelfTeacher
from nemo_rl.algorithms.teaching.span_scores import Reader, SameTokens, SpanTeacher, TokenComparison
from nemo_rl.algorithms.teaching.teachers import (
    TeacherLogprobs,
    TeacherRoutes,
    TokenScorer,
    compare_vocabularies,
    role_of,
)
from nemo_rl.algorithms.teaching.text_alignment import AlignedTeacher, TextReader, WrittenReader, spelling
from nemo_rl.algorithms.teaching.token_weights import TeacherWeight, weight_of
from nemo_rl.config import (
    DistillationLossConfig,
    DistillationMasterConfig,
    GRPOMasterConfig,
    SFTMasterConfig,
    TeacherConfig,
    TeacherEndpointConfig,
)
from nemo_rl.data.datasets.setup import RunData
from nemo_rl.data.interfaces import TokenizerType
from nemo_rl.data.tokenizer import get_tokenizer
from nemo_rl.models.huggingface.load import load_model_config
from nemo_rl.models.policy.interfaces import ScoringModel
from nemo_rl.utils.errors import ConfigError

_TOP = 64
"""Number of compared tokens of written rows if none is configured."""

type MakeStages = Callable[[Mapping[str, ScoringModel]], list[Stage]]
"""Function that builds stages from the models of a run."""


def teacher_stages(config: GRPOMasterConfig, data: RunData | None, tokenizer: TokenizerType) -> MakeStages:
    """Return a function that builds the stages of all teachers of a run.

    Args:
        data: Rows of the run, whose training prompts may be rendered for a teacher. None if only the models of the
            recipe are asked for (`launch.checks.recipe_of`); there are no stages then.
        tokenizer: The policy's tokenizer.

    Raises:
        ConfigError: A teacher cannot be compared with the policy, or an endpoint cannot be used.
        DataError: The first prompt cannot be rendered for a teacher.
    """
    if data is None or not config.has_teachers:
        return lambda roles: []
    given, longest, prompts_of_run = config.on_policy_distillation, config.policy.max_total_sequence_length, data.train
    if given.learns_from_itself:
        prompts = PrivilegedPrompts(given.self_distillation, TeacherPrompts(prompts_of_run, tokenizer))
        prompts.check()
        place = "on_policy_distillation.self_distillation.token_weights"
        weight = TeacherWeight.make(1.0, given.self_distillation.token_weights, tokenizer, place)
        return lambda roles: [SelfTeacher(roles["policy"], prompts, longest, weight)]
    routes = TeacherRoutes.of(given, config.teachers)
    remote = {name: _endpoint(name, each, tokenizer) for name, each in given.endpoints.items()}
    aligned = _other_tokenizers(config, tokenizer)
    for other in aligned.values():
        TeacherPrompts(prompts_of_run, other).ids(prompts_of_run[0])
    weights = {role_of(name): weight_of(teacher, tokenizer, role_of(name)) for name, teacher in config.teachers.items()}

    def stages(roles: Mapping[str, ScoringModel]) -> list[Stage]:
        found: list[Stage] = [
            AlignedTeacher(
                roles[role], role, routes, TeacherPrompts(prompts_of_run, aligned[role]), tokenizer, longest, weight
            )
            if role in aligned
            else TeacherLogprobs(roles[role], role, routes, weight)
            for role, weight in weights.items()
        ]
        return [
            *found,
            *(
                TeacherLogprobs(scorer, role_of(name), routes, TeacherWeight(given.teacher_weights.get(name, 1.0)))
                for name, scorer in remote.items()
            ),
        ]

    return stages


def span_teachers(config: DistillationMasterConfig, data: RunData | None, tokenizer: TokenizerType) -> MakeStages:
    """Return a function that builds the stages of a distillation whose teachers may have other tokenizers.

    Args:
        data: As in `teacher_stages`.
        tokenizer: The student's tokenizer.

    Raises:
        ConfigError: A teacher's tokens cannot be compared with those of the student.
        DataError: The first prompt cannot be rendered for a teacher.
    """
    if data is None:
        return lambda roles: []
    loss, prompts_of_run = config.loss_fn, data.train
    routes = TeacherRoutes({name: role_of(name) for name in config.teachers}, "teacher") if config.teachers else None
    temperature, default_top = config.policy.sampling.temperature, config.distillation.topk_logits_k
    parts: dict[str, tuple[Reader, TokenComparison, TeacherWeight]] = {}
    for role, section in config.sections_of_teachers.items():
        other = get_tokenizer(section.tokenizer, section=role)
        reader: Reader = SameTokens()
        if other.get_vocab() != tokenizer.get_vocab():
            prompts = TeacherPrompts(prompts_of_run, other)
            prompts.ids(prompts_of_run[0])
            reader = TextReader(prompts, tokenizer, config.policy.max_total_sequence_length)
        comparison = _comparison(loss, _projection(loss, section, role, (tokenizer, other)), default_top, temperature)
        parts[role] = reader, comparison, weight_of(section, tokenizer, role)

    def stages(roles: Mapping[str, ScoringModel]) -> list[Stage]:
        return [SpanTeacher(roles["policy"], roles[role], role, routes, *part) for role, part in parts.items()]

    return stages


def teachers_of_texts(config: SFTMasterConfig, tokenizer: TokenizerType) -> MakeStages:
    """Return a function that builds the stages of the teachers of written rows. Each teacher reads all rows.

    Args:
        tokenizer: The student's tokenizer.

    Raises:
        ConfigError: A teacher's tokens cannot be compared with those of the student.
    """
    loss = config.teacher_loss_fn
    parts: dict[str, tuple[Reader, TokenComparison, TeacherWeight]] = {}
    for role, section in config.sections_of_teachers.items():
        other = get_tokenizer(section.tokenizer, section=role)
        same = other.get_vocab() == tokenizer.get_vocab()
        if not same and not loss.crosses_tokenizers:
            compare_vocabularies(tokenizer, other, config.policy.model_name, section.model_name, role)
        reader = SameTokens() if same else WrittenReader(tokenizer, other, section.max_total_sequence_length)
        comparison = _comparison(loss, _projection(loss, section, role, (tokenizer, other)), _TOP, 1.0)
        parts[role] = reader, comparison, weight_of(section, tokenizer, role)

    def stages(roles: Mapping[str, ScoringModel]) -> list[Stage]:
        return [
            SpanTeacher(roles["policy"], roles[role], role, None, *part, number)
            for number, (role, part) in enumerate(parts.items())
        ]

    return stages


def _projection(
    loss: DistillationLossConfig, section: TeacherConfig, role: str, tokenizers: tuple[TokenizerType, TokenizerType]
) -> Projection:
    """Return the classes of the tokens of student and teacher.

    Raises:
        ConfigError: The file of classes cannot be used, or the teacher has fewer logits than its tokenizer has tokens.
    """
    student, teacher = tokenizers
    sizes = load_model_config(section.model_name, section.hf_config_overrides, section=role)
    if sizes.get_text_config().vocab_size < num_ids(teacher):
        raise ConfigError(
            f"{role}.tokenizer.name={section.tokenizer.name!r} has {num_ids(teacher)} tokens, and the model only "
            f"{sizes.get_text_config().vocab_size} logits. Name the tokenizer of {role}.model_name."
        )
    if student.get_vocab() == teacher.get_vocab():
        return identity(student)
    if section.projection_matrix_path is not None:
        key = f"{role}.projection_matrix_path"
        return Projection.load(section.projection_matrix_path, num_ids(student), num_ids(teacher), key)
    return shared_tokens(student, teacher) if loss.gold_loss else common_beginnings(student, teacher)


def _comparison(
    loss: DistillationLossConfig, projection: Projection, default_top: int, temperature: float
) -> TokenComparison:
    top = loss.vocab_topk or default_top
    unmatched = (loss.uncommon_topk or top) if loss.gold_loss else 0
    return TokenComparison(projection, top, unmatched, loss.exact_token_match_only, temperature)


def _other_tokenizers(config: GRPOMasterConfig, tokenizer: TokenizerType) -> dict[str, TokenizerType]:
    """Return the tokenizers of the teachers whose texts are compared, by role.

    Raises:
        ConfigError: A token has another id in a teacher's tokenizer, and the configuration compares tokens; or the
            bytes of tokens are not known.
    """
    found: dict[str, TokenizerType] = {}
    for name, teacher in config.teachers.items():
        role = role_of(name)
        other = get_tokenizer(teacher.tokenizer, section=role)
        if config.on_policy_distillation.compares == "text" and other.get_vocab() != tokenizer.get_vocab():
            for each in (tokenizer, other):
                spelling(each)  # refuses a tokenizer whose bytes are not known
            found[role] = other
        else:
            compare_vocabularies(tokenizer, other, config.policy.model_name, teacher.model_name, role)
    return found


def _endpoint(name: str, config: TeacherEndpointConfig, tokenizer: TokenizerType) -> TokenScorer:
    from nemo_rl.models.generation.remote.scores import EndpointScores  # runs without endpoints do not need httpx

    teacher = EndpointScores(config, f"on_policy_distillation.endpoints.{name}")
    teacher.check(tokenizer)
    return teacher
