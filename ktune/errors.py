"""Every error a user can meet, each saying what was asked, what is true and what to do."""

from __future__ import annotations


class KtuneError(Exception):
    """Base of all errors raised on purpose; the command line prints it without a traceback."""

    exit_code = 1


class UsageError(KtuneError):
    """The command line or an argument asks for something that does not exist."""

    exit_code = 2


class NoDeviceError(KtuneError):
    """A live target was asked for and this machine has no suitable GPU."""

    exit_code = 3


class ProblemError(UsageError):
    """A problem names an unknown field, or a field has a value it cannot have."""


class VariantError(UsageError):
    """A variant names an unknown parameter, or has a value that the space does not allow."""


class SettingsError(UsageError):
    """An environment variable holds a value that is not legal."""


class SpaceError(UsageError):
    """A search-space file is wrong; the message starts with ``file:line:column``."""


class TemplateError(KtuneError):
    """A template is missing, or does not render with the parameters of its space."""


class CompileError(KtuneError):
    """A rendered kernel does not compile for the target."""


class CheckError(KtuneError):
    """A kernel computed something else than its reference."""


class MeasureError(KtuneError):
    """A kernel could not be timed, or its timing is not a number."""


class StorageError(KtuneError):
    """The study storage or a cache folder cannot be used."""


class TableError(KtuneError):
    """A dispatch table cannot be read or written."""


class RecordingError(UsageError):
    """A recording cannot be read, or does not hold what is asked of it."""


class CaptureError(KtuneError, RuntimeError):
    """A kernel that is not loaded yet was called while a CUDA graph is being captured."""


class StrictError(KtuneError, LookupError):
    """``KTUNE_STRICT=1`` and no tuned entry matches the call."""
