"""The pages of the dashboard, in the order of their digits."""

from __future__ import annotations

from tui.view import View
from tui.views.events import Events
from tui.views.models import Models
from tui.views.overview import Overview
from tui.views.requests import Requests

VIEWS: tuple[type[View], ...] = (Overview, Models, Requests, Events)
