"""Accounts of calls: what each of their sequences comes to, for the ledger and for monthly budgets.

A sequence reserves the tokens that it may need before it is computed, and is charged what it came
to at its end. Its client is sent the end when the ledger has it on the disk.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable
from itertools import count
from typing import Final, NamedTuple

import msgspec

from appliance.access.auth import Access, BudgetSpent, Caller
from appliance.engines.protocol import Produced
from appliance.http.errors import ApiError, BadRequest
from appliance.service.front_frames import Submit
from appliance.service.interface import RequestTimes
from appliance.usage.entries import CUT, WHOLE, Amounts, Entry, month_of
from appliance.usage.ledger import Ledger
from appliance.vocabulary import FinishReason, ModelName, RequestId

MICROSECONDS: Final = 1e6
BUDGET: Final = "budget"
"""The limit of a key whose month is spent, in metrics."""
ORGANIZATION_BUDGET: Final = "organization_budget"
"""That of its organization."""

_COMPLETE: Final = (FinishReason.STOP, FinishReason.LENGTH)


class _Budget(NamedTuple):
    """Tokens of a month that a key, or the keys of an organization together, may spend."""

    tokens: int
    key: str
    organization: str = ""
    """"": it is the key's own."""

    @property
    def limit(self) -> str:
        """As metrics name it."""
        return ORGANIZATION_BUDGET if self.organization else BUDGET

    @property
    def whose(self) -> str:
        name = self.organization
        return f"the organization {name!r} of its key" if name else "its key"


class Accounts:
    """The accounts of all calls. Without a `ledger` nothing is written, and no budget is kept."""

    def __init__(
        self,
        access: Access,
        ledger: Ledger | None = None,
    ) -> None:
        self.ledger = ledger
        self.wall_clock = access.wall_clock
        self._access = access
        self._reserved: Counter[str] = Counter()
        """Of each key."""
        self._reserved_of: Counter[str] = Counter()
        """Of each organization."""
        self._run = uuid.uuid4().hex
        self._numbers = count(1)

    def open(self, caller: Caller, line: str = "") -> Account:
        """The account of a call. `line` is the id of a line of a batch, which is the same when the
        line is asked again."""
        return Account(self, caller, line)

    def next_id(self) -> str:
        """Of an entry; no other run of the appliance has it."""
        return f"{self._run}-{next(self._numbers)}"

    def reserve(self, account: Account, tokens: int, together: int) -> int:
        """Tokens that a key may spend, also of its organization's; the first of several sequences
        says how many all of them need `together`. They are to be given back.
        Raises `ApiError` if a budget of the month has not that many, or has never that many, or if
        nothing can be counted."""
        if self.ledger is not None and self.ledger.full:
            message = "usage cannot be written down: the disk of the ledger takes no more data"
            raise ApiError(503, message, code="usage_not_counted", headers={"Retry-After": "5"})
        budgets = account.budgets
        if not budgets:
            return 0
        for budget in budgets:
            self._check(budget, max(tokens, together))
        self.give_back(account, -tokens)
        return tokens

    def _check(self, budget: _Budget, needed: int) -> None:
        """Raise `ApiError` if a budget does not have what is needed."""
        if self.ledger is None:
            owner = "this key" if not budget.organization else "the organization of this key"
            message = (
                f"{owner} has a monthly budget, but the appliance keeps no ledger to count it: "
                "usage.directory has to be set"
            )
            raise ApiError(503, message, code="budget_not_counted")
        if needed > budget.tokens:
            self._access.metrics.refused(budget.key, budget.limit)
            message = (
                f"this request may need {needed} tokens, and the whole monthly budget of "
                f"{budget.whose} is {budget.tokens}: ask for fewer (max_tokens), or have its "
                "tokens_per_month raised"
            )
            raise BadRequest(message, code="more_than_budget")
        now = self.wall_clock()
        if budget.organization:
            spent = self.ledger.spent_tokens_of(budget.organization, month_of(now))
            reserved = self._reserved_of[budget.organization]
        else:
            spent = self.ledger.spent_tokens(budget.key, month_of(now))
            reserved = self._reserved[budget.key]
        if spent + reserved + needed > budget.tokens:
            self._access.metrics.refused(budget.key, budget.limit)
            raise BudgetSpent(
                budget.tokens,
                spent,
                needed,
                now,
                others_may_give_back=spent + needed <= budget.tokens,
                organization=budget.organization,
            )

    def give_back(self, account: Account, tokens: int) -> None:
        """What was reserved is charged, or not needed."""
        of_key, of_organization = self._reserved, self._reserved_of
        for counter, name in ((of_key, account.key), (of_organization, account.organization)):
            counter[name] -= tokens
            if not counter[name]:
                del counter[name]


