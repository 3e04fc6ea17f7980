"""Corrects signatures: classes made by `__new__`, such as `Policy`, and defaults that are private constants."""

import re
from typing import Any

import griffe


class ShowNew(griffe.Extension):
    """Shows the arguments of `__new__` as those of the class, as the mkdocstrings extension of `mkdocs.yml`."""

    def on_class_members(self, *, cls: griffe.Class, **_: object) -> None:
        """Gives a class without an `__init__` one that has the arguments of its `__new__`."""
        made = cls.members.get("__new__")
        if "__init__" in cls.members or not isinstance(made, griffe.Function):
            return
        arguments = griffe.Parameters(*made.parameters)
        cls.set_member("__init__", griffe.Function("__init__", parameters=arguments, lineno=made.lineno, parent=cls))


class ShowDefaults(griffe.Extension):
    """Has mkdocstrings show the value of a default that is a private constant; `mkdocs.yml` names its file."""

    def on_class_members(self, *, cls: griffe.Class, **_: object) -> None:
        """Replaces private constants among the defaults of fields and methods by their values."""
        constants = cls.module.members
        for member in cls.members.values():
            if isinstance(member, griffe.Attribute) and str(member.value) in constants:
                member.value = _read_value(constants[str(member.value)], member.value)
            for parameter in member.parameters if isinstance(member, griffe.Function) else ():
                if str(parameter.default) in constants:
                    parameter.default = _read_value(constants[str(parameter.default)], parameter.default)


def _read_value(constant: griffe.Object | griffe.Alias, otherwise: Any) -> Any:
    value = str(constant.value) if isinstance(constant, griffe.Attribute) else ""
    is_number = constant.name.startswith("_") and re.fullmatch(r"\d+( \*\* \d+)?", value)
    return str(eval(value)) if is_number else otherwise
