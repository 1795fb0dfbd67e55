"""Parts of a run that a configuration chooses by name: a built-in name, or the dotted path of a user's class.

Each kind of part (losses, advantage estimators, rollout sources, engines, training backends, environments) has one
`Registry`, next to its interface. Invariant: a wrong name, a class of another kind and arguments that do not fit are
errors that name the key and say what is allowed; all of these errors are found before Ray starts.
"""

import inspect
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticSchemaGenerationError, PydanticUserError
from typing_extensions import is_protocol

from nemo_rl.utils.errors import ConfigError, did_you_mean
from nemo_rl.utils.imports import import_dotted

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@dataclass(frozen=True)
class Registry[Part]:
    """Registry of the names of one kind of part."""

    kind: str
    """Name of the kind in messages, for example "loss"."""
    interface: type[Any]
    """ABC from which a user's class derives, or protocol whose methods the class has."""
    built_in: Mapping[str, str] = field(default_factory=dict)
    """Dotted path of the class of each built-in name."""
    attributes: tuple[str, ...] = ()
    """Attributes of the interface that a constructed object must have."""
    advice: str = ""
    """Additional sentence for messages about names."""

    def is_own(self, name: str) -> bool:
        """Return whether a name is the dotted path of a user's class."""
        return name not in self.built_in and "." in name

    def path_of(self, name: str, what: str | None = None) -> str:
        """Return the dotted path of the class that a name leads to, without importing the class.

        Args:
            name: built-in name or dotted path.
            what: the key and its value, for messages.

        Raises:
            ConfigError: the name is neither a built-in name nor a dotted path.
        """
        if name in self.built_in:
            return self.built_in[name]
        if self.is_own(name):
            return name
        problem = f"{what} is unknown" if what else f"unknown {self.kind} {name!r}"
        raise ConfigError(f"{problem}.{did_you_mean(name, self.built_in)} {self._advice}")

    def load(self, name: str, what: str) -> Any:
        """Import the object that a name leads to.

        Args:
            name: built-in name or dotted path.
            what: the key and its value, for messages.

        Raises:
            ConfigError: the name is unknown, or nothing can be imported under it.
        """
        return import_dotted(self.path_of(name, what), ConfigError, what, self._advice)

    def class_of(self, name: str, what: str) -> type[Part]:
        """Import the class that a name leads to and check its kind, with the errors of `load` and `checked`."""
        return self.checked(self.load(name, what), what)

    def checked(self, found: Any, what: str) -> type[Part]:
        """Return an imported object if it is a class of this kind.

        Args:
            what: the key and its value, for messages.

        Raises:
            ConfigError: it is not a class, or a class that lacks methods of the interface.
        """
        if self._is_protocol and not inspect.isclass(found):
            raise ConfigError(f"{what} is not a class. {self._advice}")
        if not self._is_protocol and not (inspect.isclass(found) and issubclass(found, self.interface)):
            raise ConfigError(f"{what} is not {self._one}: derive it from {self._interface_path}.")
        missing = self._missing_methods(found)
        if missing:
            raise ConfigError(
                f"{what} is not {self._one}: it lacks the methods {', '.join(missing)} of {self._interface_path}. "
                "Add what is missing."
            )
        checked_class: type[Part] = found
        return checked_class

    def check_arguments(self, name: str, key: str, arguments: Mapping[str, Any], num_given: int = 0) -> None:
        """Check a user's class and its configured arguments without constructing an object.

        Args:
            name: dotted path of the class.
            key: key of the section that has `name` and `kwargs`.
            arguments: keyword arguments of the constructor.
            num_given: positional arguments that the library passes before them.

        Raises:
            ConfigError: the class cannot be used, or the arguments do not fit its constructor.
        """
        fitting_arguments(self.class_of(name, f"{key}.name={name!r}"), f"{key}.kwargs", arguments, num_given)

    def make(self, name: str, key: str, arguments: Mapping[str, Any], *given: Any) -> Part:
        """Construct a user's class.

        Args:
            name: dotted path of the class.
            key: key of the section that has `name` and `kwargs`.
            arguments: keyword arguments of the constructor.
            given: positional arguments that the library passes before them.

        Raises:
            ConfigError: as `check_arguments`; or the constructor refuses its arguments, or the object lacks an
                attribute of the interface.
        """
        part_class = self.class_of(name, f"{key}.name={name!r}")
        fitting = fitting_arguments(part_class, f"{key}.kwargs", arguments, len(given))
        try:
            part = part_class(*given, **fitting)
        except ConfigError:
            raise  # the class has its own error message
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{key}.kwargs do not fit {name}: {_in_words(error)}") from error
        missing = [name for name in self.attributes if not hasattr(part, name)]
        if missing:
            lacking = f"its objects lack the attributes {', '.join(missing)} of {self._interface_path}"
            raise ConfigError(f"{key}.name={name!r} is not {self._one}: {lacking}. Add what is missing.")
        return part

    @property
    def _one(self) -> str:
        return f"{'an' if self.kind[0] in 'aeiou' else 'a'} {self.kind}"

    @property
    def _interface_path(self) -> str:
        return f"{self.interface.__module__}.{self.interface.__qualname__}"

    @property
    def _advice(self) -> str:
        path = "the dotted path of a class that Python can import from where the run was started."
        own = f"{path} {self.advice}".rstrip()
        return f"Use one of {', '.join(self.built_in)}, or {own}" if self.built_in else f"Give {own}"

    @property
    def _is_protocol(self) -> bool:
        return is_protocol(self.interface)

    def _missing_methods(self, found: type) -> list[str]:
        """Return the methods of the interface that a class lacks.

        A class with `__getattr__` may take methods from another object, but not `__call__` and other special methods,
        which Python looks up in the class.
        """
        abstract = sorted(getattr(found, "__abstractmethods__", ()))
        if abstract or not self._is_protocol:
            return abstract
        own = [vars(base) for base in found.__mro__ if base not in self.interface.__mro__]
        missing = [name for name in methods_of(self.interface) if not any(name in members for members in own)]
        return [name for name in missing if name.startswith("__")] if hasattr(found, "__getattr__") else missing


