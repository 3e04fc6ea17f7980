"""The arguments of classes that are made by `__new__`, as `Policy` is: griffe looks for those of `__init__` alone."""

import griffe


class ShowNew(griffe.Extension):
    """Has mkdocstrings show the arguments of `__new__` as those of the class; `mkdocs.yml` names it."""

    def on_class_members(self, *, cls: griffe.Class, **_: object) -> None:
        """Gives a class without an `__init__` one that has the arguments of its `__new__`."""
        made = cls.members.get("__new__")
        if "__init__" in cls.members or not isinstance(made, griffe.Function):
            return
        arguments = griffe.Parameters(*made.parameters)
        cls.set_member("__init__", griffe.Function("__init__", parameters=arguments, lineno=made.lineno, parent=cls))
