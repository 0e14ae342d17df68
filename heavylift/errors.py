"""The one exception that means "the user can fix this": shown as one clear line, exit code 2, no traceback.

Everything else that escapes is a defect of ours and keeps its traceback. Inner invariants are asserts.
"""

from __future__ import annotations

EXIT_USER_ERROR = 2


class UserError(ValueError):
    """Bad input. The message says what was expected, what came, and which key or file to change.

    `problems` holds one message per problem: checks collect everything they find and raise once.
    """

    def __init__(self, *problems: str) -> None:
        assert problems, "a UserError needs at least one message"
        super().__init__("\n".join(problems))
        self.problems: tuple[str, ...] = problems


def first_line(error: BaseException) -> str:
    """What a library's exception says, for a message of ours: its first line, or its kind where it says nothing."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
