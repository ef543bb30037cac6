"""Hydra config groups, importable as `lightning_zero.conf` and composable from any app.

Write ``hydra.searchpath: [pkg://lightning_zero.conf]`` and ``defaults: [- strategy: zero2]`` in an app's own config,
and ``strategy: ${strategy}`` in its trainer node. Only YAML lives here.
"""
