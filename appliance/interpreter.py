"""The interpreter: the process that reads tool calls and reasoning out of what models write.

Started by the daemon as ``python -m appliance.interpreter SOCKET_FD``. One thread begins chats,
which may take seconds, while another one reads those that have begun, each in their order; the
process ends when the daemon hangs up.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeAlias

from appliance import wire
from appliance.dialogue import (
    Begin,
    Begun,
    Forget,
    Hear,
    ParserUnusable,
    Understood,
    Up,
    decoder_of_questions,
)
from appliance.engines.protocol import Guide
from appliance.toolcalls import Heard

PR_SET_PDEATHSIG = 1
READ_BYTES = 1 << 16

log = logging.getLogger("appliance.interpreter")


class Conversation(Protocol):
    """One chat, and the state of its parsers."""

    guide: Guide | None
    special_tokens: bool

    def hear(self, choice: int, text: str, tokens: Sequence[int], finished: bool) -> Heard:
        """What the text is."""


Open: TypeAlias = Callable[[Begin], Conversation]
"""Raises `ParserUnusable`, and `ValueError` for a chat that asks for what cannot be."""


class Interpreter:
    """Answers questions, by `send`, from two threads."""

    def __init__(self, open_conversation: Open, send: Callable[[Up], None]) -> None:
        self._open = open_conversation
        self._send = send
        self._conversations: dict[int, Conversation] = {}
        self._waiting: set[int] = set()
        """Chats that are to begin. Of two threads, the one that takes a chat out decides on it."""
        self._beginning = ThreadPoolExecutor(1, "beginning")

    def take(self, question: Begin | Hear | Forget) -> None:
        match question:
            case Begin(number=number):
                self._waiting.add(number)
                self._beginning.submit(self._begin_if_waiting, number, question)
            case Hear(number=number):
                self._send(self._hear(number, question))
            case Forget(number=number):
                if self._stops_waiting(number):  # it will not begin
                    return
                if self._conversations.pop(number, None) is None:  # it may be beginning
                    self._beginning.submit(self._conversations.pop, number, None)

    def end(self) -> None:
        """Wait for the chat that is being begun; no other one will be."""
        self._beginning.shutdown(cancel_futures=True)

    def _stops_waiting(self, number: int) -> bool:
        """Whether the chat waited, which it does no longer."""
        try:
            self._waiting.remove(number)
        except KeyError:
            return False
        return True

    def _begin_if_waiting(self, number: int, question: Begin) -> None:
        if self._stops_waiting(number):
            self._send(self._begin(number, question))

    def _begin(self, number: int, question: Begin) -> Begun:
        try:
            conversation = self._open(question)
        except ParserUnusable as error:
            return Begun(number, fault=str(error))
        except ValueError as error:
            return Begun(number, refused=str(error))
        except Exception as error:  # a parser's defect is not the end of the others
            log.exception("a chat could not be begun")
            return Begun(number, fault=f"{type(error).__name__}: {error}")
        self._conversations[number] = conversation
        return Begun(number, conversation.guide, conversation.special_tokens)

    def _hear(self, number: int, question: Hear) -> Understood:
        try:
            conversation = self._conversations[number]
            heard = conversation.hear(
                question.choice, question.text, question.tokens, question.finished
            )
        except Exception as error:
            log.exception("a parser failed")
            return Understood(number, Heard(), failed=f"{type(error).__name__}: {error}")
        return Understood(number, heard)


def converse(connection: socket.socket, open_conversation: Open) -> None:
    """Answer until the other end hangs up."""
    sending = threading.Lock()

    def send(answer: Up) -> None:
        frame = _frame(answer)
        with sending, contextlib.suppress(ConnectionError):  # nobody waits for it any more
            connection.sendall(frame)

    interpreter = Interpreter(open_conversation, send)
    decoder = decoder_of_questions()
    with contextlib.suppress(ConnectionError):
        while data := connection.recv(READ_BYTES):
            for question in decoder.feed(data):
                interpreter.take(question)
    interpreter.end()


def _frame(answer: Up) -> bytes:
    """An answer on the wire; one that has no place there is a failure of its own chat."""
    try:
        return wire.encode(answer)
    except UnicodeEncodeError as error:  # a model may write half of a surrogate pair in JSON
        reason = f"text that is no Unicode: {error.reason}"
        if isinstance(answer, Begun):
            return wire.encode(Begun(answer.number, fault=reason))
        return wire.encode(Understood(answer.number, Heard(), failed=reason))


def main(arguments: list[str]) -> None:
    """Run an interpreter over an inherited socket."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(
        level=logging.WARNING, format="%(levelname)s interpreter %(name)s: %(message)s"
    )
    connection = socket.socket(fileno=int(arguments[0]))
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # text needs no GPU
    from appliance.engines.vllm.environment import prepare_environment

    prepare_environment("auto")
    from appliance.engines.vllm.toolcalls import ToolConversation

    logging.getLogger("vllm").setLevel(logging.ERROR)
    converse(connection, ToolConversation)


if __name__ == "__main__":
    main(sys.argv[1:])
