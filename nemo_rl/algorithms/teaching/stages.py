"""Build the stages of a run that score samples with its teachers."""

from collections.abc import Callable, Mapping

from nemo_rl.algorithms.runtime.run import Stage
from nemo_rl.algorithms.teaching.projection import Projection, common_beginnings, identity, num_ids, shared_tokens
from nemo_rl.algorithms.teaching.prompts import TeacherPrompts
from nemo_rl.algorithms.teaching.self_distillation import PrivilegedPrompts, SelfTeacher
from nemo_rl.algorithms.teaching.span_scores import Comparison, Reader, SameTokens, SpanTeacher
from nemo_rl.algorithms.teaching.teachers import (
    TeacherLogprobs,
    TeacherRoutes,
    TokenScorer,
    compare_vocabularies,
    role_of,
)
from nemo_rl.algorithms.teaching.text_alignment import AlignedTeacher, TextReader, WrittenReader, spelling
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
from nemo_rl.models.policy.interfaces import ScoringModel

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
        return lambda roles: [SelfTeacher(roles["policy"], prompts, longest)]
    routes = TeacherRoutes.of(given, config.teachers)
    remote = {name: _endpoint(name, each, tokenizer) for name, each in given.endpoints.items()}
    aligned = _other_tokenizers(config, tokenizer)
    for other in aligned.values():
        TeacherPrompts(prompts_of_run, other).ids(prompts_of_run[0])

    def stages(roles: Mapping[str, ScoringModel]) -> list[Stage]:
        own = {role_of(name): teacher.weight for name, teacher in config.teachers.items()}
        found: list[Stage] = [
            AlignedTeacher(
                roles[role], role, routes, TeacherPrompts(prompts_of_run, aligned[role]), tokenizer, longest, weight
            )
            if role in aligned
            else TeacherLogprobs(roles[role], role, routes, weight)
            for role, weight in own.items()
        ]
        return [
            *found,
            *(
                TeacherLogprobs(scorer, role_of(name), routes, given.teacher_weights.get(name, 1.0))
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
    prompts_of_run, longest = data.train, config.policy.max_total_sequence_length
    readers: dict[str, Reader] = {}
    comparisons: dict[str, Comparison] = {}
    for role, section in config.sections_of_teachers.items():
        other = get_tokenizer(section.tokenizer, section=role)
        same = other.get_vocab() == tokenizer.get_vocab()
        if not same:
            TeacherPrompts(prompts_of_run, other).ids(prompts_of_run[0])
        readers[role] = (
            SameTokens() if same else TextReader(TeacherPrompts(prompts_of_run, other), tokenizer, longest)
        )
        projection = identity(tokenizer) if same else _projection_of(config.loss_fn, section, role, (tokenizer, other))
        comparisons[role] = _comparison(config, projection)
    routes = TeacherRoutes({name: role_of(name) for name in config.teachers}, "teacher") if config.teachers else None

    def stages(roles: Mapping[str, ScoringModel]) -> list[Stage]:
        return [
            SpanTeacher(
                roles["policy"],
                roles[role],
                role,
                routes,
                readers[role],
                comparisons[role],
                section.weight,
            )
            for role, section in config.sections_of_teachers.items()
        ]

    return stages


def teacher_of_texts(config: SFTMasterConfig, teacher: TeacherConfig, tokenizer: TokenizerType) -> MakeStages:
    """Return a function that builds the stage of a teacher of written rows.

    Args:
        tokenizer: The student's tokenizer.

    Raises:
        ConfigError: The teacher's tokens cannot be compared with those of the student.
    """
    loss = config.teacher_loss_fn
    other = get_tokenizer(teacher.tokenizer, section="teacher")
    same = other.get_vocab() == tokenizer.get_vocab()
    if not same and not loss.crosses_tokenizers:
        compare_vocabularies(tokenizer, other, config.policy.model_name, teacher.model_name)
    reader: Reader = SameTokens() if same else WrittenReader(tokenizer, other, teacher.max_total_sequence_length)
    top = loss.vocab_topk or _TOP
    comparison = Comparison(
        projection=identity(tokenizer) if same else _projection_of(loss, teacher, "teacher", (tokenizer, other)),
        top=top,
        unmatched=(loss.uncommon_topk or top) if loss.gold_loss else 0,
        single_tokens_only=loss.exact_token_match_only,
        temperature=1.0,
    )
    return lambda roles: [
        SpanTeacher(roles["policy"], roles["teacher"], "teacher", None, reader, comparison, teacher.weight)
    ]


def _projection_of(
    loss: DistillationLossConfig, section: TeacherConfig, role: str, tokenizers: tuple[TokenizerType, TokenizerType]
) -> Projection:
    """Return the classes of the tokens of student and teacher."""
    student, teacher = tokenizers
    path = section.projection_matrix_path
    if path is not None:
        key = f"{role}.projection_matrix_path"
        return Projection.load(path, num_ids(student), num_ids(teacher), key)
    return shared_tokens(student, teacher) if loss.gold_loss else common_beginnings(student, teacher)


def _comparison(config: DistillationMasterConfig, projection: Projection) -> Comparison:
    loss = config.loss_fn
    top = loss.vocab_topk or config.distillation.topk_logits_k
    return Comparison(
        projection=projection,
        top=top,
        unmatched=(loss.uncommon_topk or top) if loss.gold_loss else 0,
        single_tokens_only=loss.exact_token_match_only,
        temperature=config.policy.sampling.temperature,
    )


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
