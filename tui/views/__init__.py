"""The pages of the dashboard, in the order of their digits."""

from __future__ import annotations

from tui.view import View
from tui.views.batches import BatchesView
from tui.views.chat import ChatView
from tui.views.config import ConfigView
from tui.views.events import EventsView
from tui.views.keys import KeysView
from tui.views.memory import MemoryView
from tui.views.models import ModelsView
from tui.views.overview import OverviewView
from tui.views.policies import PoliciesView
from tui.views.requests import RequestsView
from tui.views.timeline import TimelineView
from tui.views.usage import UsageView

VIEWS: tuple[type[View], ...] = (
    OverviewView,
    TimelineView,
    MemoryView,
    ModelsView,
    RequestsView,
    BatchesView,
    PoliciesView,
    ConfigView,
    EventsView,
    KeysView,
    UsageView,
    ChatView,
)
