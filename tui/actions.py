"""Actions on rows: a key or a command asks for them, a form or a question may come before them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from textual.app import App

from tui.dialogs import ConfirmDialog, FormDialog, SecretPage
from tui.messages import DaemonRefused, DaemonSource
from tui.view import Action, Given, Secret, View

FEW = 3
"""Rows that a form or a question names; of more it says the number."""


class ActionRunner:
    """Runs the actions of views on a source, and tells the user what was done or refused."""

    def __init__(
        self, app: App[None], source: DaemonSource, *, off: str, done: Callable[[], None]
    ) -> None:
        """`app` shows forms, questions and notifications. `off` says why nothing may be changed, ""
        where it may. `done` is called after each run: answers of the daemon may be old."""
        self._app = app
        self._source = source
        self._off = off
        self._done = done

    def run_command(self, action: Action, view: View, words: str) -> None:
        """The answers follow the name: `ttft=5s queue=20`."""
        pairs = [word.partition("=") for word in words.split()]
        known = [field.name for field in action.fields]
        wrong = [name for name, _, value in pairs if name not in known or not value]
        if wrong:
            takes = ", ".join(f"{name}=VALUE" for name in known) or "nothing more"
            text = f"{action.name} takes {takes}, not {wrong[0]!r}"
            self._app.notify(text, severity="error")
        else:
            self.run(action, view, {name: value for name, _, value in pairs})

    def run(self, action: Action, view: View, given: Given | None = None) -> None:
        """Do it to the rows that are picked in the view, after a question if it has one. A form
        asks for its fields unless they are given."""
        keys = view.picked() if action.each_row else [""]
        if self._off:
            self._app.notify(f"{action.name}: {self._off}", severity="warning")
        elif not keys:
            self._app.notify(f"{action.name}: there is no row for it", severity="warning")
        elif action.fields and not given:
            self._ask_for_fields(action, view, keys)
        elif action.question is None:
            self._begin(action, keys, given or {})
        else:
            self._app.push_screen(
                ConfirmDialog(action.question.replace("{}", _some(keys))),
                partial(self._answered, action, keys),
            )

    def _ask_for_fields(self, action: Action, view: View, keys: list[str]) -> None:
        """The form says what holds now where the action is for one row."""
        row = view.current()
        known = row is not None and (not action.each_row or keys == [row[0]])
        here = row[1] if row is not None and known else {}
        fields = {field: field.now(here) for field in action.fields}
        self._app.push_screen(
            FormDialog(f"{action.name} {_some(keys)}".strip(), fields, action.left_empty),
            partial(self._filled, action, keys),
        )

    def _filled(self, action: Action, keys: list[str], given: Given | None) -> None:
        if given:
            self._begin(action, keys, given)

    def _answered(self, action: Action, keys: list[str], yes: bool | None) -> None:
        if yes:
            self._begin(action, keys, {})

    def _begin(self, action: Action, keys: list[str], given: Given) -> None:
        self._app.run_worker(self._carry_out(action, keys, given))

    async def _carry_out(self, action: Action, keys: list[str], given: Given) -> None:
        for key in keys:
            try:
                done = await action.do(self._source, key, given)
            except DaemonRefused as refusal:
                self._app.notify(f"{key or action.name}: {refusal}", severity="error")
            else:
                self._tell(done)
        self._done()

    def _tell(self, done: str | Secret) -> None:
        """What was done; a secret goes to a page of its own, and nowhere else."""
        if isinstance(done, Secret):
            self._app.push_screen(SecretPage(done.title, done.text))
            done = done.done
        self._app.notify(done)


def _some(keys: list[str]) -> str:
    return ", ".join(keys[:FEW]) + (f" and {len(keys) - FEW} more" * (len(keys) > FEW))
