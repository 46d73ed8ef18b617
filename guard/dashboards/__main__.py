"""Writes the dashboards that ship: ``python -m guard.dashboards``."""

from __future__ import annotations

from guard.dashboards.grafana import to_json
from guard.dashboards.pages import PAGES
from guard.data import data_folder


def main() -> None:
    for page in PAGES:
        (data_folder("dashboards") / "grafana" / f"{page.uid}.json").write_text(to_json(page), encoding="utf-8")


if __name__ == "__main__":
    main()
