"""The mistakes that a user can mend."""


class UserError(Exception):
    """Its text says what is wrong, where, and what to do.

    Programs print it and exit with 2, without a traceback.
    """

    def report(self) -> str:
        """Return the lines that a program prints."""
        return f"error: {self}"
