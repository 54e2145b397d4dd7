"""Owns what a benchmark knows about right answers: each call's rows and tokens, learnt before the load starts."""

from __future__ import annotations

import http.client
from collections.abc import Sequence

from generator import Run
from wire import Answer, Call, WrongAnswerError, check_rows, read_answer, stub_rows


class Judge:
    """The answer of every call, asked for one after the other with nothing else running."""

    def __init__(self, host: str, port: int, calls: Sequence[Call], *, is_stub: bool) -> None:
        """Ask the server once for every call. Raises WrongAnswerError when a stub's rows are not its formula's."""
        self._answers: list[Answer] = []
        connection = http.client.HTTPConnection(host, port, timeout=120)
        for call in calls:
            answer = read_answer(_exchange(connection, call))
            if is_stub:
                check_rows(answer.rows, stub_rows(call.texts, answer.rows.shape[1]))
            self._answers.append(answer)
        connection.close()

    def check(self, run: Run) -> int:
        """Compare a run's samples with the answers their calls had alone; return how many were compared.

        Raises WrongAnswerError: a speed with wrong answers is no result.
        """
        for sample in run.samples:
            check_rows(read_answer(sample.response).rows, self._answers[sample.call].rows)
        return len(run.samples)

    def num_tokens(self, run: Run) -> int:
        """Return the tokens of a run's good answers, as the server counts them."""
        return sum(self._answers[call].num_tokens * count for call, count in run.call_counts.items())

    @staticmethod
    def beyond_forward_ms(run: Run) -> list[float]:
        """Return the latency of each sample less what the server reports as its time in forward passes."""
        return [sample.latency_ns / 1e6 - read_answer(sample.response).inference_ms for sample in run.samples]


def _exchange(connection: http.client.HTTPConnection, call: Call) -> bytes:
    """Send a prepared request and return the whole response, in the form that `read_answer` takes."""
    head, _, body = call.data.partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    method, path, _ = lines[0].split()
    connection.request(method, path, body, dict(line.split(": ", 1) for line in lines[1:]))
    response = connection.getresponse()
    content = response.read()
    if response.status != 200:
        raise WrongAnswerError(f"status {response.status} before the load: {content[:300]!r}")
    return f"content-type: {response.headers['content-type']}\r\n\r\n".encode() + content