class Account:
    """What one call comes to: each of its sequences is an entry of the ledger, or all together are
    one, if the call is a line of a batch."""

    def __init__(self, accounts: Accounts, caller: Caller, line: str) -> None:
        self.accounts = accounts
        self.key = "" if caller.key is None else caller.key.name
        of = caller.organization
        self.organization = "" if of is None else of.name
        """Until its end, also if the key belongs to another one meanwhile."""
        self._of = of
        self.line = line
        self.charges: dict[RequestId, Charge] = {}
        self._caller = caller
        self._counted = False
        self._sums = Amounts()
        self._model: ModelName = ""
        self._reserved = 0

    @property
    def budgets(self) -> list[_Budget]:
        """Those that its sequences are within."""
        key, of, found = self._caller.key, self._of, []
        if key is not None and key.tokens_per_month is not None:
            found.append(_Budget(key.tokens_per_month, self.key))
        if of is not None and of.tokens_per_month is not None:
            found.append(_Budget(of.tokens_per_month, self.key, of.name))
        return found

    def begin(self, frame: Submit) -> Charge:
        """A sequence is asked for. Raises `ApiError` if its key may not have it."""
        input_tokens = len(frame.prompt) if frame.counts_prompt else 0
        tokens = input_tokens + frame.max_tokens
        # The first of several choices asks for all of them.
        together = frame.together_tokens if frame.counts_prompt else 0
        name = frame.asked or frame.model
        return self._charge(name, frame.request, input_tokens, tokens, together)

    def begin_elsewhere(
        self, model: ModelName, request: RequestId, input_tokens: int, tokens: int
    ) -> Charge:
        """Another server is asked, for so many tokens at most. Raises `ApiError` if its key may not
        have them."""
        return self._charge(model, request, input_tokens, tokens, 0)

    def _charge(
        self, model: ModelName, request: RequestId, input_tokens: int, tokens: int, together: int
    ) -> Charge:
        reserved = self.accounts.reserve(self, tokens, together)
        charge = self.charges[request] = Charge(self, model, request, input_tokens, reserved)
        return charge

    def request(self) -> int:
        """1 for the first sequence that is counted: all of them are one request."""
        counted, self._counted = self._counted, True
        return 0 if counted else 1

    def add(self, charge: Charge, entry: Entry, before: Amounts, go_on: Callable[[], None]) -> None:
        """A sequence is over; or it came to something else than `before`."""
        ledger = self.accounts.ledger
        if ledger is None:
            go_on()
        elif self.line:
            self._model = entry.model
            self._sums = self._sums + entry.amounts - before
            self._reserved += charge.reserved
            go_on()
        else:
            ledger.record(entry, go_on)
            self.accounts.give_back(self, charge.reserved)
        charge.reserved = 0

    def close_line(self, outcome: str, go_on: Callable[[], None]) -> None:
        """The line of a batch has its answer, or is given up: write what it came to. An entry for
        the same line, of an earlier attempt, is replaced. Once."""
        ledger, sums = self.accounts.ledger, self._sums
        self._sums = Amounts()
        if ledger is None or not sums:
            go_on()
        else:
            ended = self.accounts.wall_clock()
            entry = Entry(
                self.line, ended, self.key, self._model, outcome, sums,
                organization=self.organization,
            )  # fmt: skip
            ledger.record(entry, go_on)
        self.accounts.give_back(self, self._reserved)
        self._reserved = 0


class Charge:
    """What one sequence comes to."""

    __slots__ = ("_account", "_entry", "_input", "_model", "_request", "_settled", "_stopped_at",
                 "cached", "output", "over", "reserved")  # fmt: skip

    def __init__(
        self,
        account: Account,
        model: ModelName,
        request: RequestId,
        input_tokens: int,
        reserved: int,
    ) -> None:
        self.reserved = reserved
        self.output = 0
        self.cached = 0
        self.over = False
        self._account = account
        self._model = model
        self._request = request
        self._input = input_tokens
        self._entry: Entry | None = None
        self._stopped_at: int | None = None
        self._settled: Callable[[], None] = _nothing

    def produced(self, produced: Produced) -> None:
        """Output came."""
        self.output += produced.tokens
        self.cached += produced.cached

    def counted(self, input_tokens: int, cached: int, output: int) -> None:
        """Another server said what it comes to."""
        self._input, self.cached, self.output = input_tokens, cached, output

    def stopped(self, output_tokens: int, settled: Callable[[], None]) -> None:
        """A stop string ended it: its client is sent so many tokens. `settled` is called when that
        is counted; the sequence may be over already, with more tokens."""
        self._stopped_at = output_tokens
        if self._entry is not None:
            was = self._entry.amounts
            amounts = msgspec.structs.replace(was, output_tokens=output_tokens)
            entry = msgspec.structs.replace(self._entry, outcome=WHOLE, amounts=amounts)
            self._write(entry, was, settled)
        elif self.over:
            settled()
        else:
            self._settled = settled

    def end(
        self,
        finished: FinishReason | None,
        times: RequestTimes | None,
        go_on: Callable[[], None],
    ) -> None:
        """It is over: `go_on` is called when it is counted, or need not be. `finished` is why its
        output ended, None if it failed. One that was never computed does not count."""
        self.over = True
        computed = self.output or (times is not None and times.instances)
        if not computed and finished is None:
            self.drop()
            go_on()
            return
        stopped = self._stopped_at is not None
        times = RequestTimes() if times is None else times
        waited = times.queue_seconds + times.load_seconds + times.preempted_seconds
        entry = Entry(
            id=self._account.accounts.next_id(),
            ended=self._account.accounts.wall_clock(),
            key=self._account.key,
            model=self._model,
            outcome=WHOLE if stopped or finished in _COMPLETE else CUT,
            amounts=Amounts(
                requests=self._account.request(),
                input_tokens=self._input,
                cached_tokens=min(self.cached, self._input),
                output_tokens=self.output if self._stopped_at is None else self._stopped_at,
                device_microseconds=round(times.device_seconds * MICROSECONDS),
                waiting_microseconds=round(waited * MICROSECONDS),
            ),
            request=self._request,
            organization=self._account.organization,
        )
        settled, self._settled = self._settled, _nothing

        def both() -> None:
            settled()
            go_on()

        self._write(entry, Amounts(), both)

    def drop(self) -> None:
        """It was never computed, or is over. Idempotent."""
        self.over = True
        self._account.accounts.give_back(self._account, self.reserved)
        self.reserved = 0
        settled, self._settled = self._settled, _nothing
        settled()

    def _write(self, entry: Entry, before: Amounts, go_on: Callable[[], None]) -> None:
        self._entry = entry
        self._account.add(self, entry, before, go_on)


def _nothing() -> None:
    pass
