"""What a user did wrong, said in one line."""


class InputError(Exception):
    """A user's mistake.

    The message is one line that names the file, line or key and the way out. The commands print it without
    a traceback and end with exit code 2.
    """
