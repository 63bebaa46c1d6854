"""The part of pydantic that `zeroinfer.config` uses, for machines that lack the package.

Only `gpu_check.py` puts it on the path. The same settings pass and the same are refused, with the
same messages; descriptions of fields are left out.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self

from pydantic.fields import FieldInfo

__all__ = [
    "BaseModel",
    "ConfigDict",
    "GetCoreSchemaHandler",
    "ValidationError",
    "model_validator",
]


class ConfigDict(dict[str, Any]):
    pass


class GetCoreSchemaHandler:
    pass


class ValidationError(ValueError):
    """One refused value: where it is, and why."""

    def __init__(
        self, loc: tuple[str, ...], kind: str, value: object, error: Exception | None
    ) -> None:
        super().__init__(f"{'.'.join(loc)}: {error or kind}")
        self.loc, self.kind, self.value, self.error = loc, kind, value, error

    def errors(self, *, include_url: bool = True) -> list[dict[str, Any]]:
        ctx = {} if self.error is None else {"error": self.error}
        return [
            {"loc": self.loc, "type": self.kind, "input": self.value, "msg": str(self), "ctx": ctx}
        ]


def model_validator(*, mode: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    assert mode == "after", f"only mode 'after' is known here, got {mode!r}"

    def mark(check: Callable[..., Any]) -> Callable[..., Any]:
        check.is_model_validator = True
        return check

    return mark


class BaseModel:
    """A frozen set of fields; unknown ones are refused."""

    model_config: ClassVar[ConfigDict]
    model_fields: ClassVar[dict[str, FieldInfo]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.model_fields = {
            name: FieldInfo(
                annotation=getattr(hint, "__origin__", hint),
                default=getattr(cls, name),
                metadata=getattr(hint, "__metadata__", ()),
            )
            for name, hint in inspect.get_annotations(cls).items()
        }

    def __init__(self, **values: Any) -> None:
        fields = self.model_fields
        checked = {n: _check(n, info, values[n]) for n, info in fields.items() if n in values}
        for name in values.keys() - fields.keys():
            raise ValidationError((name,), "extra_forbidden", values[name], None)
        defaults = {name: info.default for name, info in fields.items()}
        self.__dict__.update({**defaults, **checked, "model_fields_set": frozenset(values)})
        for attribute in vars(type(self)).values():
            if getattr(attribute, "is_model_validator", False):
                _run(attribute, self, loc=(), value=self)

    @classmethod
    def model_validate(cls, tree: Mapping[str, Any]) -> Self:
        return cls(**tree)

    def model_copy(self, *, update: Mapping[str, Any]) -> Self:
        """As with pydantic, what is new is not checked."""
        copy = type(self)()
        fields_set = self.model_fields_set | update.keys()
        copy.__dict__.update({**self.__dict__, **update, "model_fields_set": fields_set})
        return copy

    def model_dump(self, *, exclude_unset: bool = False) -> dict[str, Any]:
        names = [n for n in self.model_fields if n in self.model_fields_set or not exclude_unset]
        values = {name: getattr(self, name) for name in names}
        return {
            name: value.model_dump(exclude_unset=exclude_unset)
            if isinstance(value, BaseModel)
            else value
            for name, value in values.items()
        }

    def __setattr__(self, name: str, value: object) -> None:
        raise TypeError(f"{type(self).__name__} is frozen: {name} cannot be set")

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self.model_dump() == other.model_dump()


def _check(name: str, info: FieldInfo, value: Any) -> Any:
    """Return a value in its final type; a setting checks itself, a section its fields."""
    if info.metadata:
        return _run(info.metadata[0].parse, value, loc=(name,), value=value)
    if isinstance(value, info.annotation):
        return value
    if not isinstance(value, Mapping):
        raise ValidationError((name,), "model_type", value, None)
    try:
        return info.annotation(**value)
    except ValidationError as error:
        raise ValidationError((name, *error.loc), error.kind, error.value, error.error) from error


def _run(check: Callable[[Any], Any], given: Any, *, loc: tuple[str, ...], value: object) -> Any:
    try:
        return check(given)
    except ValueError as error:
        raise ValidationError(loc, "value_error", value, error) from error
