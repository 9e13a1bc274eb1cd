"""The substance of `hfspec bench` and `hfspec demo`: prompts, methods, measuring, the report and its chart.

Uses hfspec from outside, as a user would.
"""
