"""The one exception that means: what the user gave cannot be used."""


class UserError(ValueError):
    """Says in one line what is wrong with the user's input and what would work.

    The command line prints it without a traceback and exits with status 2. Anything else that is raised is a bug
    of ours and keeps its traceback.
    """
