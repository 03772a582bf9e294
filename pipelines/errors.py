"""What a user did wrong, said in one line: no traceback, exit code 2."""


class UserError(Exception):
    """A mistake in the arguments, the config or the named data; the message is one line: what, where, what is valid."""
