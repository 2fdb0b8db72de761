"""The pages of the dashboard, in the order of their digits."""

from __future__ import annotations

from tui.view import View
from tui.views.batches import Batches
from tui.views.chat import Chat
from tui.views.config import Config
from tui.views.events import Events
from tui.views.keys import Keys
from tui.views.memory import Memory
from tui.views.models import Models
from tui.views.overview import Overview
from tui.views.policies import Policies
from tui.views.requests import Requests
from tui.views.timeline import Timeline

VIEWS: tuple[type[View], ...] = (
    Overview,
    Timeline,
    Memory,
    Models,
    Requests,
    Batches,
    Policies,
    Config,
    Events,
    Keys,
    Chat,
)
