"""Grafana's dashboards as data: which questions an operator asks, and the queries that answer them.

``pages`` has one file for each dashboard, ``grafana`` turns them into Grafana's JSON, and ``python -m
guard.dashboards`` writes that to ``dashboards/grafana``, where it ships. Never imported by what serves requests.
"""
