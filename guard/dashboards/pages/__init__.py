"""The dashboards, in the order in which an operator looks at them."""

from guard.dashboards.pages.detectors import DETECTORS
from guard.dashboards.pages.overview import OVERVIEW
from guard.dashboards.pages.policy import POLICY
from guard.dashboards.pages.steering import STEERING

PAGES = (OVERVIEW, DETECTORS, STEERING, POLICY)