def check_own_keys(made: type, key: str, values: Mapping[str, Any]) -> None:
    """Check a mapping that a class gets as a whole, if the class has a `config_class` for it.

    Args:
        made: a user's class; `config_class` is a dataclass or a pydantic model, None or absent for no check.
        key: key of the mapping, for messages.

    Raises:
        ConfigError: keys are unknown or missing, values are of another type, or `config_class` refuses them.
    """
    config_class = getattr(made, "config_class", None)
    if config_class is None:
        return
    fitting = fitting_arguments(config_class, key, values)
    try:
        config_class(**fitting)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{key} does not fit {config_class.__name__}: {_in_words(error)}") from error


def methods_of(protocol: type) -> list[str]:
    """Return the names of a protocol's methods, without its properties, which may be plain attributes."""
    made_by_python = ("__init__", "__subclasshook__")
    return [
        name
        for base in reversed(protocol.__mro__)
        if base is not typing.Protocol
        for name, value in vars(base).items()
        if inspect.isfunction(value) and name not in made_by_python
    ]


def fitting_arguments(made: type, key: str, arguments: Mapping[str, Any], num_given: int = 0) -> dict[str, Any]:
    """Check keyword arguments against the constructor of a class, by name and by type where it is annotated.

    Args:
        made: the class; the parameters of a dataclass or a pydantic model are its fields.
        key: key of the mapping, for messages.
        arguments: values as a YAML file has them.
        num_given: positional parameters that get their values from elsewhere.

    Returns:
        The arguments, converted to the annotated types.

    Raises:
        ConfigError: lists arguments that are unknown, missing or of another type.
    """
    parameters = dict(list(inspect.signature(made).parameters.items())[num_given:])
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    named = {name: parameter for name, parameter in parameters.items() if parameter.kind not in _VARIABLE}
    taken = f"It takes: {', '.join(named) or 'none'}."
    problems = [
        f"{key}.{name} is no argument of {made.__name__}.{did_you_mean(name, named)} {taken}"
        for name in arguments
        if name not in named and not takes_any
    ]
    problems += [
        f"{key}.{name} has no value, and {made.__name__} needs it."
        for name, parameter in named.items()
        if parameter.default is inspect.Parameter.empty and name not in arguments
    ]
    hints = _hints_of(made)
    fitting = dict(arguments)
    for name, value in arguments.items():
        try:
            fitting[name] = _converted(hints.get(name, Any), value)
        except ValidationError as error:
            problems += [f"{key}.{name}={value!r} does not fit {made.__name__}: {_told(e)}." for e in error.errors()]
    if problems:
        raise ConfigError("\n  ".join(problems))
    return fitting


def _in_words(error: Exception) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    return "; ".join(map(_told, error.errors()))


def _told(error: Mapping[str, Any]) -> str:
    """Return the place and the message of an error of pydantic."""
    return f"{'.'.join(map(str, error['loc']))}: {error['msg']}".removeprefix(": ")


def _hints_of(made: type) -> dict[str, Any]:
    """Return the types of the constructor's parameters, or no types if its annotations cannot be resolved."""
    try:
        fields = typing.get_type_hints(made, include_extras=True)
        return fields | typing.get_type_hints(made.__init__, include_extras=True)  # type: ignore[misc]
    except (NameError, TypeError, AttributeError):
        return {}


def _converted(annotation: Any, value: Any) -> Any:
    """Return a value converted to the annotated type, or unchanged if pydantic does not know the type."""
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(annotation)
    except (PydanticSchemaGenerationError, PydanticUserError):
        return value
    return adapter.validate_python(value)
