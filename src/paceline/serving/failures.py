"""Why a request is not answered with a prediction, as HTTP says it."""

from __future__ import annotations

from collections.abc import Sequence


class RequestFailure(Exception):
    """A request gets an error: a status, a sentence, and headers.

    Attributes:
        status: of HTTP.
        headers: to be sent with it.
    """

    def __init__(self, status: int, message: str, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers


class InvalidRequest(RequestFailure):
    """The request is not what the protocol or the model's schema says."""

    def __init__(self, message: str) -> None:
        super().__init__(400, message)


class Overloaded(RequestFailure):
    """More waits than may wait."""

    def __init__(self, waiting_rows: int, retry_after_s: int) -> None:
        super().__init__(
            429,
            f"{waiting_rows} rows wait already. Try again in {retry_after_s} s.",
            [(b"retry-after", str(retry_after_s).encode())],
        )


class DeadlinePassed(RequestFailure):
    """The request's time is up."""

    def __init__(self, timeout_s: float) -> None:
        super().__init__(
            504, f"it took longer than the {timeout_s * 1000:,.0f} ms that this request may take."
        )


class ModelFailed(RequestFailure):
    """The model raised an error on this input alone."""

    def __init__(self, message: str) -> None:
        super().__init__(500, f"the model failed on this input: {message}")


class ReplicaLost(RequestFailure):
    """Two replicas, one after the other, died while they computed this request."""

    def __init__(self) -> None:
        super().__init__(503, "the replicas that computed this request died. Others are being started.")
